"""How many snapshots in memory a run needs, and how many fit. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_SLOTS = 2  # one that is clean, one to fill


def slots_for_probation(*, interval: int, clean_after: int) -> int:
    """Slots so that a clean snapshot is always there and none has to be left out.

    One clean, those on probation, and the one being filled while the oldest is verified.

    Args:
        interval: steps between snapshots.
        clean_after: steps of probation.
    """
    return 1 + -(-clean_after // interval) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """What one node has for snapshots, and what one snapshot takes there, all ranks together."""

    name: str
    slot_bytes: int
    budget_bytes: int
    spare_slots: int = 0  # of the same size, needed besides: copies of another node's


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """``slots`` of each rank, equal everywhere; 0: not even the fewest fit.

    ``tightest`` is the node that decides.
    """

    slots: int
    tightest: NodeNeed


def plan_slots(nodes: Sequence[NodeNeed], *, wanted: int) -> SlotPlan:
    """As many as wanted, or as many as fit on every node."""
    tightest = min(nodes, key=_that_fit)
    slots = min(wanted, _that_fit(tightest))
    return SlotPlan(slots=slots if slots >= FEWEST_SLOTS else 0, tightest=tightest)


def _that_fit(node: NodeNeed) -> int:
    return max(0, node.budget_bytes // max(1, node.slot_bytes) - node.spare_slots)
