"""Warns that a run may be about to diverge, from slow numbers inside of the model. Acts on nothing.

A number is compared with its own past, for absolute levels do not travel between models. One sign
alone is a warning; an alarm takes two that agree.
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
    """A sign: ``factor`` times the lowest of the last ``EarlyRules.window`` steps, and above
    ``least``."""

    factor: float
    least: float
    meaning: str


# None so far: what is measured is told, and nobody is warned.
RULES: Mapping[str, Rule] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRules:
    """``every``: updates between looks; ``window``: updates that are looked back on."""

    every: int
    window: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A number that stands out against its own past."""

    signal: str
    value: float
    before: float

    @property
    def words(self) -> str:
        times = self.value / self.before if self.before else math.inf
        return f"{RULES[self.signal].meaning} is {self.value:.4g}, {times:.3g} times what it was"


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """Signs that are new. ``is_alarm``: two agree."""

    signs: Sequence[Sign]
    is_alarm: bool

    @property
    def words(self) -> str:
        return "; ".join(sign.words for sign in self.signs)


class EarlyWarnings:
    """Folds looks, in the order of their steps."""

    def __init__(self, rules: EarlyRules) -> None:
        self.rules = rules
        self._past: deque[Look] = deque()
        self._told: set[str] = set()

    def note(self, look: Look) -> list[Warned]:
        """Take a look; what is new in it."""
        while self._past and self._past[-1].step >= look.step:
            self._past.pop()  # the run went back
        while self._past and self._past[0].step < look.step - self.rules.window:
            self._past.popleft()
        signs = [s for s in (self._sign(n, v) for n, v in look.values.items()) if s is not None]
        self._past.append(look)
        new = [sign for sign in signs if sign.signal not in self._told]
        self._told = {sign.signal for sign in signs} | self._told
        return [Warned(signs=new, is_alarm=len(signs) > 1)] if new else []

    def _sign(self, name: str, value: float) -> Sign | None:
        rule = RULES.get(name)
        before = [look.values[name] for look in self._past if name in look.values]
        if rule is None or not before or not math.isfinite(value):
            return None
        low = min(before)
        if value <= rule.least or value <= rule.factor * low:
            return None
        return Sign(signal=name, value=value, before=low)
