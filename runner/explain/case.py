"""One bad step that is being explained, and what its probes have shown so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.engine.protocol import LocalSums
from runner.explain.probe import Bench
from runner.explain.reading import Reading
from runner.policy.decision.finding import Cause, Finding, Remedy
from runner.policy.decision.signals import Limits
from runner.system.units import first_few, name_ranks

# Computes readings with the weights of the newest clean checkpoint; None if there is none.
Earlier = Callable[[Callable[[], Sequence[Reading]]], Sequence[Reading] | None]

NOT_RECOMPUTED = "F, G: nothing was computed again from a checkpoint yet"

# What follows from a cause that a probe has shown, and what would have refuted it.
_SHOWN = {
    Cause.transient: (Remedy.redo, "the step is bad again"),
    Cause.misread: (Remedy.redo, "the step is bad with the samples read again"),
    Cause.sticky: (Remedy.redo, "it follows the samples to another rank"),
    Cause.state: (Remedy.go_back, "the copies are equal"),
    Cause.numerics: (Remedy.widen, "the step is bad in {wider} as well"),
    Cause.data: (Remedy.skip, "the step is still bad without them"),
    Cause.data_mix: (Remedy.ladder, "the samples that follow are as before"),
    Cause.rate: (
        Remedy.go_back,
        "a lower rate does not pass the bad step, or other samples at the same rate pass it too",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One bad step.

    Attributes:
        plan: its samples; ``batches``, ``seeds`` and ``sums`` are this rank's: micro-batches on the
            host, their seeds, and what they came to.
        limits: the limits that it exceeded.
        later: a batch far after it.
        overflowed: the step before it was bad only in the run's precision.
        came_again: it was bad before, and all steps since a clean checkpoint repeated exactly.
        earlier: see :data:`Earlier`; None if that would cost too much.
    """

    plan: BatchPlan
    batches: Sequence[MicroBatch]
    seeds: Sequence[int]
    sums: LocalSums
    limits: Limits
    later: BatchPlan
    most_steps: int
    overflowed: bool = False
    came_again: bool = False
    earlier: Earlier | None = None


class Probes:
    """The computations of one case, noted by the names of docs/explaining.md."""

    def __init__(self, bench: Bench, case: Case) -> None:
        self.bench = bench
        self.case = case
        self.batches = case.batches
        self.not_tried: list[str] = []
        self.numbers: dict[str, Any] = {}
        self.first = self.note("first", bench.begin(case.batches, case.seeds, case.sums))

    @property
    def left(self) -> int:
        """How many computations of the step the budget still allows."""
        return self.case.most_steps - self.bench.num_steps

    def note(self, probe: str, reading: Reading) -> Reading:
        self.numbers[probe] = reading.to_json()
        return reading

    def again(self, probe: str) -> Reading:
        """The step once more. Collective."""
        return self.note(probe, self.bench.compute(self.batches))

    def is_good(self, reading: Reading) -> bool:
        """Whether the gate would apply the step."""
        return reading.is_good(self.case.limits)

    def of_ranks(
        self,
        ranks: Collection[int],
        why: str = "samples are bad on {who} each time, and good on another rank",
    ) -> Finding:
        """The finding about ranks that give bad numbers where others do not: their devices, unless
        their copies of the weights differ. Collective.

        Args:
            why: with ``{who}`` in place of the ranks.
        """
        ranks = tuple(sorted(ranks))
        cause, why = Cause.sticky, why.format(who=name_ranks(ranks))
        if self.bench.copies_differ():
            cause = Cause.state
            why += "; the copy of the weights there differs from the others"
        return shown(cause, why, ranks=ranks)


def inconclusive(why: str, cause: Cause = Cause.unclear, remedy: Remedy = Remedy.ladder) -> Finding:
    """A finding that proves nothing."""
    return Finding(cause=cause, remedy=remedy, why=why)


def shown(cause: Cause, why: str, *, of: Finding | None = None, **more: Any) -> Finding:
    """A finding whose refutation was tried.

    Args:
        of: the finding whose place it takes.
        more: further fields, or others than usual.
    """
    remedy, refutation = _SHOWN[cause]
    fields: dict[str, Any] = {"refutation": refutation, "not_tried": (), "fallback": None, **more}
    fields = {"cause": cause, "remedy": remedy, "why": why, "is_tried": True, **fields}
    return replace(of or inconclusive(why), **fields)


def listing(positions: Sequence[int]) -> str:
    return first_few(positions, 8)
