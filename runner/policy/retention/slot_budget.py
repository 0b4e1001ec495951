"""Computes how many snapshots in memory a run needs and how many fit. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_SLOTS = 2  # one clean, one to fill


def slots_for_probation(*, interval: int, clean_after: int) -> int:
    """Slots needed so that a clean snapshot always exists and no snapshot is skipped.

    One clean, those on probation, and one being filled while the oldest is verified.

    Args:
        interval: steps between snapshots.
        clean_after: steps of probation.
    """
    return 1 + -(-clean_after // interval) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """A node's memory for snapshots, and the size of one snapshot, for all its ranks together."""

    name: str
    slot_bytes: int
    budget_bytes: int
    spare_slots: int = 0  # extra slots of the same size, for another node's snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """``slots`` per rank, equal everywhere; 0 if not even the minimum fits.

    ``tightest`` is the limiting node.
    """

    slots: int
    tightest: NodeNeed


def plan_slots(nodes: Sequence[NodeNeed], *, wanted: int) -> SlotPlan:
    """As many slots as requested, or as many as fit on every node."""
    tightest = min(nodes, key=_that_fit)
    slots = min(wanted, _that_fit(tightest))
    return SlotPlan(slots=slots if slots >= FEWEST_SLOTS else 0, tightest=tightest)


def _that_fit(node: NodeNeed) -> int:
    return max(0, node.budget_bytes // max(1, node.slot_bytes) - node.spare_slots)
