"""Decides which checkpoints are deleted, in each tier and in the object store, and how many
snapshots a node's memory has room for. Plain numbers; no file access.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from runner.config.schema import CheckpointConfig
from runner.policy.retention.records import (
    Reach,
    Record,
    State,
    in_memory,
    on_disk,
    rollback_targets,
)

# Unproven checkpoints serve only a restart, which needs at most the two newest.
_UNPROVEN_KEPT = 2


def retire(
    records: Sequence[Record], *, keep: int, keep_every: int, reach: Reach | None = None
) -> list[Record]:
    """The checkpoints to delete from the disk now, oldest first; never the last clean one.

    Copies in memory and on disk are independent. Kept: the ``keep`` newest clean ones, clean ones
    at multiples of ``keep_every`` steps (0: none), the newest unproven ones, and the newest clean
    one within ``reach`` with those after it: a few bad steps may be the onset of trouble that needs
    a rollback, and a checkpoint proven between them is too new.
    """
    newest = sorted(on_disk(records), key=lambda record: record.serial, reverse=True)
    clean = [record for record in newest if record.state is State.clean]
    unproven = [record for record in newest if record.state is State.committed]
    kept = {record.serial for record in clean[: max(1, keep)]}
    kept |= {record.serial for record in unproven[:_UNPROVEN_KEPT]}
    if reach is not None:
        within = rollback_targets(clean, cursor=reach.cursor, step=reach.step)
        kept |= {record.serial for record in clean if within and record.serial >= within[0].serial}
    if keep_every > 0:
        kept |= {record.serial for record in clean if record.step % keep_every == 0}
    tainted_only = not clean and not unproven
    return [
        record
        for record in reversed(newest)
        # If nothing else is left, keep a tainted checkpoint for a person to inspect.
        if record.serial not in kept and not (tainted_only and record.serial == newest[0].serial)
    ]


def make_room(records: Iterable[Record], *, busy: Collection[int], must: bool) -> Record | None:
    """The copy in memory to drop for a new one; None to skip the new one.

    Kept: the newest clean one, as a rollback target, and the oldest unproven one, which is closest
    to its proof: if each snapshot replaced the previous one, none would ever be proven.

    Args:
        busy: serials of copies that are being written to disk or proven.
        must: the new one goes to disk, so even copies kept here may be dropped for it.
    """
    snapshots = sorted(in_memory(records), key=lambda record: record.serial)
    clean = [record for record in snapshots if record.state is State.clean]
    unproven = [record for record in snapshots if record.state is not State.clean]
    choice = [*clean[:-1], *reversed(unproven[1:])]
    if must:
        choice += [*unproven[:1], *clean[-1:]]
    return next((record for record in choice if record.serial not in busy), None)


def kept_there(stored: Sequence[Record], *, keep: int, keep_every: int) -> list[Record]:
    """The checkpoints to keep in the object store, by the same rule as in the ring."""
    leaving = {record.serial for record in retire(stored, keep=keep, keep_every=keep_every)}
    return [record for record in stored if record.serial not in leaving]


FEWEST_SLOTS = 2  # one clean, one to fill
_EVERY = 10


def memory_every(config: CheckpointConfig) -> int:
    """Steps between snapshots, at first; 0: none."""
    return _EVERY if config.memory_every is None else config.memory_every


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
