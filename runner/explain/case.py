"""One bad step under inquiry: what is asked, and what the probes have told so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.explain.finding import Cause, Finding, Remedy
from runner.explain.probe import Attempt, Bench
from runner.explain.reading import Reading
from runner.policy.decision.signals import Limits

NO_WAY_BACK = "F, G: nothing was computed again from a checkpoint yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One bad step. ``limits`` held it; ``later`` is a batch far behind it.

    ``overflowed``: the step before it was bad in the run's precision only. ``came_again``: it was
    bad before, and all steps from a clean checkpoint up to it came as they did then.
    """

    attempt: Attempt
    limits: Limits
    later: BatchPlan
    most_steps: int
    overflowed: bool = False
    came_again: bool = False


@dataclass(slots=True, kw_only=True)
class Evidence:
    """What the probes told so far."""

    most_steps: int
    first: Reading
    batches: Sequence[MicroBatch]
    not_tried: list[str] = field(default_factory=list)
    layers: Mapping[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def note(self, probe: str, reading: Reading) -> Reading:
        self.numbers[probe] = reading.to_json()
        return reading

    def left(self, bench: Bench) -> int:
        """Computations that this incident may still cost."""
        return self.most_steps - bench.num_steps


def nothing(cause: Cause, why: str) -> Finding:
    """Nothing is proven."""
    return Finding(cause=cause, remedy=Remedy.ladder, why=why)


def some(positions: Sequence[int]) -> str:
    told = ", ".join(map(str, positions[:8]))
    return told + (f" and {len(positions) - 8} more" if len(positions) > 8 else "")
