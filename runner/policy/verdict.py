"""The judge: what one step's numbers mean, given the clean steps before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from runner.policy.signals import Limits, StepSignals
from runner.policy.window import Window


class Kind(Enum):
    clean = "Clean"
    non_finite = "NonFinite"
    spike = "Spike"
    drift = "Drift"
    level_shift = "LevelShift"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A judgement and the sentence that explains it.

    ``onset_step`` and ``onset`` (sample position) say where the trouble began; for a single
    bad step that is the step itself, for a drift where the excess began to pile up.
    """

    kind: Kind
    reason: str
    onset_step: int
    onset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeRules:
    """Thresholds; ``runner.config.GuardConfig`` documents each."""

    enabled: bool
    window: int
    min_history: int
    loss_sigmas: float
    loss_floor: float
    norm_sigmas: float
    norm_floor: float
    drift_slack: float
    drift_nats: float


class Baseline:
    """What normal looks like: statistics of applied steps only. Rolled back with the weights.

    The limits in force lag one applied step behind the statistics. On CUDA the host reads
    the numbers one step late; with the lag, reading late and reading at once give the same
    limits and so the same run, bit for bit.
    """

    def __init__(self, rules: JudgeRules) -> None:
        self._rules = rules
        self._loss = Window(rules.window)
        self._log_norm = Window(rules.window)
        self._next_limits = Limits()
        self._best_level = math.inf
        self._drift = 0.0
        self._drift_onset = (0, 0)
        self.limits = Limits()
        self.first_loss = math.nan
        self.clean_streak = 0

    def accept(self, signals: StepSignals) -> None:
        """Admit an applied, clean step."""
        self.clean_streak += 1
        if not self._rules.enabled:
            return  # what was not judged may be anything, NaN included
        if math.isnan(self.first_loss):
            self.first_loss = signals.loss
        self._pile_up_drift(signals)
        self._loss.push(signals.loss)
        self._log_norm.push(_log(signals.grad_norm))
        if self._is_armed():
            self._best_level = min(self._best_level, self._loss.median())
        self.limits, self._next_limits = self._next_limits, self._compute_limits()

    def refuse(self) -> None:
        """Note a step that was not clean: probations of checkpoints begin anew."""
        self.clean_streak = 0

    def restart_at(self, losses: list[float], grad_norms: list[float]) -> None:
        """Take a new level as normal: forget the old statistics, begin with these values."""
        self._loss = Window(self._rules.window, losses)
        self._log_norm = Window(self._rules.window, [_log(norm) for norm in grad_norms])
        self._best_level = self._loss.median() if self._is_armed() else math.inf
        self._drift = 0.0
        self._next_limits = self._compute_limits()
        self.limits = self._next_limits

    def recent(self, count: int) -> list[tuple[float, float]]:
        """(loss, grad norm) of the newest clean steps, in order."""
        norms = [math.exp(value) for value in self._log_norm.values()[-count:]]
        return list(zip(self._loss.values()[-count:], norms, strict=True))

    def judge(self, signals: StepSignals) -> Verdict:
        """The verdict on one attempted step. Pure: nothing is admitted here."""
        kind, reason = self._classify(signals)
        if kind is Kind.drift and self._drift > 0.0:
            onset_step, onset = self._drift_onset
        else:
            onset_step, onset = signals.step, signals.start
        return Verdict(kind=kind, reason=reason, onset_step=onset_step, onset=onset)

    def _classify(self, signals: StepSignals) -> tuple[Kind, str]:
        # Non-finite first: NaN compares False with everything, so no limit would catch it.
        if not self._rules.enabled:
            return Kind.clean, "guard.enabled=false"
        if not signals.is_finite:
            return Kind.non_finite, (
                f"loss {signals.loss:g}, grad norm {signals.grad_norm:g}, "
                f"{signals.nonfinite_ranks} rank(s) with NaN or Inf"
            )
        if self.limits.exceeded(signals):
            return Kind.spike, self._explain_spike(signals)
        excess = self._excess(signals.loss)
        if self._drift + excess > self._rules.drift_nats:
            return Kind.drift, (
                f"loss {signals.loss:.3f} and its recent run lie above the best held level "
                f"{self._best_level:.3f}: summed excess {self._drift + excess:.2f} > "
                f"guard.drift_nats={self._rules.drift_nats:g}"
            )
        return Kind.clean, "within limits"

    def _explain_spike(self, signals: StepSignals) -> str:
        parts = []
        if signals.loss > self.limits.loss:
            parts.append(
                f"loss {signals.loss:.3f} > limit {self.limits.loss:.3f} "
                f"(median {self._loss.median():.3f})"
            )
        if signals.grad_norm > self.limits.grad_norm:
            parts.append(
                f"grad norm {signals.grad_norm:.3g} > limit {self.limits.grad_norm:.3g} "
                f"(median {math.exp(self._log_norm.median()):.3g})"
            )
        return ", ".join(parts)

    def _is_armed(self) -> bool:
        return self._rules.enabled and len(self._loss) >= self._rules.min_history

    def _compute_limits(self) -> Limits:
        if not self._is_armed():
            return Limits()
        rules = self._rules
        loss = self._loss.median() + max(rules.loss_sigmas * self._loss.sigma(), rules.loss_floor)
        log_norm = self._log_norm.median() + max(
            rules.norm_sigmas * self._log_norm.sigma(), rules.norm_floor
        )
        return Limits(loss=loss, grad_norm=math.exp(min(log_norm, 700.0)))

    def _excess(self, loss: float) -> float:
        """Page's test (CUSUM, 1954) against the best level held; slack grows with the noise."""
        if not math.isfinite(self.limits.loss):
            return 0.0  # armed no earlier than the gate, or one unjudged spike would be a drift
        return loss - self._best_level - max(self._rules.drift_slack, self._loss.sigma())

    def _pile_up_drift(self, signals: StepSignals) -> None:
        if self._drift == 0.0:
            self._drift_onset = (signals.step, signals.start)
        self._drift = max(0.0, self._drift + self._excess(signals.loss))

    def to_json(self) -> dict[str, Any]:
        """Everything, exactly: floats survive JSON bit for bit (shortest repr)."""
        return {
            "loss": self._loss.values(),
            "log_norm": self._log_norm.values(),
            "limits": _limits_to_json(self.limits),
            "next_limits": _limits_to_json(self._next_limits),
            "best_level": _finite(self._best_level),
            "drift": self._drift,
            "drift_onset": list(self._drift_onset),
            "first_loss": _finite(self.first_loss),
            "clean_streak": self.clean_streak,
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._loss = Window(self._rules.window, state["loss"])
        self._log_norm = Window(self._rules.window, state["log_norm"])
        self.limits = _limits_from_json(state["limits"])
        self._next_limits = _limits_from_json(state["next_limits"])
        self._best_level = math.inf if state["best_level"] is None else state["best_level"]
        self._drift = state["drift"]
        self._drift_onset = (state["drift_onset"][0], state["drift_onset"][1])
        self.first_loss = math.nan if state["first_loss"] is None else state["first_loss"]
        self.clean_streak = state["clean_streak"]


def _log(norm: float) -> float:
    """Log of a grad norm; a norm of zero (all targets masked) is no news, not minus infinity."""
    return math.log(max(norm, 1e-30))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _limits_to_json(limits: Limits) -> list[float | None]:
    return [_finite(limits.loss), _finite(limits.grad_norm)]


def _limits_from_json(values: list[float | None]) -> Limits:
    loss, norm = (math.inf if value is None else value for value in values)
    return Limits(loss=loss, grad_norm=norm)
