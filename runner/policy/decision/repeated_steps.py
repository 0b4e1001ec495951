"""Probe F: compares the steps from a clean checkpoint to a bad one with their recorded numbers.

A step is a pure function of state and samples. So after a rollback every step on the same samples
repeats its numbers, up to the first that started from a corrupted state: that step is named. If all
of them repeat, including the bad one, the weights are the result of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from runner.policy.decision.signals import StepSignals

# Relative tolerance if the machine does not repeat bits: rounding errors grow with each step.
_NOISY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The recorded numbers of a step; its samples are a half-open range of the stream."""

    step: int
    samples: tuple[int, int]
    loss: float
    grad_norm: float
    learning_rate: float

    @classmethod
    def of(cls, signals: StepSignals, learning_rate: float) -> Recorded:
        return cls(
            step=signals.step,
            samples=(signals.start, signals.stop),
            loss=signals.loss,
            grad_norm=signals.grad_norm,
            learning_rate=learning_rate,
        )

    def apart(self, other: Recorded) -> float:
        """The largest relative difference of loss and norm."""
        pairs = ((self.loss, other.loss), (self.grad_norm, other.grad_norm))
        return max(_apart(a, b) for a, b in pairs)


class Outcome(Enum):
    """The result of the comparison."""

    differs = "differs"
    repeated = "repeated"
    lost = "lost"


@dataclass(frozen=True, slots=True)
class StepComparison:
    """The steps that a rollback undid.

    Args:
        recorded: their numbers by step; the bad one is the last.
        bad: number of the bad step.
        is_exact: whether the machine repeats bits.
    """

    recorded: Mapping[int, Recorded]
    bad: int
    is_exact: bool

    def compare(self, now: Recorded, *, gated: bool) -> Outcome | None:
        """Compare one more step; None while undecided.

        Args:
            gated: whether the step was not applied.
        """
        before = self.recorded.get(now.step)
        if before is None or now.step > self.bad:
            return Outcome.lost
        if gated and now.step < self.bad:
            return None  # separate trouble; the step is repeated
        if not self._is_same(before, now):
            return Outcome.lost
        if self.differs(now):
            return Outcome.lost if gated else Outcome.differs
        return Outcome.repeated if now.step == self.bad else None

    def differs(self, now: Recorded) -> bool:
        """Whether the same step has other numbers than recorded."""
        before = self.recorded.get(now.step)
        limit = 0.0 if self.is_exact else _NOISY
        return before is not None and self._is_same(before, now) and now.apart(before) > limit

    def _is_same(self, before: Recorded, now: Recorded) -> bool:
        return now.samples == before.samples and now.learning_rate == before.learning_rate


def recorded_in(lines: Iterable[Mapping[str, Any]], first: int, stop: int) -> list[list[Any]]:
    """The last applied lines of steps ``[first, stop)`` in a metrics file, as JSON rows."""
    by_step: dict[int, list[Any]] = {}
    for line in lines:
        step = line.get("step")
        if line.get("action") != "apply" or not isinstance(step, int) or not first <= step < stop:
            continue
        samples = line.get("samples")
        numbers = [line.get(name) for name in ("loss", "grad_norm", "lr")]
        are_numbers = all(isinstance(number, float | int) for number in numbers)
        if isinstance(samples, list) and len(samples) == 2 and are_numbers:
            by_step[step] = [step, *samples, *numbers]
    return [by_step[step] for step in sorted(by_step)]


def from_rows(rows: Iterable[list[Any]]) -> dict[int, Recorded]:
    """The inverse of :func:`recorded_in`."""
    return {
        row[0]: Recorded(
            step=row[0],
            samples=(row[1], row[2]),
            loss=float(row[3]),
            grad_norm=float(row[4]),
            learning_rate=float(row[5]),
        )
        for row in rows
    }


def _apart(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if math.isfinite(one) is math.isfinite(other) else math.inf
    most = max(abs(one), abs(other))
    return abs(one - other) / most if most else 0.0
