"""The judge: whether a step is bad, given the clean steps before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from runner.config.schema import GuardConfig
from runner.policy.decision.episode import PreOnset
from runner.policy.decision.signals import Bounds, Limits, StepSignals, finite, limits_of
from runner.policy.decision.window import Window, median_of_sorted


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
    bad step that is the step itself, for a drift the step where the excess began. ``limits``
    are the limits that the step was compared with.
    """

    kind: Kind
    reason: str
    onset_step: int
    onset: int
    limits: Limits = field(default_factory=Limits)


# The level for judging a falling loss: the median of this many newest losses. Five
# follow the steepest hundred steps of a language model closely; two bad ones do not move it.
_LEVEL_STEPS = 5
# Slope, noise and tail of the whole window are compared with the newest steps: where a
# steep beginning has just ended, most of the window still shows another curve.
_LATE_STEPS = 16
# A slope correction is at most this share of loss_floor: a steep fall that stops is not a fault,
# and a limit below the level would never admit the level.
_MOST_BIAS = 0.5
# Sixteen values estimate the noise to about a third, and the tail worse; this allows for it.
_LATE_SIGMAS = 2.0
_LATE_TAIL = 1.5
# Shares of loss_floor, which so holds the unit of the loss. Two high losses in a row: 0.25 nats
# each by default; with the sigmas this finds jumps of 0.5 nats in a noise of 0.06 to 0.08, and
# nothing in the recorded healthy runs.
_PAIR_SIGMAS = 3.0
_PAIR_FLOOR = 0.625
# A pair must exceed the window's own tail: this many times as far above the middle as the
# third highest value (one or two hard batches do not move it). That is 3.5 sigmas of normal noise,
# more where tails are heavy.
_TAIL_RANK = 3
_PAIR_TAILS = 2.0
# A drift forgives 0.12 nats above the best level, or one robust sigma, and the median of the newest
# losses must lie 0.2 nats above it: shallower waves, such as those of epochs, are left alone.
_DRIFT_SLACK = 0.3
_DRIFT_RISE = 0.5
# No single step may bring more than this share of the alarm: a drift is many steps' agreement.
_DRIFT_STEPS = 10
# The alarm's minimum height in robust sigmas of the loss. With the slack of one sigma, normal noise
# reaches it by chance about once in exp(2 * 0.6 * 16) = 2e8 steps.
_DRIFT_SIGMAS = 16.0
# The best level rises by one slack in this many steps: a slower rise is the data or the schedule.
_DRIFT_MEMORY = 1000
# A run whose best level is above its beginning has learned nothing that a rollback would
# save. Above: by this share of loss_floor (0.1 nats) and so many robust sigmas (the median of five
# errs by half a sigma).
_BEGINNING_STEPS = 5
_ABOVE_BEGINNING = 0.25
_ABOVE_BEGINNING_SIGMAS = 2.0
# Healthy log norms lie less than this many robust sigmas above their median in the recorded runs.
_NORM_SIGMAS = 13.0
# The normal norm before trouble comes from this many newest clean steps.
_BEFORE_STEPS = 8


@dataclass(frozen=True, slots=True)
class _Noise:
    """Median, robust sigma, and the tail's height above the median."""

    center: float
    sigma: float
    tail: float


def _noise(window: Window) -> _Noise:
    center, sigma = window.center_and_sigma()
    return _Noise(center, sigma, _PAIR_TAILS * (window.largest(_TAIL_RANK) - center))


def _late_noise(late: Window) -> _Noise:
    """The noise of the newest steps only, with an allowance for their small number."""
    center, sigma = late.center_and_sigma()
    tail = _LATE_TAIL * _PAIR_TAILS * (late.largest(1) - center)
    return _Noise(center, _LATE_SIGMAS * sigma, tail)


class Baseline:
    """The normal range: statistics of applied steps only. Rolled back with the weights.

    A loss is compared with two levels: the median of the window, and the median of the last
    five steps. The first does not follow a rise, the second follows a fall: in the first
    hundreds of steps the window's median lies whole nats above the curve and would hide any
    jump. How far a healthy loss lies from the second (the surprise: its bias where the loss
    falls, its spread) is measured on the window too, so no slope has to be assumed.

    One high loss may be a hard batch, two in a row are less likely so: after a step above the pair
    limit that limit holds. So a small lasting jump is found by its second step, even in noise in
    which one step of that height is usual. How unlikely two are depends on the tails: the pair
    limit lies beyond those of the window.

    The limits in force lag one applied step behind the statistics. A host that reads the numbers
    one step late (``guard.sync=false``) then already knows the limits after one more applied step
    (:attr:`bounds_ahead`), so late and immediate reading give the same limits and the same run, bit
    for bit. The choice between the two limits does not lag: the gate chooses by the previous loss,
    which the device has.
    """

    def __init__(self, guard: GuardConfig) -> None:
        self._guard = guard
        self._begin_with([])
        self._clear([], [], [])
        self._limits = self._next_limits = _NO_LIMITS
        self._held = Limits()
        self._highest = Limits(loss=0.0, grad_norm=0.0)
        self._after_high = False
        self._level: float | None = None
        self._next_level: float | None = None
        self._best_level = math.inf
        self._drift = 0.0
        self._drift_onset = (0, 0)
        self.first_loss = math.nan
        self.clean_streak = 0

    def _begin_with(self, losses: list[float]) -> None:
        self._beginning = losses
        self._began = statistics.median(losses) if losses else math.inf

    def _clear(
        self, losses: Iterable[float], surprises: Iterable[float], log_norms: Iterable[float]
    ) -> None:
        size = self._guard.window
        late = min(size, _LATE_STEPS)
        self._loss = Window(size, losses)
        self._surprise = Window(size, surprises)
        self._log_norm = Window(size, log_norms)
        self._late_surprise = Window(late, self._surprise.values())
        self._late_log_norm = Window(late, self._log_norm.values())
        self._measure_loss()

    def _measure_loss(self) -> None:
        """Measure level and noise of the window's losses, and the drift test's inputs."""
        measured = self._loss.center_and_sigma() if len(self._loss) else (0.0, 0.0)
        self._median, self._sigma = measured
        self._slack = max(_DRIFT_SLACK * self._guard.loss_floor, self._sigma)
        self._alarm = max(self._guard.drift_nats, _DRIFT_SIGMAS * self._sigma)

    @property
    def limits(self) -> Limits:
        """The gate's bounds for the next step."""
        return self._or_held(self._limits[self._after_high])

    def _or_held(self, limits: Limits) -> Limits:
        return self._held if limits == Limits() else limits

    @property
    def to_hold(self) -> Limits:
        """Limits for the beginning of the run, should a rollback lead back there.

        They are as far above the highest loss and norm of the steps before
        ``guard.min_history`` as the present ones are above the present level. Infinite if there
        never were any limits.
        """
        usual = self._limits[False]
        if usual == Limits():
            return self._held
        highest, guard = self._highest, self._guard
        room = max(guard.loss_floor, usual.loss - min(self._median, self._level or math.inf))
        times = max(math.exp(guard.norm_floor), usual.grad_norm / self._usual_norm)
        return Limits(
            loss=max(usual.loss, highest.loss + room),
            grad_norm=max(usual.grad_norm, highest.grad_norm * times),
        )

    def hold(self, limits: Limits) -> None:
        """Judge by these limits while there are too few clean steps for the run's own.

        After a rollback to the beginning a fault that goes on would otherwise be the new normal.
        """
        self._held = limits

    @property
    def bounds(self) -> Bounds:
        """The gate's bounds for the next step if all earlier steps are known."""
        return Bounds(usual=self.limits, after_high=self.limits)

    @property
    def bounds_ahead(self) -> Bounds:
        """The bounds of the step after the next, if the next is applied and clean."""
        usual, after_high = (self._or_held(limits) for limits in self._next_limits)
        return Bounds(usual=usual, after_high=after_high, high=self._limits[True].loss)

    def end_limit(self, earlier: float | None = None) -> float:
        """The highest loss, in nats per token, at which an end state counts as sound.

        Args:
            earlier: an earlier held-out loss. The limit may then exceed it by as much as the
                training limit exceeds the training level.
        """
        limit = self._limits[False].loss
        if earlier is None or self._next_level is None:
            return limit
        return max(limit, earlier + limit - self._next_level)

    @property
    def may_alarm(self) -> bool:
        """Whether the next step could be judged a drift although it is within its limits."""
        most = self._alarm / _DRIFT_STEPS  # see _excess
        return self._guard.enabled and self._drift + most > self._alarm and self._has_risen()

    def accept(self, signals: StepSignals) -> None:
        """Admit an applied, clean step."""
        self.clean_streak += 1
        self._after_high = self._is_high(signals)
        if not self._guard.enabled:
            return  # an unjudged loss may be any value, even NaN
        if math.isnan(self.first_loss):
            self.first_loss = signals.loss
        if len(self._beginning) < _BEGINNING_STEPS:
            self._begin_with([*self._beginning, signals.loss])
        if self._limits == _NO_LIMITS:
            self._highest = Limits(
                loss=max(self._highest.loss, signals.loss),
                grad_norm=max(self._highest.grad_norm, signals.grad_norm),
            )
        self._pile_up_drift(signals)
        if self._level is not None:
            surprise = signals.loss - self._level
            self._surprise.push(surprise)
            self._late_surprise.push(surprise)
        log_norm = _log(signals.grad_norm)
        self._loss.push(signals.loss)
        self._log_norm.push(log_norm)
        self._late_log_norm.push(log_norm)
        self._measure_loss()
        level = median_of_sorted(sorted(self._loss.newest(_LEVEL_STEPS)))
        self._level, self._next_level = self._next_level, level
        self._limits, self._next_limits = self._next_limits, self._compute_limits(level)

    def refuse(self, signals: StepSignals) -> None:
        """Record a step that was not clean: probations of checkpoints start over."""
        self.clean_streak = 0
        self._after_high = self._is_high(signals)

    def _is_high(self, signals: StepSignals) -> bool:
        # NaN is high: it compares False with everything and must not pass as low.
        return not signals.loss <= self._limits[True].loss

    def restart_at(self, losses: list[float], grad_norms: list[float]) -> None:
        """Accept a new level: forget the old statistics and begin with these values."""
        losses = losses[-self._guard.window :]
        center = statistics.median(losses)
        self._begin_with(losses[-_BEGINNING_STEPS:])
        self._clear(losses, [loss - center for loss in losses], [_log(norm) for norm in grad_norms])
        self._level = self._next_level = center
        self._best_level = math.inf
        self._drift = 0.0
        self._limits = self._next_limits = self._compute_limits(center)
        self._held = Limits()
        self._after_high = False

    def recent(self, count: int) -> list[tuple[float, float]]:
        """(loss, grad norm) of the newest clean steps, in order."""
        norms = [math.exp(value) for value in reversed(self._log_norm.newest(count))]
        return list(zip(reversed(self._loss.newest(count)), norms, strict=True))

    def before(self) -> PreOnset:
        """Statistics of the clean steps so far, for an episode's record."""
        if not len(self._loss):
            return PreOnset(
                loss=0.0, grad_norm=0.0, creep=1.0, is_creep_clear=False, drift_share=0.0
            )
        usual = self._log_norm.median()
        creep, is_clear = self._norm_creep(usual)
        return PreOnset(
            loss=self._loss.median(),
            grad_norm=math.exp(usual),
            creep=math.exp(creep),
            is_creep_clear=is_clear,
            drift_share=self._drift / self._alarm,
        )

    def _norm_creep(self, usual: float) -> tuple[float, bool]:
        """How far the newest log norms exceed the usual one, and whether that is clear.

        Clear: the last one by far; two of the newest eight (one alone may be a hard batch); or a
        steady rise over all quarters of the window to half as much again. A rise moves the window's
        median and spread as well: a straight one ends two such spreads above its start, noise less
        than half a spread. Norms wander, most of all in the first hundreds of steps, so a smaller
        rise is inconclusive; below that, 0.
        """
        sigma = self._log_norm.sigma()
        newest = self._log_norm.newest(_BEFORE_STEPS)
        last, second = newest[0] - usual, sorted(newest)[-2:][0] - usual
        rise, goes_on = _rise(self._log_norm.values())
        signs = [
            (last, max(4 * sigma, math.log(2.0))),
            (second, max(3 * sigma, math.log(1.5))),
            (rise if goes_on else 0.0, max(1.2 * sigma, math.log(1.5))),
        ]
        clear = [sign for sign, least in signs if sign > least]
        if clear:
            return max(clear), True
        return (rise if rise > max(1.2 * sigma, math.log(1.25)) else 0.0), False

    def judge(self, signals: StepSignals) -> Verdict:
        """Judge one attempted step. Pure: the statistics do not change."""
        kind, reason = self._classify(signals)
        if kind is Kind.drift and self._drift > 0.0:
            onset_step, onset = self._drift_onset
        else:
            onset_step, onset = signals.step, signals.start
        return Verdict(
            kind=kind, reason=reason, onset_step=onset_step, onset=onset, limits=self.limits
        )

    def _classify(self, signals: StepSignals) -> tuple[Kind, str]:
        # Non-finite first: NaN compares False with everything, so no limit would catch it.
        if not self._guard.enabled:
            return Kind.clean, "guard.enabled=false"
        if not signals.is_finite and not signals.tokens and not signals.nonfinite_ranks:
            return Kind.non_finite, (
                "nothing counts in these samples, so they have no mean loss: every label is -100, "
                "or losses(batch) gives counts of 0"
            )
        if not signals.is_finite:
            num = signals.nonfinite_ranks
            return Kind.non_finite, (
                f"loss {signals.loss:g}, grad norm {signals.grad_norm:g}, "
                f"{num} rank{'' if num == 1 else 's'} with NaN or Inf"
            )
        if self.limits.exceeded(signals):
            return Kind.spike, self._explain_spike(signals)
        summed = self._drift + self._excess(signals.loss)
        if summed > self._alarm and self._has_risen():
            return Kind.drift, (
                f"loss {signals.loss:.3f} and its recent run are above the best sustained level "
                f"{self._best_level:.3f}: summed excess {summed:.2f} > {self._alarm:.2f} "
                f"(guard.drift_nats={self._guard.drift_nats:g})"
            )
        return Kind.clean, "within limits"

    def _explain_spike(self, signals: StepSignals) -> str:
        parts = []
        if signals.loss > self.limits.loss:
            when = " after a high one" if self._after_high else ""
            parts.append(
                f"loss {signals.loss:.3f} > limit {self.limits.loss:.3f}{when} ("
                + self._usual_text(
                    f"median {self._median:.3f}, of the last {_LEVEL_STEPS} steps "
                    f"{self._next_level or 0.0:.3f}"
                )
            )
        if signals.grad_norm > self.limits.grad_norm:
            parts.append(
                f"grad norm {signals.grad_norm:.3g} > limit {self.limits.grad_norm:.3g} ("
                + self._usual_text(f"median {self._usual_norm:.3g}")
            )
        return ", ".join(parts)

    @property
    def _usual_norm(self) -> float:
        return math.exp(self._log_norm.median()) if len(self._log_norm) else 0.0

    def _usual_text(self, text: str) -> str:
        is_own = self._limits[self._after_high] != Limits()
        return f"{text if is_own else 'kept from before the rollback'})"

    def _compute_limits(self, level: float) -> tuple[Limits, Limits]:
        """Compute the limits after a usual step and after a high one."""
        guard = self._guard
        if not guard.enabled or len(self._loss) < guard.min_history:
            return _NO_LIMITS
        # The best level is sustained over the whole window, not by a lucky few.
        median, sigma = self._median, self._sigma
        self._best_level = min(self._best_level + self._slack / _DRIFT_MEMORY, median)
        tail = _PAIR_TAILS * (self._loss.largest(_TAIL_RANK) - median)
        usual, late = _noise(self._surprise), _late_noise(self._late_surprise)
        short = level + min(0.0, max(usual.center, late.center, -_MOST_BIAS * guard.loss_floor))
        spread, short_tail = min(usual.sigma, late.sigma), min(usual.tail, late.tail)
        alone = min(
            median + max(guard.loss_sigmas * sigma, guard.loss_floor),
            short + max(guard.loss_sigmas * spread, guard.loss_floor),
        )
        pair_floor = _PAIR_FLOOR * guard.loss_floor
        after_high = min(
            alone,  # the second limit never exceeds the first
            median + max(_PAIR_SIGMAS * sigma, pair_floor, tail),
            short + max(_PAIR_SIGMAS * spread, pair_floor, short_tail),
        )
        norm = self._norm_limit()
        return Limits(loss=alone, grad_norm=norm), Limits(loss=after_high, grad_norm=norm)

    def _norm_limit(self) -> float:
        floor = self._guard.norm_floor
        usual, sigma = self._log_norm.center_and_sigma()
        log_norm = usual + max(_NORM_SIGMAS * sigma, floor)
        if _NORM_SIGMAS * sigma > floor:
            late = _late_noise(self._late_log_norm)
            least = max(_NORM_SIGMAS * late.sigma, floor)
            log_norm = min(log_norm, max(usual, late.center) + least)
        return math.exp(min(log_norm, 700.0))

    def _excess(self, loss: float) -> float:
        """Page's test (CUSUM, 1954) against the best level held; slack grows with the noise."""
        if self._limits[False].loss == math.inf:
            return 0.0  # not before the gate is armed, or one unjudged spike would be a drift
        margin = max(
            _ABOVE_BEGINNING * self._guard.loss_floor, _ABOVE_BEGINNING_SIGMAS * self._sigma
        )
        if self._best_level > self._began + margin:
            return 0.0  # nothing learned yet: a rollback would save nothing and meet the same data
        return min(loss - self._best_level - self._slack, self._alarm / _DRIFT_STEPS)

    def _has_risen(self) -> bool:
        """Whether the newest steps as a whole are high enough to justify a rollback."""
        late = median_of_sorted(sorted(self._loss.newest(_LATE_STEPS)))
        return late > self._best_level + _DRIFT_RISE * self._guard.loss_floor

    def _pile_up_drift(self, signals: StepSignals) -> None:
        if self._drift == 0.0:
            self._drift_onset = (signals.step, signals.start)
        # Capped at the alarm, so that the excess of an ended rise decays in time.
        self._drift = min(max(0.0, self._drift + self._excess(signals.loss)), self._alarm)

    def to_json(self) -> dict[str, Any]:
        """The exact state: floats survive JSON bit for bit (shortest repr)."""
        return {
            "loss": self._loss.values(),
            "surprise": self._surprise.values(),
            "log_norm": self._log_norm.values(),
            "level": self._level,
            "next_level": self._next_level,
            "limits": [limits.to_json() for limits in self._limits],
            "next_limits": [limits.to_json() for limits in self._next_limits],
            "after_high": self._after_high,
            "best_level": finite(self._best_level),
            "beginning": self._beginning,
            "drift": self._drift,
            "drift_onset": list(self._drift_onset),
            "first_loss": finite(self.first_loss),
            "clean_streak": self.clean_streak,
            "highest": self._highest.to_json(),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._begin_with(list(state["beginning"]))
        self._clear(state["loss"], state["surprise"], state["log_norm"])
        self._level, self._next_level = state["level"], state["next_level"]
        self._limits = _limits_from_json(state["limits"])
        self._next_limits = _limits_from_json(state["next_limits"])
        self._after_high = state["after_high"]
        self._best_level = math.inf if state["best_level"] is None else state["best_level"]
        self._drift = state["drift"]
        self._drift_onset = (state["drift_onset"][0], state["drift_onset"][1])
        self.first_loss = math.nan if state["first_loss"] is None else state["first_loss"]
        self.clean_streak = state["clean_streak"]
        self._highest = limits_of(state["highest"])


def _rise(values: list[float]) -> tuple[float, bool]:
    """The rise from the first quarter's median to the last's, and whether it is steady."""
    size = len(values) // 4
    if size < _BEFORE_STEPS:
        return 0.0, False  # medians of so few values are meaningless
    quarters = [statistics.median(values[at * size : (at + 1) * size]) for at in range(4)]
    return quarters[-1] - quarters[0], quarters == sorted(quarters)


def _log(norm: float) -> float:
    """Log of a grad norm; a norm of zero (all targets masked) must not give minus infinity."""
    return math.log(max(norm, 1e-30))


def _limits_from_json(pair: list[list[float | None]]) -> tuple[Limits, Limits]:
    usual, after_high = map(limits_of, pair)
    return usual, after_high


_NO_LIMITS = (Limits(), Limits())
