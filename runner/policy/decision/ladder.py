"""The decision ladder: turns a verdict and the history into one action with its reason.

one bad step            discard it
bad steps persist       back to the newest clean checkpoint before the onset, skip the range
it comes back           an older checkpoint, a wider range; then a lower rate for a while, unless
                        it came without warning each time, as bad data does
it comes back, level    finite and steady from other weights too: it is the data's new
                        level; take it as the new baseline
budget spent            halt: a person must look
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from runner.config.schema import GuardConfig
from runner.policy.decision.episode import (
    Diagnosis,
    Episode,
    PreOnset,
    blames_data,
    scattered,
    transient,
)
from runner.policy.decision.history import History
from runner.policy.decision.judge import Kind, Verdict
from runner.policy.decision.signals import StepSignals
from runner.policy.decision.skip_ledger import Ledger
from runner.policy.decision.window import MAD_TO_SIGMA
from runner.policy.retention.records import Reach, Record, older_targets, rollback_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyRules:
    """The settings of the ladder, and what they are measured in.

    ``batch`` is the global batch in samples: margins are configured in steps' worth of it.
    ``untrained_loss`` (nats per token) is that of a uniform guess if known, 0 to use the run's
    first loss, infinity if that was not an untrained model's either.
    """

    guard: GuardConfig
    batch: int
    untrained_loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebaseline:
    """Accept the level of these steps as normal from here on.

    ``applied``: they were within the gate's limits (a drift), so this step counts.
    """

    reason: str
    applied: bool
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """Go back to the first usable one of ``targets`` (best first) and never read ``skip``.

    ``read_again``: read it again, like a plain restart. ``lacks_target``:
    see :class:`Halt`; the oldest checkpoint must do. ``cuts_at_once``: the rate is lower from the
    checkpoint on, not from the onset.
    """

    reason: str
    targets: tuple[Record, ...]
    skip: tuple[int, int]
    read_again: bool
    onset_step: int
    repeat: int
    cut_factor: float
    cut_steps: int
    cuts_at_once: bool = False
    lacks_target: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """A person must look. ``lacks_target``: no clean checkpoint lies before the onset, so far.

    ``settings``: overrides, or keys alone, with which it may go on.
    """

    reason: str
    settings: tuple[str, ...]
    lacks_target: bool = False


Action = Apply | Discard | Rebaseline | Rollback | Halt


@dataclass(frozen=True, slots=True, kw_only=True)
class BadStep:
    step: int
    start: int
    stop: int
    loss: float
    grad_norm: float
    finite: bool


_FOR_GOOD = 1 << 40  # updates
# Of the learning rate, for guard.cooldown_steps updates.
_COOLDOWN = 0.5
# Attempted steps among which guard.persist bad ones force a rollback (twice persist, if that is
# more): three hard batches within ten steps would be one false rollback.
_PERSIST_WINDOW = 10
# Trouble within so many steps of the last rollback's onset is the same trouble again.
_REPEAT_WINDOW = 200
# Discarded steps in a row without a rollback before the run halts: nothing is learned any more.
_MAX_DISCARDS = 100
# Applied steps for guard.max_rollbacks.
_BUDGET_WINDOW = 1000
# Steps are level if their robust sigma is below this share of their median.
_LEVEL_SPREAD = 0.1
# Report an episode without end or rollback after this many windows.
_LONGEST_EPISODE = 10


class BadStepTracker:
    """The bad steps that may belong together. Rolled back with the weights.

    ``bad``: bad steps among the last ``window`` attempted ones, and the whole current run of
    bad steps, however long; an older bad step is separate trouble.
    """

    def __init__(self, guard: GuardConfig) -> None:
        self.window = max(_PERSIST_WINDOW, 2 * guard.persist)
        self._recent: deque[bool] = deque(maxlen=self.window)
        self._num_recent = 0
        self.bad: list[BadStep] = []
        self.in_a_row = 0
        self.episode: Episode | None = None

    def note(self, signals: StepSignals, before: PreOnset | None = None) -> Diagnosis | None:
        """Record one attempted step; ``before`` is given for a bad one.

        Returns the diagnosis of an episode that ends here, after ``window`` clean steps.
        """
        is_bad = before is not None
        recent = self._recent
        if len(recent) == self.window:
            self._num_recent -= recent[0]
        recent.append(is_bad)
        if before is not None:
            self._num_recent += 1
            self.in_a_row += 1
            self.bad.append(_bad_step(signals))
            self.episode = self.episode or Episode.begin(signals.step, signals.start, before)
        else:
            self.in_a_row = 0
        if self.bad:
            del self.bad[: len(self.bad) - max(self.in_a_row, self._num_recent)]
        if self.episode is None:
            return None
        self.episode = self.episode.with_step(signals, is_bad=is_bad)
        return self._ended(self.episode)

    def _ended(self, episode: Episode) -> Diagnosis | None:
        if not self._num_recent:
            finding = transient(episode)
        elif self._num_recent == 1 and episode.num_tried >= _LONGEST_EPISODE * self.window:
            finding = scattered(episode)
        else:
            return None
        self.episode = None
        return finding

    def settle(self) -> None:
        """End the episode: its level is the new normal."""
        self._recent.clear()
        self._num_recent = 0
        self.bad.clear()
        self.in_a_row = 0
        self.episode = None

    def num_recent(self) -> int:
        """Bad steps among the last ``window`` attempted ones."""
        return self._num_recent

    def last_run(self) -> list[BadStep]:
        """The current run of consecutive bad steps."""
        return self.bad[len(self.bad) - self.in_a_row :]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; bad steps that were not finite have no numbers."""
        return {
            "recent": list(self._recent),
            "bad": [asdict(step) | ({} if step.finite else _NO_NUMBERS) for step in self.bad],
            "in_a_row": self.in_a_row,
            "episode": self.episode.to_json() if self.episode else None,
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._recent.clear()
        self._recent.extend(state["recent"])
        self._num_recent = sum(self._recent)
        self.bad = [BadStep(**step) for step in state["bad"]]
        self.in_a_row = state["in_a_row"]
        episode = state["episode"]
        self.episode = Episode.from_json(episode) if episode else None


_NO_NUMBERS = {"loss": 0.0, "grad_norm": 0.0}


def _bad_step(signals: StepSignals) -> BadStep:
    return BadStep(
        step=signals.step,
        start=signals.start,
        stop=signals.stop,
        loss=signals.loss,
        grad_norm=signals.grad_norm,
        finite=signals.is_finite,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of computing the step again.

    Args:
        proven: a proven cause that lies in no sample, in words: skipping would not cure it.
        may_discard: whether single steps are left out all the same: an engine that makes no update
            in a wider precision cannot apply them.
        may_settle: whether a lasting level may be the data's, for all that is known.
        is_mix: the data mix changes from here on.
        blames_weights: known good samples are bad with these weights as well.
        rate_factor: factor on the learning rate at which the same steps are good.
    """

    proven: str = ""
    may_discard: bool = False
    may_settle: bool = True
    is_mix: bool = False
    blames_weights: bool = False
    rate_factor: float | None = None


NOT_REPLAYED = Replayed()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInput:
    """The inputs of a decision. ``trouble`` has already noted the step.

    ``untrained_loss`` (nats per token) bounds a new baseline: a level worse than an untrained
    model's is not a data mix. ``recent`` are (loss, grad norm) of the newest clean steps, in order.
    """

    verdict: Verdict
    signals: StepSignals
    trouble: BadStepTracker
    history: History
    ring: Sequence[Record]
    rules: RemedyRules
    untrained_loss: float
    recent: Sequence[tuple[float, float]] = ()
    replayed: Replayed = NOT_REPLAYED

    @property
    def reads_again(self) -> bool:
        """Whether no sample is at fault; then samples are read again, at most twice."""
        replayed = self.replayed
        return replayed.rate_factor is not None or (replayed.blames_weights and self.repeat <= 1)

    @property
    def repeat(self) -> int:
        """How often in a row trouble came back soon after a rollback; 0 the first time."""
        if not self.history.rollbacks:
            return 0
        last = self.history.rollbacks[-1]
        is_soon = self.verdict.onset_step - last.onset_step <= _REPEAT_WINDOW
        return last.repeat + 1 if is_soon else 0

    @property
    def onset(self) -> tuple[int, int]:
        """Step and sample position at which the trouble began."""
        if self.verdict.kind is Kind.drift:
            return self.verdict.onset_step, self.verdict.onset
        first = self.trouble.bad[0]
        return first.step, first.start


def decide(case: DecisionInput) -> Action:
    """Decide the action for this step."""
    verdict, trouble, guard = case.verdict, case.trouble, case.rules.guard
    if verdict.kind is Kind.clean:
        return Apply(reason=verdict.reason)
    if verdict.kind is not Kind.drift:
        if trouble.in_a_row > _MAX_DISCARDS:
            reason = f"{trouble.in_a_row} steps in a row discarded: {verdict.reason}"
            return Halt(reason=reason, settings=_to_try(case))
        if case.reads_again:
            back = _go_back(case)
            if isinstance(back, Rollback) or case.replayed.proven:
                return back
        elif case.replayed.proven and not (
            case.replayed.may_discard and trouble.num_recent() < guard.persist
        ):
            return Halt(
                reason=f"{case.replayed.proven}. No sample is at fault, so "
                f"{'no more are' if case.replayed.may_discard else 'none is'} skipped: "
                f"{verdict.reason}",
                settings=_to_try(case),
            )
        # With the guard off, a step that the engine itself skips is discarded, and that is all.
        if trouble.num_recent() < guard.persist or not guard.enabled:
            return Discard(reason=verdict.reason)
        may_settle = case.replayed.may_settle and (case.repeat or case.replayed.is_mix)
        if may_settle and _is_level(trouble.last_run(), case.untrained_loss):
            return _settle_or_wait(trouble.last_run(), guard, is_mix=case.replayed.is_mix)
    elif case.repeat and _has_settled(case.recent, guard):
        why = "came back after a rollback and no longer rises"
        return _accept(case.recent, why, applied=True)
    return _go_back(case)


def _is_level(run: Sequence[BadStep], untrained_loss: float) -> bool:
    if len(run) < 2 or not all(step.finite for step in run):
        return False
    losses = [step.loss for step in run]
    center = statistics.median(losses)
    spread = MAD_TO_SIGMA * statistics.median(abs(loss - center) for loss in losses)
    return spread <= _LEVEL_SPREAD * center and max(losses) <= untrained_loss


def _settle_or_wait(run: Sequence[BadStep], guard: GuardConfig, *, is_mix: bool) -> Action:
    why = "on samples that look like those far ahead" if is_mix else "after a rollback too"
    said = f"bad steps in a row, {why}"
    if len(run) < guard.level_steps:
        return Discard(reason=f"{len(run)} level {said}; a new baseline at {guard.level_steps}")
    values = [(step.loss, step.grad_norm) for step in run]
    return _accept(values, f"holds for {len(run)} {said}", applied=False)


def _has_settled(recent: Sequence[tuple[float, float]], guard: GuardConfig) -> bool:
    """Whether a drift has reached a new level: the later half is no higher than the earlier."""
    losses = [loss for loss, _ in recent[-guard.level_steps :]]
    half = len(losses) // 2
    if len(losses) < guard.level_steps:
        return False
    early, late = statistics.median(losses[:half]), statistics.median(losses[half:])
    spread = MAD_TO_SIGMA * statistics.median(abs(loss - early) for loss in losses[:half])
    # The error of a median of n values is about 1.25 sigma / sqrt(n).
    return bool(late - early <= 1.25 * spread / half**0.5)


def _accept(values: Sequence[tuple[float, float]], what: str, *, applied: bool) -> Rebaseline:
    center = statistics.median(loss for loss, _ in values)
    return Rebaseline(
        reason=f"loss level {center:.3f} {what}: the data's level changed, not the model",
        applied=applied,
        losses=tuple(loss for loss, _ in values),
        grad_norms=tuple(norm for _, norm in values),
    )


def _to_try(case: DecisionInput) -> tuple[str, ...]:
    """Settings that may remove the cause, as far as it is known; a device needs another node."""
    replayed = case.replayed
    if replayed.proven:
        keys = {"compute.precision=fp32": replayed.may_discard, "optim.lr": replayed.rate_factor}
        return tuple(key for key, is_cause in keys.items() if is_cause)
    start, stop = _skip_range(case)
    skip = () if case.verdict.kind is Kind.drift else (f"data.skip=[[{start},{stop}]]",)
    return (*skip, "optim.lr")


def _go_back(case: DecisionInput) -> Rollback | Halt:
    guard, repeat, reason = case.rules.guard, case.repeat, case.verdict.reason
    rollbacks, step = case.history.rollbacks, case.signals.step
    spent = sum(step - past.onset_step < _BUDGET_WINDOW for past in rollbacks)
    if spent >= guard.max_rollbacks:
        return Halt(
            reason=f"{spent} rollbacks within {_BUDGET_WINDOW} steps "
            f"(guard.max_rollbacks={guard.max_rollbacks}) and trouble again: {reason}",
            settings=(*_to_try(case), f"guard.max_rollbacks={2 * guard.max_rollbacks or 1}"),
        )
    onset_step, _ = case.onset
    skip = _skip_range(case)
    targets = rollback_targets(case.ring, cursor=skip[0], step=max(0, onset_step - guard.back))
    lacks_target = not targets
    if not targets and case.verdict.kind is Kind.drift:
        # A slow rise may have begun before the oldest checkpoint. Each of its steps was clean, so
        # that one is the best available, and better than waiting for a person.
        targets = rollback_targets(case.ring, cursor=case.signals.start, step=step)[-1:]
        skip = (max(skip[0], targets[0].cursor), skip[1]) if targets else skip
    if not targets:
        return Halt(
            reason=f"no clean checkpoint at or before sample position {skip[0]} to go back to: "
            f"{reason}",
            settings=_to_try(case),
            lacks_target=True,
        )
    is_last = spent + 1 == guard.max_rollbacks
    cut = Cut.of(case, may_cool=is_last or not _blames_data(case))
    # The rate was tested from the newest one.
    older = 0 if case.replayed.rate_factor is not None else repeat
    return Rollback(
        reason=_explain(case, cut),
        targets=tuple(older_targets(targets, older)),
        skip=skip,
        read_again=case.reads_again,
        onset_step=onset_step,
        repeat=repeat,
        cut_factor=cut.factor,
        cut_steps=cut.steps,
        cuts_at_once=case.replayed.rate_factor is not None,
        lacks_target=lacks_target,
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """A lower learning rate for ``steps`` updates; 0 for no cut."""

    factor: float = 1.0
    steps: int = 0

    @classmethod
    def of(cls, case: DecisionInput, *, may_cool: bool) -> Cut:
        """Choose the cut; ``may_cool`` allows the ladder's own."""
        guard = case.rules.guard
        if case.replayed.rate_factor is not None:
            # A rate that is too high again is cut for good.
            for_good = any(cut.factor != _COOLDOWN for cut in case.history.cuts)
            return cls(
                case.replayed.rate_factor, _FOR_GOOD if for_good else max(1, guard.cooldown_steps)
            )
        if case.repeat >= 2 and may_cool and not case.reads_again and guard.cooldown_steps:
            return cls(_COOLDOWN, guard.cooldown_steps)
        return cls()


def _blames_data(case: DecisionInput) -> bool:
    """Whether the data is the cause, so that a lower rate would only slow learning."""
    episode = case.trouble.episode
    return case.verdict.kind is not Kind.drift and episode is not None and blames_data(episode)


def reach(
    trouble: BadStepTracker, rules: RemedyRules, *, updates: int, cursor: int, ledger: Ledger
) -> Reach:
    """How far back a rollback would go if the next step were bad.

    Its onset is the first of the bad steps that may still belong together, or the next step, as in
    :attr:`DecisionInput.onset`. A drift's onset is ignored: it may be any number of checkpoints
    back, and :func:`decide` handles that.
    """
    first = trouble.bad[0] if trouble.bad else None
    step, start = (first.step, first.start) if first else (updates + 1, cursor)
    return Reach(
        step=max(0, step - rules.guard.back),
        cursor=ledger.before(start, rules.guard.margin * rules.batch),
    )


def _skip_range(case: DecisionInput) -> tuple[int, int]:
    """The range to skip: from before the onset to the end of the trouble, wider with each repeat.

    The margin counts samples that were read, excluding the ledger's.
    """
    guard, batch = case.rules.guard, case.rules.batch
    ahead = max(guard.ahead, guard.persist) * 2**case.repeat if case.repeat else guard.ahead
    start = case.history.ledger.before(case.onset[1], guard.margin * batch)
    return start, case.signals.stop + ahead * batch


def _explain(case: DecisionInput, cut: Cut) -> str:
    guard, repeat = case.rules.guard, case.repeat
    parts = [case.verdict.reason]
    if case.verdict.kind is not Kind.drift:
        parts.append(
            f"{case.trouble.num_recent()} bad steps among the last {case.trouble.window} attempted"
        )
    if case.reads_again:
        parts.append("samples known to be good are bad with these weights too: nothing is skipped")
    if repeat and case.replayed.rate_factor is None:
        wider = "" if case.reads_again else " and a wider range"
        parts.append(f"repeat {repeat}: an older checkpoint{wider}")
    if cut.steps:
        since = "here" if case.replayed.rate_factor is not None else "the onset"
        parts.append(f"learning rate times {cut.factor:.3g} for {cut.steps} updates from {since}")
    elif repeat >= 2 and guard.cooldown_steps:
        parts.append("the data is suspected: the learning rate stays")
    return "; ".join(parts)
