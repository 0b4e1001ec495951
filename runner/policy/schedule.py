"""The learning rate as a function of applied updates only.

A step's is the schedule's times the cuts:
:meth:`runner.train.step_runner.StepPlanner.learning_rate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from runner.config.schema import ScheduleConfig, ScheduleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of ``total`` updates up to the rate ``peak``.

    WSD (warm-up, stable, decay) is of arXiv 2404.06395.
    """

    schedule: ScheduleConfig
    peak: float
    total: int

    def rate(self, updates: int) -> float:
        """Learning rate of the update that follows ``updates`` applied ones."""
        warmup = self.schedule.warmup
        if updates < warmup:
            return self.peak * (updates + 1) / warmup
        return self.peak * self._after_warmup(updates)

    def _after_warmup(self, updates: int) -> float:
        schedule = self.schedule
        if schedule.kind is ScheduleKind.constant:
            return 1.0
        start = schedule.warmup
        if schedule.kind is ScheduleKind.wsd:
            start = max(start, self.total - round(schedule.decay * self.total))
        done = min(1.0, max(0.0, (updates - start) / max(1, self.total - start)))
        is_cosine = schedule.kind is ScheduleKind.cosine
        shape = (1 + math.cos(math.pi * done)) / 2 if is_cosine else 1 - done
        return schedule.floor + (1 - schedule.floor) * shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCut:
    """A cool-down of the ladder: updates in ``[start, stop)`` use ``factor`` times the rate."""

    start: int
    stop: int
    factor: float


def cut_factor(updates: int, cuts: list[RateCut]) -> float:
    """Product of the cuts in force for the update after ``updates`` applied ones."""
    return math.prod(cut.factor for cut in cuts if cut.start <= updates < cut.stop)
