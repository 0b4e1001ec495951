"""The learning rate as a function of applied updates only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class Rates(Protocol):
    """A learning rate for every update."""

    def rate(self, updates: int) -> float:
        """Learning rate of the update that follows ``updates`` applied ones."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``kind`` is cosine, wsd, linear or constant; ``total`` and ``warmup`` are in updates.

    ``floor`` is the final rate as a share of the peak; ``decay`` the share of ``total`` that
    WSD (warm-up, stable, decay; arXiv 2404.06395) spends in its linear decay.
    """

    kind: str
    peak: float
    total: int
    warmup: int
    floor: float
    decay: float

    def rate(self, updates: int) -> float:
        """Learning rate of the update that follows ``updates`` applied ones."""
        if updates < self.warmup:
            return self.peak * (updates + 1) / self.warmup
        return self.peak * self._after_warmup(updates)

    def _after_warmup(self, updates: int) -> float:
        if self.kind == "constant":
            return 1.0
        start = self.warmup
        if self.kind == "wsd":
            start = max(start, self.total - round(self.decay * self.total))
        done = min(1.0, max(0.0, (updates - start) / max(1, self.total - start)))
        shape = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.floor + (1 - self.floor) * shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCut:
    """A cool-down of the ladder: updates in ``[start, stop)`` use ``factor`` times the rate."""

    start: int
    stop: int
    factor: float


def cut_factor(updates: int, cuts: list[RateCut]) -> float:
    """Product of the cuts in force for the update after ``updates`` applied ones."""
    return math.prod(cut.factor for cut in cuts if cut.start <= updates < cut.stop)
