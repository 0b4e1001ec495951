"""Early warnings that a run may diverge, from numbers inside the model. Takes no action.

Thresholds are relative to the run's own past, since absolute levels differ between models; a floor
avoids false positives on tiny values. One signal is a warning. An alarm needs two independent
signals in two consecutive measurements.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Numbers by name, measured at the update ``step``."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The threshold of a signal: ``factor`` times the window's minimum, and at least ``least``.

    Args:
        accelerating: the slope must also be a fifth larger in the second half of the window than
            in the first: in any training weights grow at first, and ever more slowly. An update
            of the warm-up counts as its share of the peak learning rate.
        looks: consecutive measurements that must exceed it; more than one for a noisy number.
        updates: the median relative update of a matrix must exceed this.
    """

    factor: float
    least: float
    meaning: str
    accelerating: bool = False
    looks: int = 1
    updates: float = 0.0


# From docs/warnings.md's trials. Gradients in proportion and log Z of healthy runs move by 3.
RULES: Mapping[str, Rule] = {
    "residual_rms": Rule(factor=4.0, least=5.0, meaning="the residual stream at the last block"),
    "weight_norm": Rule(
        factor=1.06,
        least=0.0,
        meaning="the norm of all weights",
        accelerating=True,
        # A tenth of this is usual. Adapters, and weights that begin at zero, may well accelerate.
        updates=0.01,
    ),
    "update_ratio": Rule(
        factor=3.5, least=0.03, meaning="updates in proportion to the weights", looks=2
    ),
    "grad_ratio": Rule(
        factor=4.0, least=40.0, meaning="the largest gradient over the median one", looks=2
    ),
    "attention_logit": Rule(factor=4.0, least=50.0, meaning="the largest attention logit", looks=2),
    "logsumexp": Rule(factor=4.0, least=20.0, meaning="log Z of the output"),
}
# These two also rise together in the first hundreds of steps of healthy runs, so they are not
# independent.
_TOGETHER = frozenset({"residual_rms", "grad_ratio"})
_ALARM = ""
_FASTER = 1.2  # of a slope that accelerates
_AGREE = 2  # consecutive measurements for an alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRules:
    """
    Args:
        every: updates between measurements.
        window: updates of the past to compare with.
        warmup: updates over which the learning rate rises to its peak.
    """

    every: int
    window: int = 200
    warmup: int = 0

    def exposure(self, step: int) -> float:
        """The sum of learning rates up to ``step``, in units of the peak rate."""
        rising = min(step, self.warmup)
        return rising * (rising + 1) / (2 * max(self.warmup, 1)) + step - rising


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A number above its threshold; ``before`` is the minimum in the window."""

    signal: str
    value: float
    before: float
    since: int  # the update of that minimum

    @property
    def sentence(self) -> str:
        """The sign in words, without its step."""
        times = self.value / self.before if self.before else math.inf
        return (
            f"{RULES[self.signal].meaning} ({self.signal}) is {self.value:.4g}, {times:.3g} times "
            f"what it was at step {self.since}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """New signals; for an alarm, ``agreeing`` names the independent ones."""

    signs: Sequence[Sign]
    agreeing: tuple[str, ...]

    @property
    def is_alarm(self) -> bool:
        return bool(self.agreeing)

    @property
    def sentence(self) -> str:
        """One sentence."""
        signs = "; ".join(sign.sentence for sign in self.signs)
        return signs + (f"; {' and '.join(self.agreeing)} agree" if self.is_alarm else "")


class EarlyWarnings:
    """Takes measurements in the order of their steps. Reports a signal again only after it has
    been below its threshold for a window."""

    def __init__(self, rules: EarlyRules) -> None:
        self.rules = rules
        # Each measurement, with its signals by name.
        self._past: deque[tuple[Look, Mapping[str, Sign]]] = deque()
        # The update at which each signal was seen last; an alarm has the empty name.
        self._last: dict[str, int] = {}

    def note(self, look: Look) -> Warned | None:
        """Record a measurement; returns its new signals."""
        while self._past and self._past[-1][0].step >= look.step:
            self._past.pop()  # after a rollback
        self._last = {name: step for name, step in self._last.items() if step < look.step}
        while self._past and self._past[0][0].step < look.step - self.rules.window:
            self._past.popleft()
        by_name = {name: self._sign(name, look) for name in RULES}
        signs = {name: sign for name, sign in by_name.items() if sign is not None}
        self._past.append((look, signs))
        lasting = {name: signs[name] for name in signs if self._holds(name, RULES[name].looks)}
        agreeing = _independent(name for name in signs if self._holds(name, _AGREE))
        now = [*lasting, *([_ALARM] if agreeing else [])]
        new = [name for name in now if self._last.get(name, -math.inf) < look.step - self._apart]
        self._last |= dict.fromkeys(now, look.step)
        if not new:
            return None
        fresh = [lasting[name] for name in new if name != _ALARM] or list(lasting.values())
        return Warned(signs=fresh, agreeing=agreeing)

    @property
    def _apart(self) -> int:
        """Updates within which a signal that recurs is not new."""
        return max(2 * self.rules.every, self.rules.window)

    def _holds(self, name: str, looks: int) -> bool:
        """Whether the signal is in each of the newest ``looks`` measurements."""
        newest = list(self._past)[-looks:]
        return len(newest) == looks and all(name in signs for _, signs in newest)

    def _sign(self, name: str, look: Look) -> Sign | None:
        rule, value = RULES[name], look.values.get(name)
        before = [(past.step, past.values[name]) for past, _ in self._past if name in past.values]
        if value is None or not before or not math.isfinite(value):
            return None
        if look.step - self._past[0][0].step < self.rules.window - self.rules.every:
            return None  # everything changes in the first steps of a training
        step, low = min(before, key=lambda one: one[1])
        if value <= rule.least or value <= rule.factor * low:
            return None
        if look.values.get("update_ratio", math.inf) <= rule.updates:
            return None
        if rule.accelerating and not self._accelerates([*before, (look.step, value)]):
            return None
        return Sign(signal=name, value=value, before=low, since=step)

    def _accelerates(self, course: Sequence[tuple[int, float]]) -> bool:
        """Whether the second half rises faster than the first, and there are two halves."""
        if len(course) < 3:
            return False
        first, middle, last = course[0], course[len(course) // 2], course[-1]
        before, now = self._slope(first, middle), self._slope(middle, last)
        return now > max(before, _FASTER * before)

    def _slope(self, begin: tuple[int, float], end: tuple[int, float]) -> float:
        return (end[1] - begin[1]) / (self.rules.exposure(end[0]) - self.rules.exposure(begin[0]))


def _independent(names: Iterable[str]) -> tuple[str, ...]:
    """The names, if at least two of them are independent; else none."""
    all_names = tuple(names)
    return all_names if len(all_names) > 1 and not _TOGETHER.issuperset(all_names) else ()


_WINDOW = 1000  # losses
_LEAST = 200  # losses before one is judged
_SIGMAS = 7.0
_SHARE = 0.001
_STATE = ("sum", "squares", "num", "spikes", "is_high", "is_told")


class SpikeScore:
    """The spike score of OLMo 2 (arXiv 2501.00656): the share of losses that lie 7 standard
    deviations above the mean of the last 1,000.

    A non-finite loss counts as a spike; only finite ones enter the mean.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._sum = self._squares = 0.0
        self._num = self._spikes = 0
        self._is_high = self._is_told = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, f"_{name}") for name in _STATE} | {"losses": [*self._losses]}

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._losses = deque(state["losses"], maxlen=_WINDOW)
        for name in _STATE:
            setattr(self, f"_{name}", state[name])

    def note(self, loss: float) -> float | None:
        """Record a step's loss; returns the share, once, when it is too high in two windows in a
        row."""
        self._num += 1
        is_spike = self._is_spike(loss)
        self._spikes += is_spike
        if not is_spike:
            self._add(loss)
        if self._num < _WINDOW:
            return None
        share, was_high = self._spikes / self._num, self._is_high
        self._is_high = share > _SHARE
        self._num = self._spikes = 0
        if not (self._is_high and was_high) or self._is_told:
            return None
        self._is_told = True
        return share

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self._losses) < _LEAST:
            return False
        mean = self._sum / len(self._losses)
        variance = max(0.0, self._squares / len(self._losses) - mean * mean)
        return loss > mean + _SIGMAS * math.sqrt(variance)

    def _add(self, loss: float) -> None:
        if len(self._losses) == _WINDOW:
            oldest = self._losses[0]
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._losses.append(loss)
        self._sum += loss
        self._squares += loss * loss
