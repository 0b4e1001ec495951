"""Warns that a run may be about to diverge, from slow numbers inside the model. Takes no action.

A number is compared with its own past, a whole window of it, for absolute levels do not travel
between models; a least level only keeps small numbers from being called large because they were
smaller. One sign alone is information; an alarm takes two that stand together, at two looks in a
row, and are not one and the same thing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Numbers by name, measured at the update ``step``."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A sign: above ``factor`` times the window's lowest value, and above ``least``.

    Args:
        accelerating: the second half of the window must also add more than the first by a fifth,
            for each update: weights grow in the first steps of any training, and ever more slowly.
            Updates of the warm-up count as the part of the peak rate that they have.
        looks: at so many looks in a row. A number that jumps about from one update to the next says
            nothing at one.
        updates: only where the median matrix moves by more than this part of itself in an update.
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
# These two rise together in the first hundreds of steps of healthy trainings too: one piece of
# evidence, not two.
_TOGETHER = frozenset({"residual_rms", "grad_ratio"})
_ALARM = ""
_FASTER = 1.2  # of a slope that accelerates
_AGREE = 2  # looks in a row at which two signs stand together


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRules:
    """
    Args:
        every: updates between looks.
        window: updates that are looked back on.
        warmup: updates over which the rate rises to its peak.
    """

    every: int
    window: int = 200
    warmup: int = 0

    def exposure(self, step: int) -> float:
        """How much the updates up to ``step`` could move weights, in updates at the peak rate."""
        rising = min(step, self.warmup)
        return rising * (rising + 1) / (2 * max(self.warmup, 1)) + step - rising


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A number that stands out from its own past, whose lowest value is ``before``."""

    signal: str
    value: float
    before: float
    since: int  # the update at which it was lowest

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
    """What is new: signs, or that the ``agreeing`` ones (none or several) stand together."""

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
    """Folds measurements in order of their steps. Reports a sign again only after it
    disappeared."""

    def __init__(self, rules: EarlyRules) -> None:
        self.rules = rules
        # Each look, with the signs in it by name.
        self._past: deque[tuple[Look, Mapping[str, Sign]]] = deque()
        # Signs, and alarms by the empty name: the update at which it was there last.
        self._last: dict[str, int] = {}

    def note(self, look: Look) -> Warned | None:
        """Record a measurement; returns its new signs."""
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
        """Updates within which a recurring sign is the same occurrence."""
        return max(2 * self.rules.every, self.rules.window)

    def _holds(self, name: str, looks: int) -> bool:
        """Whether the sign is there at the newest look and at those before it."""
        newest = list(self._past)[-looks:]
        return len(newest) == looks and all(name in signs for _, signs in newest)

    def _sign(self, name: str, look: Look) -> Sign | None:
        rule, value = RULES[name], look.values.get(name)
        before = [(past.step, past.values[name]) for past, _ in self._past if name in past.values]
        if value is None or not before or not math.isfinite(value):
            return None
        if look.step - self._past[0][0].step < self.rules.window - self.rules.every:
            return None  # in the first steps of a training everything moves
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
    """The names, if they are more than one piece of evidence; else none."""
    all_names = tuple(names)
    return all_names if len(all_names) > 1 and not _TOGETHER.issuperset(all_names) else ()
