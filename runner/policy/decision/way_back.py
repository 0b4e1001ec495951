"""Probe F: the steps from a clean checkpoint up to a bad one, computed again on the run's way back.

A step is a pure function of state and samples. So on the same samples every step tells the same
numbers as the first time, up to the one before which the state was not what its steps had made of
it: that step is named. Where all of them come again, the bad one too, the weights are what training
has made of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from runner.policy.decision.signals import StepSignals

# Relative, where the machine does not repeat its bits: rounding alone grows from step to step.
_NOISY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a step told the first time; its samples are from a half-open range of the stream."""

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
    """What the way back has shown."""

    differs = "differs"
    again = "again"
    lost = "lost"


@dataclass(frozen=True, slots=True)
class WayBack:
    """The steps that a rollback has undone.

    Args:
        recorded: what they told, by step; the bad one is the last.
        bad: its number.
        is_exact: the machine repeats its bits.
    """

    recorded: Mapping[int, Recorded]
    bad: int
    is_exact: bool

    def compare(self, now: Recorded, *, gated: bool) -> Outcome | None:
        """What one more step shows; None: nothing yet.

        Args:
            gated: it was not applied.
        """
        before = self.recorded.get(now.step)
        if before is None or now.step > self.bad:
            return Outcome.lost
        if gated and now.step < self.bad:
            return None  # another trouble; the step comes once more
        if now.samples != before.samples or now.learning_rate != before.learning_rate:
            return Outcome.lost  # it is not the same step
        if now.apart(before) > (0.0 if self.is_exact else _NOISY):
            return Outcome.lost if gated else Outcome.differs
        return Outcome.again if now.step == self.bad else None


def recorded_in(lines: Iterable[Mapping[str, Any]], first: int, stop: int) -> list[list[Any]]:
    """Of a metrics file's lines the last applied ones of steps ``[first, stop)``, as JSON rows."""
    found: dict[int, list[Any]] = {}
    for line in lines:
        step = line.get("step")
        if line.get("action") != "apply" or not isinstance(step, int) or not first <= step < stop:
            continue
        samples = line.get("samples")
        numbers = [line.get(name) for name in ("loss", "grad_norm", "lr")]
        are_numbers = all(isinstance(number, float | int) for number in numbers)
        if isinstance(samples, list) and len(samples) == 2 and are_numbers:
            found[step] = [step, *samples, *numbers]
    return [found[step] for step in sorted(found)]


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
