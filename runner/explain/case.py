"""One bad step that is being explained, and the results of its probes so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.explain.probe import Attempt, Bench
from runner.explain.reading import Reading
from runner.policy.decision.finding import Cause, Finding, Remedy
from runner.policy.decision.signals import Limits

# Computes readings with the weights of the newest clean checkpoint; None if there is none.
Earlier = Callable[[Callable[[], Sequence[Reading]]], Sequence[Reading] | None]

NOT_RECOMPUTED = "F, G: nothing was computed again from a checkpoint yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One bad step.

    Attributes:
        limits: the limits that it exceeded.
        later: a batch far after it.
        overflowed: the step before it was bad only in the run's precision.
        came_again: it was bad before, and all steps since a clean checkpoint repeated exactly.
        earlier: see :data:`Earlier`; None if that would cost too much.
    """

    attempt: Attempt
    limits: Limits
    later: BatchPlan
    most_steps: int
    overflowed: bool = False
    came_again: bool = False
    earlier: Earlier | None = None


@dataclass(slots=True, kw_only=True)
class Evidence:
    """The results of the probes so far."""

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
        """How many computations of the step the budget still allows."""
        return self.most_steps - bench.num_steps


def inconclusive(cause: Cause, why: str) -> Finding:
    """A finding that proves nothing."""
    return Finding(cause=cause, remedy=Remedy.ladder, why=why)


def sticky(
    ranks: Collection[int],
    why: str = "samples are bad on {who}, its own and its neighbours'; on other ranks not",
) -> Finding:
    """
    Args:
        why: with ``{who}`` in place of the ranks.
    """
    ranks = sorted(ranks)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return Finding(
        cause=Cause.sticky,
        remedy=Remedy.redo,
        why=why.format(who=who),
        refutation="it follows the samples to another rank",
        is_tried=True,
        ranks=tuple(ranks),
    )


def listing(positions: Sequence[int]) -> str:
    listed = ", ".join(map(str, positions[:8]))
    return listed + (f" and {len(positions) - 8} more" if len(positions) > 8 else "")
