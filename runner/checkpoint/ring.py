"""The ring of one run on one rank: what becomes of its checkpoints.

Decides, by the records alone, what is saved, proven, retired, tainted and restored; the tiers
handle the bytes (:mod:`~runner.checkpoint.disk_tier`, :mod:`~runner.checkpoint.memory_tier`).
Every rank holds the same records and changes them at the same step.

With a memory tier a save is a copy into a slot there; what goes to disk is written from the
slot. Each tier has a lane of background work: a slow disk holds no snapshot up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from runner.checkpoint.disk_tier import DiskTier
from runner.checkpoint.memory import Memory
from runner.checkpoint.memory_tier import MemoryTier
from runner.checkpoint.mirror import Mirror
from runner.checkpoint.protocol import Holder, Identity, Moment, Ranks, Restored, RingRules, Save
from runner.checkpoint.shards import Pace, Snapshot
from runner.checkpoint.store import RingStore
from runner.checkpoint.upload import Uploads
from runner.checkpoint.work import AgreedWork, Lanes, Told
from runner.error import (
    CheckpointError,
    CorruptCheckpoint,
    ReadError,
    RunnerError,
    UnreadableCheckpoint,
)
from runner.policy.history import Incident
from runner.policy.ring import (
    Record,
    State,
    Tier,
    abandoned_by_rollback,
    due_for_proof,
    make_room,
    on_disk,
    retire,
    with_state,
    without,
)


class Ring:
    """See the module's docstring.

    Args:
        report: takes incidents, alike on every rank.
        before_write: called with the step in the background, before this rank's file.
        memory: this rank's slots in shared memory; None: there are none.
        mirror: sends its snapshots to other nodes.
    """

    def __init__(
        self,
        store: RingStore,
        *,
        holder: Holder,
        ranks: Ranks,
        rules: RingRules,
        identity: Identity,
        report: Callable[[Incident], None],
        before_write: Callable[[int], None] = lambda step: None,
        memory: Memory | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.records: list[Record] = []
        self._holder = holder
        self._ranks = ranks
        self._rules = rules
        self._report = report
        self._next_serial = 1
        self._step = 0
        self._being_proven: set[tuple[int, Tier]] = set()
        self._saving = False
        self._left_behind: set[int] = set()
        count = 3 if mirror is None else 4
        self._work = Lanes(ranks.gather, world_size=ranks.world_size, count=count)
        self._near, self._far, self.uplink, *abroad = self._work.lanes
        self._not_waited_for = [self.uplink, *abroad]
        self._pace = Pace(rules.write_bytes_per_second)
        self._disk = DiskTier(
            store,
            holder=holder,
            ranks=ranks,
            identity=identity,
            lane=self._far,
            pace=self._pace,
            before_write=before_write,
        )
        self._memory: MemoryTier | None = None
        if memory is not None:
            self._memory = MemoryTier(
                memory,
                mirror,
                holder=holder,
                ranks=ranks,
                lane=self._near,
                abroad=abroad[0] if abroad else None,
            )
        self.uploads: Uploads | None = None

    @property
    def next_serial(self) -> int:
        return self._next_serial

    @property
    def saved_step(self) -> int:
        """Of the newest checkpoint on disk; -1: there is none."""
        record = self._newest_on_disk()
        return record.step if record else -1

    def _newest_on_disk(self) -> Record | None:
        return max(on_disk(self.records), key=lambda record: record.serial, default=None)

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written, proven, sent or removed."""
        return len(self._far) > 0 or len(self.uplink) > 0

    def newest(self) -> Path | None:
        """Folder of the newest committed checkpoint."""
        record = self._newest_on_disk()
        return self._disk.folder_of(record) if record else None

    def snapshot_files(self) -> list[Path]:
        """This rank's files of the snapshots in memory, oldest first."""
        return self._memory.files() if self._memory else []

    # -- what earlier processes left ------------------------------------------------------

    def adopt(self, records: Iterable[Record], *, next_serial: int) -> None:
        """Take over what an earlier process left on disk."""
        self.records = list(records)
        self._next_serial = next_serial

    def inherit(
        self, incarnation: int, *, is_refused: Callable[[Record], bool], metrics_bytes: int
    ) -> list[str]:
        """Add the snapshots that ``incarnation`` left in memory on every rank. Collective.

        Args:
            is_refused: whether the journal forbids one, as a rollback has left it behind.
            metrics_bytes: length of the metrics file; what was taken later is of no use.

        Returns:
            Sentences that say what is of no use, and why.
        """
        if self._memory is None:
            return []
        saved = self._newest_on_disk()
        known = {(r.serial, r.step, r.cursor) for r in on_disk(self.records)}

        def is_wanted(record: Record) -> bool:
            is_newer = saved is None or record.serial > saved.serial
            is_known = (record.serial, record.step, record.cursor) in known
            return (is_newer or is_known) and not is_refused(record)

        found = self._memory.inherit(incarnation, metrics_bytes=metrics_bytes, is_wanted=is_wanted)
        self.records += found.records
        self._next_serial = max(self._next_serial, found.highest + 1)
        return found.refused

    def begin_memory(self) -> None:
        """The run is taken up: what earlier incarnations left goes, and own slots are made.

        In the background, so that training need not wait for it.
        """
        memory = self._memory
        if memory is None:
            return
        self.records = [r for r in self.records if r.tier is Tier.disk or memory.has(r.serial)]
        memory.begin(self._report_short)

    def _report_short(self, without_what: str, failures: list[str]) -> None:
        self._report(
            Incident(
                kind="memory_short",
                step=self._step,
                decision=f"go on {without_what}",
                reason=f"no room for a snapshot in memory: {'; '.join(failures)}",
            )
        )

    # -- saving ---------------------------------------------------------------------------

    def before_update(self) -> None:
        """To be called before the optimizer changes the state; see :class:`Memory`."""
        if self._memory is not None:
            self._memory.before_update()

    def save(self, moment: Moment, *, disk: bool = True) -> None:
        """Copy the state now; digest it, and write, sync and commit it, while training goes on.

        Waits first for a save to disk that is still under way: a disk slower than the interval
        must slow the run down rather than fill the memory with copies.

        Args:
            disk: False keeps a snapshot in memory only, and none where no slot can be spared.
        """
        if disk and self._saving:
            self.drain()
        memory = self._memory if self._has_room(must=disk) else None
        if memory is None and not disk:
            return
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        save = Save(serial=serial, moment=moment, counts=self._holder.update_counts(), disk=disk)
        self._saving = self._saving or disk
        if memory is None:
            self._write(save, self._disk.copies())
        else:
            self._take_snapshot(memory, save)
        if not self._rules.background:
            self.drain()

    def _has_room(self, *, must: bool) -> bool:
        """Whether a slot can be filled; an old snapshot may have been given up for it."""
        memory = self._memory
        if memory is None:
            return False
        if memory.has_room or self._make_room(memory, must=False):
            return True
        if not must:
            return False
        self._drain([self._near])
        return memory.has_room or self._make_room(memory, must=True)

    def _make_room(self, memory: MemoryTier, *, must: bool) -> bool:
        leaving = make_room(self.records, busy=memory.busy(), must=must)
        if leaving is not None:
            self.records = without(self.records, leaving.serial, Tier.memory)
            memory.drop(leaving.serial)
        return memory.has_room

    def _take_snapshot(self, memory: MemoryTier, save: Save) -> None:
        def sealed(failures: list[str]) -> None:
            if save.serial in self._left_behind:  # the run went back in the meantime
                memory.drop(save.serial)
                if save.disk:
                    memory.written(save.serial)
                    self._saving = False
                return
            if save.disk:
                snapshots, check = memory.to_write(save.serial)
                self._write(save, snapshots, check)
            if failures:
                memory.release(save.serial)
                self._report_unsealed(save, failures)
            else:
                self.records.append(_committed(save, Tier.memory))
                memory.send_abroad(save.serial)

        memory.take(save, sealed)

    def _report_unsealed(self, save: Save, failures: list[str]) -> None:
        self._report(
            Incident(
                kind="snapshot_failed",
                step=save.moment.step,
                decision="go on without it",
                reason=f"snapshot {save.serial} in memory: {'; '.join(failures)}",
            )
        )

    def _write(
        self,
        save: Save,
        snapshots: Sequence[Snapshot],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk.write(
            save, snapshots, lambda failures: self._written(save, failures), check=check
        )

    def _written(self, save: Save, failures: list[str]) -> None:
        if self._memory is not None:
            self._memory.written(save.serial)
        if save.serial in self._left_behind:
            self._saving = False
            self._disk.discard_unfinished(save.serial)
        elif failures:
            self._save_failed(save, failures)
        else:
            self._disk.commit(save, lambda failed: self._committed(save, failed))

    def _committed(self, save: Save, failures: list[str]) -> None:
        self._saving = False
        if failures and save.serial not in self._left_behind:
            self._save_failed(save, failures)
        if failures:
            return
        record = _committed(save, Tier.disk)
        self.records.append(record)
        if save.serial in self._left_behind:  # the run went back while it was being committed
            self._taint(record)
        self._retire()

    def _save_failed(self, save: Save, failures: list[str]) -> None:
        self._saving = False
        self._disk.discard_unfinished(save.serial)
        # A copy in memory is no comfort: it is gone with its node.
        stands = [record for record in on_disk(self.records) if record.state is State.clean]
        standing = f"clean checkpoint of step {stands[-1].step} stands" if stands else "none stands"
        self._report(
            Incident(
                kind="save_failed",
                step=save.moment.step,
                decision="go on" if stands else "stop",
                reason=f"checkpoint {save.serial}: {'; '.join(failures)}; {standing}",
            )
        )
        if not stands:
            raise CheckpointError(
                f"cannot save to {self._disk.folder}: {'; '.join(failures)}, and no clean "
                "checkpoint stands; free space or choose another out"
            )

    # -- proving and retiring -------------------------------------------------------------

    def after_step(self, step: int, clean_streak: int) -> None:
        """Begin to prove the checkpoints whose probation is over."""
        self._step = step
        for record in due_for_proof(
            self.records,
            step=step,
            clean_streak=clean_streak,
            clean_after=self._rules.clean_after,
        ):
            if (record.serial, record.tier) not in self._being_proven:
                self._being_proven.add((record.serial, record.tier))
                self._prove(record)
        if self.uploads is not None:
            self.uploads.after_step(on_disk(self.records), step)

    def _prove(self, record: Record) -> None:
        if record.tier is Tier.disk:
            self._disk.verify(record, lambda failures: self._verified(record, failures))
        else:
            assert self._memory is not None
            self._memory.verify(
                record.serial, lambda failures: self._snapshot_verified(record, failures)
            )

    def _snapshot_verified(self, record: Record, failures: list[str]) -> None:
        self._being_proven.discard((record.serial, record.tier))
        if record not in self.records:  # given up in the meantime
            return
        if failures:
            self._found_damaged(record, failures, "never to be used")
        else:
            self.records = with_state(self.records, record.serial, State.clean, Tier.memory)

    def _verified(self, record: Record, failures: list[str]) -> None:
        if failures:
            self._found_damaged(record, failures, "never to be used")
        else:
            self._disk.mark_clean(record, lambda failed: self._proven(record, failed))

    def _proven(self, record: Record, failures: list[str]) -> None:
        self._being_proven.discard((record.serial, record.tier))
        known = {r.serial: r.state for r in on_disk(self.records)}
        if not failures and known.get(record.serial) is State.committed:
            self.records = with_state(self.records, record.serial, State.clean)
            self._retire()

    def _retire(self) -> None:
        leaving = retire(self.records, keep=self._rules.keep, keep_every=self._rules.keep_every)
        pinned = self.uploads.pinned if self.uploads else set()
        for record in leaving:
            is_needed = (record.serial, record.tier) in self._being_proven
            if not is_needed and record.serial not in pinned:
                self.records = without(self.records, record.serial, Tier.disk)
                self.remove(record)

    def remove(self, record: Record) -> None:
        """Delete a checkpoint's files in the background."""
        self._disk.remove(record)

    # -- agreement ------------------------------------------------------------------------

    def tell(self) -> Told:
        """This rank's numbers for the step's packed agreement."""
        return self._work.tell()

    def settle(self, num_done: float, num_failed: float, jobs: Sequence[int]) -> None:
        """Take the sums of what was told of ``jobs``; records change here, on all ranks alike."""
        self._work.settle(num_done, num_failed, jobs)

    def drain(self, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Finish everything that is under way. Collective.

        Returns False, on all ranks alike, when some rank said it is too late to wait longer.
        """
        return self._drain([self._near, self._far], is_late)

    def _drain(
        self, lanes: Sequence[AgreedWork], is_late: Callable[[], bool] = lambda: False
    ) -> bool:
        self._pace.hurry.set()
        try:
            return self._work.drain(lanes, self._ranks.sum, is_late)
        finally:
            self._pace.hurry.clear()

    def close(self, *, wait: bool = True, forget: bool = False) -> None:
        """End the background threads; ``wait`` False leaves a file that is written unfinished.

        Args:
            forget: nobody will come back for the snapshots in memory.
        """
        self._pace.hurry.set()
        if self.uploads is not None:
            self.uploads.close()
        for lane in (self._near, self._far):
            lane.close(wait=wait)
        for lane in self._not_waited_for:  # it may wait for what is gone
            lane.close(wait=False)
        if self._memory is not None:
            self._memory.close(forget=forget)

    # -- restoring ------------------------------------------------------------------------

    def restore(self, candidates: Sequence[Record]) -> Restored:
        """Load the first candidate whose every byte is as it was written. Collective.

        Raises:
            CheckpointError: none of them can be used; each one's fault is named.
            ReadError: the same, but the disk only refused one that may be sound.
        """
        faults: list[str] = []
        kind: type[RunnerError] = CheckpointError
        for record in candidates:
            try:
                return self._load(record)
            except UnreadableCheckpoint as error:
                # Never marked: what a disk refuses today may be the last clean one tomorrow.
                faults.append(str(error))
                kind = ReadError
                self._found_damaged(record, [str(error)], "an older checkpoint is used", mark=False)
            except CorruptCheckpoint as error:
                faults.append(str(error))
                self._found_damaged(record, [str(error)], "an older checkpoint is used")
        raise kind(
            f"no checkpoint in {self._disk.folder} can be loaded: "
            + ("; ".join(faults) or "there is none")
        )

    def _load(self, record: Record) -> Restored:
        if record.tier is Tier.disk:
            return self._disk.load(record, before_copy=self.before_update)
        assert self._memory is not None
        return self._memory.load(record.serial)

    # -- what is not to be used again -----------------------------------------------------

    def distrust_after(self, step: int) -> None:
        """Taint every checkpoint of a later step. Collective, durable when it returns."""
        self.drain()
        for record in [r for r in self.records if r.step > step]:
            self._taint(record)
        if self.uploads is not None:
            self.uploads.distrust(lambda record: record.step > step)
        self.drain()

    def abandon_after(self, serial: int) -> None:
        """Taint every checkpoint newer than the one the run went back to, then retire them.

        Those that are being written count as well: they come to nothing.
        """
        self._left_behind.update(range(serial + 1, self._next_serial))
        for record in abandoned_by_rollback(self.records, serial):
            self._taint(record)
        if self.uploads is not None:
            self.uploads.distrust(lambda record: record.serial > serial)
        self._retire()

    def _found_damaged(
        self, record: Record, faults: list[str], decision: str, *, mark: bool = True
    ) -> None:
        self._being_proven.discard((record.serial, record.tier))
        if mark:
            self._taint(record)
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

    def _taint(self, record: Record) -> None:
        if record.tier is Tier.disk:
            self.records = with_state(self.records, record.serial, State.tainted)
            self._disk.taint(record)
        else:
            self.records = without(self.records, record.serial, Tier.memory)
            if self._memory is not None:
                self._memory.taint(record.serial)


def _committed(save: Save, tier: Tier) -> Record:
    return Record(
        serial=save.serial,
        step=save.moment.step,
        cursor=save.moment.cursor,
        state=State.committed,
        tier=tier,
    )
