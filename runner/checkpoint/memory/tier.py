"""The memory tier: which snapshots it holds, equal on every rank, and its jobs.

Knows its slots, what pins them, and their copies on other nodes, but no states of a
checkpoint. Its background work consists of processes (:mod:`runner.checkpoint.jobs`). If one has a
result, it is a sentence for each rank that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from runner.checkpoint.disk.shards import Snapshot, own_share
from runner.checkpoint.jobs import LockstepQueue, Process, QueuedJob, start
from runner.checkpoint.memory.peer_replica import PeerReplica, ReplicaInventory, on_every_rank
from runner.checkpoint.memory.snapshot import Memory
from runner.checkpoint.protocol import (
    CheckpointMetadata,
    PendingCheckpoint,
    Restored,
    RingRanks,
    ShardedState,
    check_counts,
)
from runner.policy.retention.records import Record, Tier

# Which snapshot is in which slot, and what pins it there; the same on all ranks.


class PinReason(Enum):
    """Why a slot must not be reused."""

    kept = "kept"  # it counts as a copy of its checkpoint
    seal = "seal"  # it is being filled, and digested
    write = "write"  # it is being written to disk
    prove = "prove"  # it is being verified
    replica = "replica"  # it is being sent to a peer


@dataclass(slots=True, kw_only=True)
class SlotEntry:
    """A snapshot in a slot, with the state that is not in the engine's tensors."""

    slot: int
    metadata: CheckpointMetadata
    counts: Mapping[str, int]
    pins: set[PinReason] = field(default_factory=set)
    is_replicated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """The parts of the ring's memory tier; without ``memory`` it has none.

    ``replica`` is set if snapshots also go to another node.
    """

    memory: Memory | None = None
    replica: PeerReplica | None = None


NO_MEMORY = MemoryParts()


@dataclass(eq=False)
class MemoryTier:
    """
    Args:
        peer: what sends snapshots to other nodes, and its queue.
        queue: the queue of all other jobs.
    """

    memory: Memory
    peer: tuple[PeerReplica, LockstepQueue] | None
    sharded: ShardedState
    ranks: RingRanks
    queue: LockstepQueue
    _entries: dict[int, SlotEntry] = field(default_factory=dict)  # by serial
    _ready: list[int] = field(default_factory=list)  # slots that can be filled
    _earlier: dict[int, ReplicaInventory] = field(default_factory=dict)
    _earlier_incarnation: int = 0

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return self._free() is not None

    def _free(self) -> int | None:
        """A slot without a pin."""
        used = {entry.slot for entry in self._entries.values()}
        return next((slot for slot in self._ready if slot not in used), None)

    def busy(self) -> set[int]:
        """Serials whose slots a job uses, so that they cannot be reused."""
        entries = self._entries.items()
        return {serial for serial, entry in entries if entry.pins - {PinReason.kept}}

    def has(self, serial: int) -> bool:
        """Whether a slot of this incarnation holds it."""
        return serial in self._entries

    def unpin(self, serial: int, why: PinReason) -> None:
        """Remove one pin; the last one frees the slot."""
        entry = self._entries.get(serial)
        if entry is not None:
            entry.pins.discard(why)
            if not entry.pins:
                del self._entries[serial]

    def _job(self, work: Callable[[], None]) -> QueuedJob:
        return QueuedJob(queue=self.queue, work=work)

    def files(self) -> list[Path]:
        """This rank's files, oldest first."""
        return [self.memory.path_of(entry.slot) for _, entry in sorted(self._entries.items())]

    def begin(self, report_short: Callable[[str, list[str]], None]) -> None:
        """Remove what earlier incarnations left, and make own slots in the background.

        Args:
            report_short: called with a sentence if there is less memory than planned.
        """
        self._earlier = {}
        self.memory.forget_earlier()
        for slot in range(self.memory.num_slots):
            start(self._prepare(slot, report_short))
        if self.peer is not None:
            start(self._prepare_copies(*self.peer, report_short))

    def _prepare(self, slot: int, report_short: Callable[[str, list[str]], None]) -> Process[None]:
        failures = yield self._job(lambda: self.memory.prepare(slot))
        if failures:
            report_short(f"without slot {slot}", failures)
        elif slot not in self._ready:
            self._ready.append(slot)

    def _prepare_copies(
        self,
        replica: PeerReplica,
        peer_queue: LockstepQueue,
        report_short: Callable[[str, list[str]], None],
    ) -> Process[None]:
        failures = yield QueuedJob(queue=peer_queue, work=replica.prepare)
        if failures:
            self.peer = None
            report_short("without copies on other nodes", failures)

    # -- one snapshot ---------------------------------------------------------------------

    def before_update(self) -> None:
        """Call it before the optimizer changes the state; see :class:`Memory`."""
        self.memory.before_update()

    def take(self, pending: PendingCheckpoint, *, overlap: bool) -> Process[list[str]]:
        """Copy the state into a free slot; digest it in the background."""
        slot = self._free()
        assert slot is not None
        pins = {PinReason.seal, PinReason.kept} | ({PinReason.write} if pending.disk else set())
        self._entries[pending.serial] = SlotEntry(
            slot=slot, metadata=pending.metadata, counts=pending.counts, pins=pins
        )
        self.memory.fill(slot, self.sharded.shards(), overlap=overlap)
        failures = yield self._job(
            lambda: self.memory.seal(slot, pending.serial, pending.metadata, pending.counts)
        )
        self.unpin(pending.serial, PinReason.seal)
        return failures

    def to_write(self, serial: int) -> tuple[list[Snapshot], Callable[[], None]]:
        """Views of what a slot writes to disk, and a check to call after the write.

        The check comes after the write, because it must cover the bytes that were written: the
        file's own digest would hide a byte that changed in the slot before.
        """
        slot = self._entries[serial].slot
        pieces = ((place.name, place.start, v) for place, v in self.memory.pieces(slot))
        return list(own_share(pieces, self.sharded.replica)), lambda: self.memory.check(slot)

    def verify(self, serial: int) -> Process[list[str]]:
        """Compare every byte with what was sealed, and refuse NaN and Inf."""
        entry = self._entries[serial]
        entry.pins.add(PinReason.prove)
        failures = yield self._job(lambda: self.memory.check(entry.slot, finite=True))
        self.unpin(serial, PinReason.prove)
        return failures

    def replicate(self, serial: int, *, must: bool = False) -> None:
        """Replicate the snapshot to its peer; skipped while a transfer is in flight, or after it
        if it ``must``."""
        if self.peer is not None and (must or not self.peer[1].num_jobs):
            start(self._replicate(*self.peer, serial))

    def is_replicated(self, serial: int) -> bool:
        """Whether every rank's peer has it."""
        return serial in self._entries and self._entries[serial].is_replicated

    def _replicate(
        self, replica: PeerReplica, peer_queue: LockstepQueue, serial: int
    ) -> Process[None]:
        entry = self._entries[serial]
        entry.pins.add(PinReason.replica)
        failures = yield QueuedJob(
            queue=peer_queue, work=lambda: replica.exchange(entry.slot, serial)
        )
        entry.is_replicated = not failures
        self.unpin(serial, PinReason.replica)

    def drop(self, serial: int) -> None:
        """Drop it, for this process and for any later one on this node."""
        entry = self._entries.get(serial)
        if entry is not None:
            self.memory.invalidate(entry.slot)
            self.unpin(serial, PinReason.kept)  # a write in progress goes on

    def taint(self, serial: int) -> None:
        """Drop it together with the copies on other nodes."""
        self.drop(serial)
        if self.peer is not None:
            self.peer[0].forget(serial)

    # -- across a restart -----------------------------------------------------------------

    def inherit(
        self,
        incarnation: int,
        *,
        metrics_bytes: int,
        journal_lines: int,
        is_wanted: Callable[[Record], bool],
    ) -> tuple[list[Record], int, list[str]]:
        """Find what ``incarnation`` left on every rank. Collective.

        Args:
            metrics_bytes, journal_lines: lengths of the files; a later snapshot cannot be used:
                its lines were kept in memory and were lost with the process.

        Returns:
            Their records, the highest serial of all (0 if there is none), and a sentence for each
            that cannot be used.
        """
        headers, refused = self.memory.left_by(incarnation)
        lengths = metrics_bytes, journal_lines
        copies = self.peer[0].left_by(incarnation, *lengths) if self.peer else []
        by_rank = self.ranks.gather(
            {
                "layout": self.memory.layout.digest,
                "own": [
                    [n.serial, n.step, n.cursor] for n in headers.values() if n.is_told(*lengths)
                ],
                "copies": copies,
                "refused": refused,
            }
        )
        self._earlier_incarnation = incarnation
        records = []
        for inventory in on_every_rank(by_rank):
            if is_wanted(inventory.record):
                self._earlier[inventory.record.serial] = inventory
                records.append(inventory.record)
        serials = [row[0] for listing in by_rank for row in listing["own"]]
        serials += [row[2] for listing in by_rank for row in listing["copies"]]
        sentences = dict.fromkeys(line for listing in by_rank for line in listing["refused"])
        return records, max(serials, default=0), list(sentences)

    def load(self, serial: int) -> Restored:
        """Verify it, then copy it into the sharded state. Collective.

        Raises:
            CorruptCheckpoint: it is damaged or gone on some rank.
        """
        memory = self.memory
        if serial in self._earlier:
            self._take_over(self._earlier.pop(serial))
        else:
            slot = self._entries[serial].slot
            self.ranks.all_or_none("verifying a snapshot", lambda: memory.check(slot, quick=True))
        entry = self._entries[serial]

        def copy_back() -> None:
            check_counts(self.sharded, entry.counts, memory.path_of(entry.slot))
            memory.before_update()
            memory.copy_out(entry.slot, self.sharded.shards())

        self.ranks.all_or_none("loading a snapshot", copy_back)
        self.sharded.finish_load(entry.counts)  # collective: see DiskTier.load
        return Restored(serial=serial, tier=Tier.memory, **entry.metadata.metadata())

    def _take_over(self, inventory: ReplicaInventory) -> None:
        """Adopt an earlier incarnation's snapshot, in the first slot."""
        memory, serial = self.memory, inventory.record.serial
        earlier = self._earlier_incarnation

        def take() -> None:
            if self.ranks.rank in inventory.holders:  # of its snapshot, on other nodes
                memory.room(0)
            else:
                memory.adopt(earlier, serial, 0)

        self.ranks.all_or_none("adopting a snapshot", take)
        if self.peer is not None and inventory.holders:
            self._bring_back(self.peer[0], inventory)
        header = memory.header_of(0)
        # The lengths are those of the first rank's files.
        metadata = CheckpointMetadata(**self.ranks.from_first(header.metadata()))
        if 0 not in self._ready:
            self._ready.append(0)
        self._entries[serial] = SlotEntry(
            slot=0, metadata=metadata, counts=header.update_counts, pins={PinReason.kept}
        )

    def _bring_back(self, replica: PeerReplica, inventory: ReplicaInventory) -> None:
        """Bring a snapshot from other nodes to the ranks that have lost it. Collective.

        The ranks agree before and after the transfer, never in it: one that failed alone there
        would go on to the agreement while others wait for its bytes.
        """
        earlier = self._earlier_incarnation
        parts = self.ranks.all_or_none(
            "opening the copies of a snapshot", lambda: replica.open_copies(inventory, earlier)
        )
        headers = replica.bring_back(*parts)

        def accept() -> None:
            for header in headers:
                self.memory.accept(0, header, earlier)

        self.ranks.all_or_none("fetching a snapshot from another node", accept)

    def close(self, *, forget: bool) -> None:
        """Close; ``forget``: no later start will use the snapshots."""
        if self.peer is not None:
            self.peer[0].close(forget=forget)
        self.memory.close(forget=forget)
