"""Diagnoses a stretch of trouble when it ends: its shape and its likely cause.

The shape is how it ended: by itself, by a rollback, or as a rise visible in no single step.
The cause is read from the steps *before* the first bad one, as afterwards all norms are large:
a flat norm that jumps suggests the data, one that crept up suggests the learning rate or the
numerics; NaN after a calm norm suggests a sample or layer. A small rise is unclear, as norms also
rise without cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from runner.policy.decision.signals import StepSignals, finite

# From this share of the drift alarm's height at the onset on, it is a divergence, not a jump.
_RISING_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PreOnset:
    """The clean steps before the onset.

    ``loss`` and ``grad_norm`` are medians; ``creep`` is the factor of the newest norms above their
    median if beyond noise, else 1, and ``is_creep_clear`` whether it exceeds normal variation;
    ``drift_share`` is the share of the drift alarm's height that was reached.
    """

    loss: float
    grad_norm: float
    creep: float
    is_creep_clear: bool
    drift_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Bad steps that belong together. Positions are half open; ``num_tried`` counts attempts."""

    onset_step: int
    start: int
    stop: int
    num_bad: int = 0
    num_nonfinite: int = 0
    num_tried: int = 0
    first_norm: float | None = None
    worst_loss: float | None = None
    before: PreOnset

    @classmethod
    def begin(cls, step: int, start: int, before: PreOnset) -> Episode:
        """Begin an episode without steps."""
        return cls(onset_step=step, start=start, stop=start, before=before)

    def with_step(self, signals: StepSignals, *, is_bad: bool) -> Episode:
        """Return the episode extended by one attempted step."""
        if not is_bad:
            return replace(self, num_tried=self.num_tried + 1)
        return replace(
            self,
            num_tried=self.num_tried + 1,
            num_bad=self.num_bad + 1,
            num_nonfinite=self.num_nonfinite + (not signals.is_finite),
            stop=signals.stop,
            first_norm=self.first_norm if self.num_bad else finite(signals.grad_norm),
            worst_loss=max(self.worst_loss or -math.inf, signals.loss)
            if math.isfinite(signals.loss)
            else self.worst_loss,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Episode:
        """Inverse of :meth:`to_json`."""
        return cls(**{**state, "before": PreOnset(**state["before"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """An episode's end: ``shape`` is transient, persistent or divergence."""

    episode: Episode
    shape: str
    course: str
    cause: str
    why: str

    def describe(
        self, onset_step: int | None = None, *, confirmed: Mapping[str, Any] | None = None
    ) -> str:
        """Describe the episode in one sentence; a replay passes the recorded step number.

        ``confirmed`` is the cause found by replays; without it the cause is only suspected.
        """
        step = self.episode.onset_step if onset_step is None else onset_step
        message = f"{self.shape} from step {step}: {self.course}"
        if confirmed is not None:
            return f"{message}; cause: {confirmed['cause']} ({confirmed['why']})"
        return f"{message}; suspected cause: {self.cause} ({self.why})"


def transient(episode: Episode) -> Diagnosis:
    """An episode that stopped by itself once its steps were discarded."""
    course = f"{_bad_steps(episode)}, then clean again without going back"
    return _finding(episode, "transient", course)


def scattered(episode: Episode) -> Diagnosis:
    """Diagnose an episode that never stopped and never justified a rollback."""
    course = f"{_bad_steps(episode)} among {episode.num_tried}, never enough at once to go back"
    return _finding(episode, "persistent", course)


def stopped(episode: Episode, *, drifted: bool, how: str) -> Diagnosis:
    """Diagnose an episode that a decision ended; ``how`` says which."""
    if drifted or episode.before.drift_share >= _RISING_SHARE:
        return _finding(episode, "divergence", f"the loss kept rising; {how}")
    course = f"{_bad_steps(episode)} among {episode.num_tried}; {how}"
    return _finding(episode, "persistent", course)


def _finding(episode: Episode, shape: str, course: str) -> Diagnosis:
    cause, why = _suspect(episode)
    return Diagnosis(episode=episode, shape=shape, course=course, cause=cause, why=why)


def blames_data(episode: Episode) -> bool:
    """Whether bad steps came without warning, so that neither rate nor state is the cause."""
    return episode.num_bad > 0 and episode.before.creep <= 1.0


def _suspect(episode: Episode) -> tuple[str, str]:
    before = episode.before
    usual = f"{before.grad_norm:.3g}"
    if before.creep > 1.0 and not before.is_creep_clear:
        return "unclear", (
            f"the grad norm had risen to {before.creep:.2g} times its usual {usual} before: too "
            "little to distinguish the rate from the data"
        )
    if before.creep > 1.0:
        return "learning rate or numerics", (
            f"the grad norm had crept up to {before.creep:.2g} times its usual {usual} before"
        )
    if episode.num_bad and episode.num_nonfinite == episode.num_bad:
        return "one sample or one layer", f"not finite out of a calm grad norm of {usual}"
    if not episode.num_bad:
        return "data", f"its mix or its difficulty: the grad norm stayed at {usual} all along"
    if episode.first_norm is None:
        return "data", f"grad norm flat at {usual} before, then not finite"
    return "data", f"grad norm flat at {usual} before, {episode.first_norm:.3g} at the onset"


def _bad_steps(episode: Episode) -> str:
    return f"{episode.num_bad} bad step" + ("" if episode.num_bad == 1 else "s")
