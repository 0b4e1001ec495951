"""Warns that a run may be about to diverge, from slow numbers inside of the model. Acts on nothing.

A number is compared with its own past, for absolute levels do not travel between models; a least
level only keeps small numbers from being called large because they were smaller. One sign alone is
a warning; an alarm takes two that agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Numbers by name, measured at the update ``step``."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A sign: above ``factor`` times the lowest of the window, and above ``least``.

    Where it must be ``accelerating``, the second half of the window added more than the first:
    weights grow in the first steps of any training, and ever more slowly.
    """

    factor: float
    least: float
    meaning: str
    accelerating: bool = False


# From docs/warnings.md's trials. Gradients in proportion and log Z of healthy runs move by 3.
RULES: Mapping[str, Rule] = {
    "residual_rms": Rule(factor=4.0, least=5.0, meaning="the residual stream at the last block"),
    "weight_norm": Rule(
        factor=1.3, least=0.0, meaning="the norm of all weights", accelerating=True
    ),
    "update_ratio": Rule(factor=3.5, least=0.03, meaning="updates in proportion to the weights"),
    "grad_ratio": Rule(factor=4.0, least=40.0, meaning="the largest gradient over the median one"),
    "attention_logit": Rule(factor=4.0, least=50.0, meaning="the largest attention logit"),
    "logsumexp": Rule(factor=4.0, least=20.0, meaning="log Z of the output"),
}
_AGREE = 200  # updates within which two signs agree


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRules:
    """``every``: updates between looks; ``window``: updates that are looked back on."""

    every: int
    window: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A number that stands out against its own past: ``before`` is the lowest of that."""

    signal: str
    value: float
    before: float
    since: int  # the update at which it was lowest

    @property
    def words(self) -> str:
        """Without its step."""
        times = self.value / self.before if self.before else math.inf
        return (
            f"{RULES[self.signal].meaning} ({self.signal}) is {self.value:.4g}, {times:.3g} times "
            f"what it was at step {self.since}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """New signs. ``is_alarm``: two agree, with those of shortly before."""

    signs: Sequence[Sign]
    agreeing: tuple[str, ...]

    @property
    def is_alarm(self) -> bool:
        return len(self.agreeing) > 1

    @property
    def words(self) -> str:
        """One sentence."""
        told = "; ".join(sign.words for sign in self.signs)
        return told + (f"; {' and '.join(self.agreeing)} agree" if self.is_alarm else "")


class EarlyWarnings:
    """Folds looks, in the order of their steps. A sign is told once, until it was gone."""

    def __init__(self, rules: EarlyRules) -> None:
        self.rules = rules
        self._past: deque[Look] = deque()
        self._seen: dict[str, int] = {}  # sign to the update at which it was seen last

    def note(self, look: Look) -> Warned | None:
        """Take a look; what is new in it."""
        while self._past and self._past[-1].step >= look.step:
            self._past.pop()  # the run went back
        self._seen = {name: step for name, step in self._seen.items() if step < look.step}
        while self._past and self._past[0].step < look.step - self.rules.window:
            self._past.popleft()
        signs = [s for s in (self._sign(n, look.values.get(n)) for n in RULES) if s is not None]
        self._past.append(look)
        known = {n for n, step in self._seen.items() if step >= look.step - self._apart}
        self._seen |= {sign.signal: look.step for sign in signs}
        new = [sign for sign in signs if sign.signal not in known]
        if not new:
            return None
        agreeing = tuple(n for n, step in self._seen.items() if step >= look.step - _AGREE)
        return Warned(signs=new, agreeing=agreeing)

    @property
    def _apart(self) -> int:
        """Updates within which the same sign is the same one still."""
        return max(2 * self.rules.every, self.rules.window)

    def _sign(self, name: str, value: float | None) -> Sign | None:
        rule = RULES[name]
        before = [(look.values[name], look.step) for look in self._past if name in look.values]
        if value is None or not before or not math.isfinite(value):
            return None
        low, step = min(before)
        if value <= rule.least or value <= rule.factor * low:
            return None
        if rule.accelerating and not self._accelerates([*before, (value, math.inf)]):
            return None
        return Sign(signal=name, value=value, before=low, since=step)

    @staticmethod
    def _accelerates(course: Sequence[tuple[float, float]]) -> bool:
        """Whether what came in the second half is more than what came in the first."""
        values = [value for value, _ in course]
        middle = values[len(values) // 2]
        return len(values) > 2 and values[-1] - middle > middle - values[0]
