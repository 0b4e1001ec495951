"""The ring of one run on one rank: the states of its checkpoints.

Decides from the records alone what is saved, proven, retired, tainted and restored; the tiers
handle the bytes (:mod:`~runner.checkpoint.disk.tier`, :mod:`~runner.checkpoint.memory.tier`).
Every rank holds the same records and changes them at the same step.

With a memory tier a save is a copy into a slot there; what goes to disk is written from the
slot. Each tier has a queue of background work, so that a slow disk delays no snapshot.

Read the life of a checkpoint (:mod:`runner.checkpoint.lifecycle`) in ``_make`` (snapshot, seal,
write, commit) and ``_prove`` (verify, mark clean); ``_retire`` and ``_taint`` end it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.disk.shards import RateLimit
from runner.checkpoint.disk.tier import DiskTier
from runner.checkpoint.jobs import (
    JobProgress,
    LockstepQueue,
    LockstepQueues,
    Process,
    QueuedJob,
    start,
    start_alone,
)
from runner.checkpoint.lifecycle import Copy, Life
from runner.checkpoint.memory.tier import NO_MEMORY, MemoryParts, MemoryTier, PinReason
from runner.checkpoint.protocol import (
    CheckpointMetadata,
    Identity,
    PendingCheckpoint,
    Restored,
    RingRanks,
    ShardedState,
)
from runner.checkpoint.remote.upload import Uploads
from runner.config.schema import CheckpointConfig
from runner.policy.decision.history import Incident
from runner.policy.retention.records import (
    Reach,
    Record,
    State,
    Tier,
    abandoned_by_rollback,
    due_for_proof,
    in_memory,
    make_room,
    on_disk,
    retire,
)
from runner.system.error import (
    CheckpointError,
    CorruptCheckpoint,
    ReadError,
    RunnerError,
    UnreadableCheckpoint,
)


class CheckpointRing:
    """See the module's docstring.

    Args:
        report: takes incidents, alike on every rank.
        before_write: called with the step in the background, before this rank's file.
        memory: this rank's slots in shared memory, and what copies them to other nodes.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        *,
        sharded: ShardedState,
        ranks: RingRanks,
        settings: CheckpointConfig,
        identity: Identity,
        report: Callable[[Incident], None],
        before_write: Callable[[int], None] = lambda step: None,
        memory: MemoryParts = NO_MEMORY,
    ) -> None:
        self._copies: dict[tuple[int, Tier], Copy] = {}  # without those that are gone
        self._directory = directory
        self._sharded = sharded
        self._ranks = ranks
        self._settings = settings
        self._report = report
        self.next_serial = 1
        self._step = 0
        self._reach: Reach | None = None
        self._also_kept: list[Callable[[], Collection[int]]] = []
        count = 3 if memory.replica is None else 4
        self._queues = LockstepQueues(ranks, count=count)
        self._snapshot_queue, self._disk_queue, self.upload_queue, *self._peer_queues = (
            self._queues.queues
        )
        self._pace = RateLimit(settings.write_mib_per_second * (1 << 20))
        self._disk = DiskTier(
            directory,
            sharded=sharded,
            ranks=ranks,
            identity=identity,
            queue=self._disk_queue,
            pace=self._pace,
            before_write=before_write,
        )
        self._memory = self._memory_tier(memory, next(iter(self._peer_queues), None))
        self.uploads: Uploads | None = None
        # Whether the copy of the state may continue until before_update: not where others than the
        # runner change the state, or forward passes do.
        self.overlap = True
        # Called before the tensors of a checkpoint are read, with it. Collective.
        self.before_load: Callable[[Record], object] = lambda record: None

    def _memory_tier(
        self, memory: MemoryParts, peer_queue: LockstepQueue | None
    ) -> MemoryTier | None:
        if memory.memory is None:
            return None
        return MemoryTier(
            memory.memory,
            None if memory.replica is None or peer_queue is None else (memory.replica, peer_queue),
            sharded=self._sharded,
            ranks=self._ranks,
            queue=self._snapshot_queue,
        )

    def _say(self, kind: str, decision: str, reason: str, step: int | None = None) -> None:
        """Report an incident of this step, or of another."""
        at = self._step if step is None else step
        self._report(Incident(kind=kind, step=at, decision=decision, reason=reason))

    @property
    def records(self) -> list[Record]:
        """A record for each whole copy, in the order in which they were begun."""
        return [copy.record for copy in self._copies.values() if copy.is_recorded]

    @property
    def saved_step(self) -> int:
        """Step of the newest checkpoint on disk, unless it is tainted; -1 without one."""
        record = self._newest_on_disk()
        return record.step if record and record.state is not State.tainted else -1

    @property
    def last_state(self) -> State:
        """State of the newest checkpoint on disk."""
        record = self._newest_on_disk()
        assert record is not None
        return record.state

    def _newest_on_disk(self) -> Record | None:
        return max(on_disk(self.records), key=lambda record: record.serial, default=None)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written, proven, uploaded or removed."""
        return self._disk_queue.num_jobs > 0 or self.upload_queue.num_jobs > 0

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being made or proven, in memory or on disk."""
        return self._snapshot_queue.num_jobs + self._disk_queue.num_jobs > 0

    def newest(self) -> Path | None:
        """Folder of the newest committed checkpoint."""
        record = self._newest_on_disk()
        return self._directory.folder_of(record) if record else None

    def snapshot_files(self) -> list[Path]:
        """This rank's files of the snapshots in memory, oldest first."""
        return self._memory.files() if self._memory else []

    # -- what earlier processes left ------------------------------------------------------

    def adopt(self, records: Iterable[Record], *, next_serial: int) -> None:
        """Take over what an earlier process left on disk."""
        self._copies = {}
        self._add_found(records)
        self.next_serial = next_serial

    def _add_found(self, records: Iterable[Record]) -> None:
        self._copies |= {(r.serial, r.tier): Copy.found(r) for r in records}

    def inherit(
        self,
        incarnation: int,
        *,
        is_refused: Callable[[Record], bool],
        metrics_bytes: int,
        journal_lines: int,
    ) -> list[str]:
        """Add the snapshots that ``incarnation`` left in memory on every rank. Collective.

        Args:
            is_refused: whether the journal forbids one, because a rollback left it behind.
            metrics_bytes, journal_lines: lengths of the files; a later snapshot cannot be used.

        Returns:
            Sentences that say what cannot be used, and why.
        """
        if self._memory is None:
            return []
        saved = self._newest_on_disk()
        known = {(r.serial, r.step, r.cursor) for r in on_disk(self.records)}

        def is_wanted(record: Record) -> bool:
            is_newer = saved is None or record.serial > saved.serial
            is_known = (record.serial, record.step, record.cursor) in known
            return (is_newer or is_known) and not is_refused(record)

        records, highest, refused = self._memory.inherit(
            incarnation,
            metrics_bytes=metrics_bytes,
            journal_lines=journal_lines,
            is_wanted=is_wanted,
        )
        self._add_found(records)
        self.next_serial = max(self.next_serial, highest + 1)
        return refused

    def replace_memory(self, memory: MemoryParts) -> None:
        """Keep snapshots in other slots from now on, or in none. Collective.

        For a loop whose optimizer makes its state late. Call it when nothing is under way
        (:meth:`drain`); the contents of the old slots are dropped.
        """
        if self._memory is not None:
            for copy in [c for c in self._copies.values() if c.tier is Tier.memory]:
                self._forget(copy)
            self._memory.close(forget=True)
        self._memory = self._memory_tier(memory, None)
        self._begin_memory()

    def begin(self, uploads: Uploads | None = None) -> None:
        """After the resume, remove older incarnations' snapshots and make own slots.

        In the background, so that training need not wait for it.

        Args:
            uploads: uploads clean checkpoints to a remote from now on.
        """
        self.uploads = uploads
        self._begin_memory()

    def _begin_memory(self) -> None:
        memory = self._memory
        if memory is None:
            return
        for copy in list(self._copies.values()):
            if copy.tier is Tier.memory and not memory.has(copy.serial):
                self._forget(copy)
        memory.begin(self._report_short)

    def _report_short(self, without_what: str, failures: list[str]) -> None:
        reason = f"no room for a snapshot in memory: {'; '.join(failures)}"
        self._say("memory_short", f"go on {without_what}", reason)

    # -- saving ---------------------------------------------------------------------------

    def before_update(self) -> None:
        """Call it before the optimizer changes what is being copied. The host does not wait."""
        if self._memory is not None:
            self._memory.before_update()

    def save(
        self, metadata: CheckpointMetadata, *, disk: bool = True, is_last: bool = False
    ) -> bool:
        """Copy the state now; digest it, and write, sync and commit it, while training goes on.

        Waits first for a save to disk that is still under way: a disk slower than the interval
        must slow the run down rather than fill the memory with copies.

        Args:
            disk: False keeps a snapshot in memory only, and none if no slot is free.
            is_last: before the process ends: a snapshot is taken at once, also sent to its peer,
                and written when the save under way is committed.

        Returns:
            False where nothing was done: no slot is free, and it needs one.
        """
        is_behind = disk and bool(self._disk_saves())
        if is_behind and not is_last:
            self.drain()
        memory = self._memory if self._has_room(must=disk) else None
        if memory is None and (not disk or (is_last and is_behind)):
            return False
        serial, self.next_serial = self.next_serial, self.next_serial + 1
        pending = PendingCheckpoint(
            serial=serial, metadata=metadata, counts=self._sharded.update_counts(), disk=disk
        )
        start(self._make(pending, memory, is_last=is_last))
        if not self._settings.background:
            self.drain()
        return True

    def finish_save(self, is_late: Callable[[], bool]) -> bool:
        """Wait for a save to disk that is under way; False as in :meth:`drain`. Collective."""
        return not self._disk_saves() or self.drain(is_late)

    def _disk_saves(self) -> list[Copy]:
        """Copies that are being written to disk."""
        copies = self._copies.values()
        return [copy for copy in copies if copy.tier is Tier.disk and copy.is_being_saved]

    def is_on_its_way(self, step: int) -> bool:
        """Whether the state of this step is on disk, or is being written there."""
        return step == self.saved_step or step in [c.record.step for c in self._disk_saves()]

    def saved_steps(self) -> set[int]:
        """Steps of the checkpoints that are on disk or being written there, and not tainted."""
        found = [*on_disk(self.records), *(copy.record for copy in self._disk_saves())]
        return {record.step for record in found if record.state is not State.tainted}

    def held_in_memory(self, step: int) -> tuple[bool, bool]:
        """Whether a snapshot of this step is whole on all ranks, and so are its copies at peers."""
        newest = max(in_memory(self.records), key=lambda record: record.serial, default=None)
        if newest is None or newest.step != step or self._memory is None:
            return False, False
        return True, self._memory.is_replicated(newest.serial)

    def _has_room(self, *, must: bool) -> bool:
        """Whether a slot is free; drops an old snapshot for it if necessary."""
        memory = self._memory
        if memory is None:
            return False
        if memory.has_room or self._make_room(memory, must=False):
            return True
        if not must:
            return False
        self._drain([self._snapshot_queue])
        return memory.has_room or self._make_room(memory, must=True)

    def _make_room(self, memory: MemoryTier, *, must: bool) -> bool:
        leaving = make_room(self.records, busy=memory.busy(), must=must)
        if leaving is not None:
            self._forget(self._copy_of(leaving))
            memory.drop(leaving.serial)
        return memory.has_room

    def _make(
        self, pending: PendingCheckpoint, memory: MemoryTier | None, *, is_last: bool
    ) -> Process[None]:
        """Make a checkpoint: copy the state, seal the copy, write it, commit what was written."""
        copy = self._begin(pending, Tier.disk) if pending.disk else None
        if memory is None:
            pieces, check = self._disk.copies(), lambda: None
        else:
            yield from self._make_snapshot(pending, memory, must_replicate=is_last)
            if copy is None:
                return
            if copy.is_left_behind:
                memory.unpin(pending.serial, PinReason.write)
                self._forget(copy)
                return
            pieces, check = memory.to_write(pending.serial)
        assert copy is not None
        while any(other.serial < copy.serial for other in self._disk_saves()):
            # It is nearer to its end, and must be committed before this one is written.
            yield QueuedJob(queue=self._disk_queue, work=lambda: None)
        failures = yield self._disk.write(pending, pieces, check)
        if memory is not None:
            memory.unpin(pending.serial, PinReason.write)
        if not failures and not copy.is_left_behind:
            failures = yield self._disk.commit(pending)
            if not failures:
                self._commit(copy)
                self._retire()
                return
        is_left_behind = copy.is_left_behind
        self._forget(copy)
        self._disk.discard_unfinished(pending.serial)
        if not is_left_behind:
            self._report_unsaved(pending, failures)

    def _make_snapshot(
        self, pending: PendingCheckpoint, memory: MemoryTier, *, must_replicate: bool
    ) -> Process[None]:
        """Copy the state into a slot and seal it there; then it is a checkpoint of its own."""
        copy = self._begin(pending, Tier.memory)
        failures = yield from memory.take(pending, overlap=self.overlap)
        if copy.is_left_behind:
            self._forget(copy)
            memory.drop(pending.serial)
        elif failures:
            self._forget(copy)
            memory.unpin(pending.serial, PinReason.kept)
            reason = f"snapshot {pending.serial} in memory: {'; '.join(failures)}"
            self._say("snapshot_failed", "go on without it", reason, pending.metadata.step)
        else:
            self._commit(copy)
            memory.replicate(pending.serial, must=must_replicate)

    def _begin(self, pending: PendingCheckpoint, tier: Tier) -> Copy:
        """Register a copy that is not a checkpoint yet."""
        copy = Copy(pending.metadata.record(pending.serial, tier), Life.saving)
        self._copies[pending.serial, tier] = copy
        return copy

    def _commit(self, copy: Copy) -> None:
        """Make it a checkpoint, unless the run went back while it was published."""
        if copy.is_left_behind:
            self._taint(copy)
            return
        is_due = copy.life is Life.served
        copy.move(Life.committed)
        if is_due:
            start(self._prove(copy))

    def _forget(self, copy: Copy) -> None:
        copy.move(Life.gone)
        del self._copies[copy.serial, copy.tier]

    def _copy_of(self, record: Record) -> Copy:
        return self._copies[record.serial, record.tier]

    def _report_unsaved(self, pending: PendingCheckpoint, failures: list[str]) -> None:
        """Journal a save that failed.

        Raises:
            CheckpointError: there is no checkpoint to go back to.
        """
        # A copy in memory does not count: it is lost with its node.
        # A checkpoint whose mark could not be written can still be a rollback target.
        stands = [r for r in on_disk(self.records) if r.state is not State.tainted]
        standing = "none stands"
        if stands:
            is_clean = stands[-1].state is State.clean
            kind = "clean checkpoint" if is_clean else "checkpoint, not yet proven,"
            standing = f"{kind} of step {stands[-1].step} stands"
        reason = f"checkpoint {pending.serial}: {'; '.join(failures)}; {standing}"
        self._say("save_failed", "go on" if stands else "stop", reason, pending.metadata.step)
        if not stands:
            raise CheckpointError(
                f"cannot save to {self._directory.folder}: {'; '.join(failures)}, and there is no "
                "clean checkpoint; free space or choose another out"
            )

    # -- proving and retiring -------------------------------------------------------------

    def after_step(
        self, step: int, clean_streak: int, *, reach: Reach | None = None, may_prove: bool = True
    ) -> None:
        """Begin to prove the checkpoints whose probation is over.

        Checkpoints still being written are on probation too: whether one becomes clean must
        not depend on how slow the disk is.

        Args:
            reach: how far back the next rollback may have to go; it stays until the next call.
            may_prove: False delays proofs, for a reason that all ranks share.
        """
        self._step, self._reach = step, reach
        if may_prove:
            self._prove_due(step, clean_streak)
        if self.uploads is not None:
            self.uploads.after_step(on_disk(self.records), step)

    def _prove_due(self, step: int, clean_streak: int) -> None:
        waiting = [c for c in self._copies.values() if c.life in (Life.saving, Life.committed)]
        for record in due_for_proof(
            [copy.record for copy in waiting],
            step=step,
            clean_streak=clean_streak,
            clean_after=self._settings.clean_after,
        ):
            copy = self._copy_of(record)
            if copy.life is Life.saving:
                copy.move(Life.served)
            else:
                start(self._prove(copy))

    def finish_proofs(self, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Wait for all writes and proofs under way; False as in :meth:`drain`. Collective.

        What is clean then follows from the steps alone, not from the speed of a disk.
        """
        if not self.drain(is_late):
            return False
        self._retire()
        return True

    def prove_last(self) -> list[str]:
        """Prove the newest checkpoint on disk, whatever followed it. Collective.

        Returns why it is not clean; a damaged one is tainted.
        """
        record = self._newest_on_disk()
        assert record is not None
        copy = self._copy_of(record)
        copy.faults = []
        if copy.life is Life.committed:
            start(self._prove(copy))
        self.drain()
        return [] if self.last_state is State.clean else copy.faults or ["it could not be read"]

    def _prove(self, copy: Copy) -> Process[None]:
        """Read every byte of a copy back; then it is clean, or tainted."""
        copy.move(Life.proving)
        if copy.tier is Tier.disk:
            copy.faults = yield self._disk.verify(copy.record)
        else:
            assert self._memory is not None
            copy.faults = yield from self._memory.verify(copy.serial)
        if copy.life is Life.gone:  # dropped in the meantime
            return
        if copy.faults:
            self._found_damaged(copy, copy.faults, "never to be used")
            return
        if copy.tier is Tier.disk:
            copy.faults = yield self._disk.mark_clean(copy.record)
        if copy.life is Life.condemned:
            copy.move(Life.tainted)
        elif copy.faults:
            copy.move(Life.committed)
        else:
            copy.move(Life.clean)
            if copy.tier is Tier.disk:
                self._retire()

    def _retire(self) -> None:
        settings = self._settings
        leaving = retire(
            self.records, keep=settings.keep, keep_every=settings.keep_every, reach=self._reach
        )
        pinned = self.uploads.pinned if self.uploads else set()
        also = {serial for serials in self._also_kept for serial in serials()}
        pinned |= {r.serial for r in leaving if r.serial in also and r.state is not State.tainted}
        for copy in map(self._copy_of, leaving):
            if not copy.is_being_proven and copy.serial not in pinned:
                self._forget(copy)
                self.remove(copy.record)

    def also_keep(self, serials: Callable[[], Collection[int]]) -> None:
        """Never retire checkpoints whose serials ``serials()`` returns at that time, but tainted
        ones."""
        self._also_kept.append(serials)

    def keep_best(self, serials: Callable[[Iterable[Record]], set[int]]) -> None:
        """Never retire the best clean checkpoint by ``serials``, here and at the remote, nor here a
        better one that is not proven yet."""

        def kept() -> set[int]:
            # The best may be tainted before it is proven; then the one before it is the best again.
            return serials(self.records) | serials(
                r for r in self.records if r.state is State.clean
            )

        self.also_keep(kept)
        if self.uploads is not None:
            self.uploads.best = serials

    def newest_clean(self) -> Record | None:
        """The newest clean checkpoint on disk."""
        clean = (record for record in on_disk(self.records) if record.state is State.clean)
        return max(clean, key=lambda record: record.serial, default=None)

    def remove(self, record: Record) -> None:
        """Delete a checkpoint's files in the background."""
        start_alone(self._disk.remove(record))

    # -- agreement ------------------------------------------------------------------------

    def progress(self) -> JobProgress:
        """This rank's counts for the numbers that a step sums over ranks."""
        return self._queues.progress()

    def apply_progress(self, sums: Sequence[float], jobs: Sequence[int]) -> None:
        """Take the summed counts of ``jobs``; records change here, on all ranks alike."""
        self._queues.apply_progress(sums, jobs)

    def drain(self, is_late: Callable[[], bool] = lambda: False, *, peers: bool = False) -> bool:
        """Finish all background work but uploads. Collective.

        Args:
            peers: also what is sent to other nodes' memory.

        Returns False, on all ranks alike, if some rank's ``is_late`` returned True.
        """
        queues = [self._snapshot_queue, self._disk_queue, *(self._peer_queues if peers else ())]
        return self._drain(queues, is_late)

    def turn(self) -> None:
        """Wait a moment for background work, and apply what is done. Collective."""
        self._queues.turn()

    def _drain(
        self, queues: Sequence[LockstepQueue], is_late: Callable[[], bool] = lambda: False
    ) -> bool:
        self._pace.hurry.set()
        try:
            return self._queues.drain(queues, is_late)
        finally:
            self._pace.hurry.clear()

    def close(self, *, wait: bool = True, forget: bool = False) -> None:
        """End the background threads; ``wait`` False leaves a file that is written unfinished.

        Args:
            forget: no later start will use the snapshots in memory.
        """
        self._pace.hurry.set()
        if self.uploads is not None:
            self.uploads.close()
        for queue in self._queues.queues:
            # The other threads may wait for a dead rank, or for the network.
            queue.close(wait=wait and queue in (self._snapshot_queue, self._disk_queue))
        if self._memory is not None:
            self._memory.close(forget=forget)

    # -- restoring ------------------------------------------------------------------------

    def restore(self, candidates: Sequence[Record]) -> Restored:
        """Load the first candidate whose every byte is as it was written. Collective.

        Raises:
            CheckpointError: none of them can be used; names each one's fault.
            ReadError: none can be used, but the disk only refused one that may be sound.
        """
        faults: list[str] = []
        kind: type[RunnerError] = CheckpointError
        for record in candidates:
            try:
                return self._load(record)
            except UnreadableCheckpoint as error:
                # Do not taint it: a disk that refuses it today may read it tomorrow.
                faults.append(str(error))
                kind = ReadError
                self._report_damaged(record, [str(error)], "an older checkpoint is used")
            except CorruptCheckpoint as error:
                faults.append(str(error))
                self._found_damaged(
                    self._copy_of(record), [str(error)], "an older checkpoint is used"
                )
        raise kind(
            f"no checkpoint in {self._directory.folder} can be loaded: "
            + ("; ".join(faults) or "there is none")
        )

    def show_restoring(self, show: Callable[[str, int, int], None]) -> None:
        """Call ``show(what, done_bytes, total_bytes)`` during restores from now on."""
        self._disk.show = show

    def _load(self, record: Record) -> Restored:
        self.before_load(record)
        if record.tier is Tier.disk:
            return self._disk.load(record, before_copy=self.before_update)
        assert self._memory is not None
        return self._memory.load(record.serial)

    # -- taint ----------------------------------------------------------------------------

    def distrust_after(self, step: int) -> None:
        """Taint every checkpoint of a later step. Collective, durable when it returns."""
        self.drain()
        for record in [r for r in self.records if r.step > step]:
            self._taint(self._copy_of(record))
        if self.uploads is not None:
            self.uploads.distrust(lambda record: record.step > step)
        self.drain()

    def abandon_after(self, serial: int, *, reach: Reach | None = None) -> None:
        """Taint every checkpoint newer than the one the run went back to, then retire them.

        Those that are being written count as well, and are never committed.

        Args:
            reach: of the state that was restored, see :meth:`after_step`.
        """
        self._reach = reach
        for copy in self._copies.values():
            if copy.serial > serial and copy.life in (Life.saving, Life.served):
                copy.move(Life.left_behind)
        for record in abandoned_by_rollback(self.records, serial):
            self._taint(self._copy_of(record))
        if self.uploads is not None:
            self.uploads.distrust(lambda record: record.serial > serial)
        self._retire()

    def _found_damaged(self, copy: Copy, faults: list[str], decision: str) -> None:
        record = copy.record
        if copy.is_being_proven and copy.tier is Tier.disk:
            copy.move(Life.tainted)  # not condemned: its proof is over
        self._taint(copy)
        self._report_damaged(record, faults, decision)

    def _report_damaged(self, record: Record, faults: list[str], decision: str) -> None:
        where = f"{record.step}{' in memory' if record.tier is Tier.memory else ''}"
        self._report(
            Incident(
                kind="checkpoint_damaged",
                step=self._step,
                decision=decision,
                reason=f"checkpoint {record.serial} of step {where}: {'; '.join(faults)}",
                detail={"serial": record.serial, "tier": record.tier.value},
            )
        )

    def _taint(self, copy: Copy) -> None:
        """Taint a copy, so that it is never used again; one in memory is dropped."""
        if copy.tier is Tier.memory:
            self._forget(copy)
            if self._memory is not None:
                self._memory.taint(copy.serial)
            return
        if copy.life is Life.proving:
            copy.move(Life.condemned)
        elif copy.record.state is not State.tainted:
            copy.move(Life.tainted)
        start_alone(self._disk.taint(copy.record))
