"""Decides which checkpoints are proven and which may be used. No file access.

A record is one copy of a checkpoint, in memory or on disk; copies of the same state share a
serial. ``committed``: complete. ``clean``: verified and followed by enough clean steps
(``checkpoint.clean_after`` in a row).
``tainted``: trouble began before it was proven, or the run went back to before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from runner.config.schema import CheckpointConfig

_FOLDER = re.compile(r"([0-9]{6,18})-step-([0-9]{8,18})")


class State(Enum):
    committed = "committed"
    clean = "clean"
    tainted = "tainted"


class Tier(Enum):
    """Where a copy is. One in memory may be lost in a crash; retention never counts it."""

    memory = "memory"
    disk = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One copy. ``serial`` orders copies, because steps repeat after a rollback and clocks jump."""

    serial: int
    step: int
    cursor: int
    state: State
    tier: Tier = Tier.disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far back the next rollback may have to go: to a checkpoint at or before both.

    ``step`` in applied updates, ``cursor`` a sample position.
    """

    step: int
    cursor: int


def folder_name(record: Record) -> str:
    """The name of a checkpoint's folder."""
    return f"{record.serial:06d}-step-{record.step:08d}"


def parse_name(folder: str) -> tuple[int, int] | None:
    """(serial, step) of a checkpoint's folder; None for any other folder."""
    match = _FOLDER.fullmatch(folder)
    return (int(match[1]), int(match[2])) if match else None


def _by_use(record: Record) -> tuple[int, bool]:
    """Sort key: newest first, and the copy in memory before the one on disk."""
    return -record.serial, record.tier is Tier.disk


def on_disk(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.tier is Tier.disk]


def in_memory(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.tier is Tier.memory]


def due_for_proof(
    records: Iterable[Record], *, step: int, clean_streak: int, clean_after: int
) -> list[Record]:
    """Committed checkpoints followed by ``clean_after`` clean steps in a row.

    A discarded step restarts the count. The initial state (step 0) needs no probation:
    no update came before it that could have poisoned it.
    """
    return [
        record
        for record in records
        if record.state is State.committed
        and (
            record.step == 0 or (step - record.step >= clean_after and clean_streak >= clean_after)
        )
    ]


def with_state(
    records: Iterable[Record], serial: int, state: State, tier: Tier = Tier.disk
) -> list[Record]:
    """Return the records with the state of one replaced."""
    return [replace(r, state=state) if (r.serial, r.tier) == (serial, tier) else r for r in records]


def rollback_targets(records: Iterable[Record], *, cursor: int, step: int) -> list[Record]:
    """Clean checkpoints from before ``cursor`` and at ``step`` or earlier.

    Newest first.
    """
    usable = [
        record
        for record in records
        if record.state is State.clean and record.cursor <= cursor and record.step <= step
    ]
    return sorted(usable, key=_by_use)


def older_targets(targets: Sequence[Record], repeat: int) -> list[Record]:
    """Rollback targets when trouble has come back ``repeat`` times, best first.

    Skips that many checkpoints on disk: snapshots in memory are a few steps apart, and going back a
    few more steps would not help. The skipped ones come last, oldest first, in case no other can be
    loaded.
    """
    serials = [record.serial for record in on_disk(targets) or targets]
    newest = serials[min(repeat, len(serials) - 1)] if repeat else targets[0].serial
    older = [record for record in targets if record.serial <= newest]
    return older + [record for record in reversed(targets) if record.serial > newest]


def resume_order(records: Iterable[Record]) -> list[Record]:
    """Checkpoints that a restart may load, newest first: complete and not tainted.

    :func:`runner.startup.resume.resume_from` leaves out what the journal distrusts; the first that
    is sound is loaded.
    """
    usable = [record for record in records if record.state is not State.tainted]
    return sorted(usable, key=_by_use)


def abandoned_by_rollback(records: Iterable[Record], target: int) -> list[Record]:
    """Checkpoints that a rollback to serial ``target`` abandons."""
    return [record for record in records if record.serial > target]


def next_upload(
    records: Iterable[Record], stored: Iterable[Record], *, tried: int, unproven: bool = False
) -> Record | None:
    """The newest clean checkpoint, unless it was uploaded or its upload failed (``tried``).

    Older ones are not uploaded after it: if the store is slower than the ring, a restart needs the
    newest. One that was uploaded unproven is uploaded once more, for its mark, when it is clean.

    Args:
        unproven: the newest that a restart may load instead.
    """
    usable = resume_order(records)
    newest = next((r for r in usable if unproven or r.state is State.clean), None)
    if newest is None:
        return None
    alike = [r.serial for r in stored if r.state in (newest.state, State.clean)]
    return newest if newest.serial > max([*alike, tried]) else None


# Decides which checkpoints are deleted, in each tier and in the object store, and how many
# snapshots a node's memory has room for. Plain numbers; no file access.

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
    """The checkpoints to keep in the object store, by the same rule as in the ring.

    An unproven one is of use only until a later one is clean.
    """
    clean = max((record.serial for record in stored if record.state is State.clean), default=0)
    leaving = {record.serial for record in retire(stored, keep=keep, keep_every=keep_every)}
    leaving |= {r.serial for r in stored if r.state is not State.clean and r.serial < clean}
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
