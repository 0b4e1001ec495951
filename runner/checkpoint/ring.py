"""The ring of one run on one rank: saves, proves, retires and restores checkpoints.

Every rank holds the same records and changes them at the same step. Rank 0 alone changes
names on disk; each rank writes and verifies its own share of the bytes.

With a memory tier a save is a copy into a slot there; what goes to disk is written from the
slot. Two lanes of background work: a slow disk holds no snapshot up.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.memory import Memory
from runner.checkpoint.mirror import Found, Mirror, on_every_rank
from runner.checkpoint.protocol import Holder, Identity, Moment, Ranks, Restored, RingRules
from runner.checkpoint.shards import (
    Pace,
    Snapshot,
    Stamp,
    collect_pieces,
    files_needed,
    own_share,
    read_range,
    stamps,
    verify_files,
    write_rank_file,
)
from runner.checkpoint.slots import Held, Need, SlotBook
from runner.checkpoint.store import Entry, RingStore
from runner.checkpoint.upload import Uploads
from runner.checkpoint.work import AgreedWork, Lanes, Told, wait_for_any
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

_NO_SLOT = -1
_PATIENCE_SECONDS = 0.2  # between looks at the time while a disk is slow


class Ring:
    """See the module's docstring.

    Args:
        report: takes incidents, alike on every rank.
        before_write: called with the step in the background, before this rank's file.
        memory: the tier in shared memory; None: there is none.
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
        self._store = store
        self._holder = holder
        self._ranks = ranks
        self._rules = rules
        self._identity = identity
        self._report = report
        self._before_write = before_write
        self._next_serial = 1
        self._step = 0
        self._being_proven: set[tuple[int, Tier]] = set()
        self._saving = False
        self._left_behind: set[int] = set()
        self._memory = memory
        self._slots = SlotBook()
        self._mirror = mirror
        self._earlier: dict[int, Found] = {}
        self._earlier_incarnation = 0
        self._pace = Pace(rules.write_bytes_per_second)
        count = 3 if mirror is None else 4
        self._work = Lanes(ranks.gather, world_size=ranks.world_size, count=count)
        self._near, self._far, self.uplink, *self._abroad = self._work.lanes
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

    def adopt(self, records: Iterable[Record], *, next_serial: int) -> None:
        """Take over what an earlier process left on disk."""
        self.records = list(records)
        self._next_serial = next_serial

    def newest(self) -> Path | None:
        """Folder of the newest committed checkpoint."""
        record = self._newest_on_disk()
        return self._store.folder_of(record) if record else None

    def snapshot_files(self) -> list[Path]:
        """This rank's files of the snapshots in memory, oldest first."""
        held = [held for _, held in sorted(self._slots.held.items())]
        return [self._memory.path_of(one.slot) for one in held] if self._memory else []

    # -- saving ---------------------------------------------------------------------------

    def save(self, moment: Moment, *, disk: bool = True) -> None:
        """Copy the state now; digest it, and write, sync and commit it, while training goes on.

        Waits first for a save to disk that is still under way: a disk slower than the interval
        must slow the run down rather than fill the memory with copies.

        Args:
            disk: False keeps a snapshot in memory only, and none where no slot can be spared.
        """
        if disk and self._saving:
            self.drain()
        slot = self._slot_for(must=disk)
        if slot is None and not disk:
            return
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        counts = self._holder.update_counts()
        held = Held(slot=_NO_SLOT if slot is None else slot, moment=moment, counts=counts)
        self._saving = self._saving or disk
        if slot is None:
            self._write(serial, held, self._snapshots())
        else:
            self._take_snapshot(serial, held, disk=disk)
        if not self._rules.background:
            self.drain()

    def _snapshots(self) -> list[Snapshot]:
        pieces = ((shard.name, shard.start, shard.local) for shard in self._holder.shards())
        return [
            replace(part, values=part.values.detach().cpu().clone())
            for part in own_share(pieces, self._holder.replica)
        ]

    def _write(self, serial: int, held: Held, snapshots: list[Snapshot]) -> None:
        folder, memory = self._store.writing_folder(serial), self._memory

        def write() -> None:
            self._before_write(held.moment.step)
            write_rank_file(folder, self._ranks.rank, snapshots, self._pace)
            if memory is not None and held.slot != _NO_SLOT:
                # After the write: a byte that changed in the slot before is still changed, and
                # what was written has a digest of its own that would hide it for good.
                memory.check(held.slot)

        self._far.submit(
            f"write {serial}", write, lambda failures: self._written(serial, held, failures)
        )

    def _written(self, serial: int, held: Held, failures: list[str]) -> None:
        self._slots.done(serial, Need.write)
        if serial in self._left_behind:
            self._saving = False
            self._discard_unfinished(serial)
            return
        if failures:
            self._save_failed(serial, held.moment, failures)
            return
        shapes = {shard.name: shard.shape for shard in self._holder.shards()}
        self._far.submit(
            f"commit {serial}",
            lambda: self._commit(serial, held.moment, held.counts, shapes),
            lambda failed: self._committed(serial, held.moment, failed),
        )

    def _commit(
        self,
        serial: int,
        moment: Moment,
        counts: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        if self._ranks.rank != 0:
            return
        folder = self._store.writing_folder(serial)
        pieces, files = collect_pieces(folder, self._ranks.world_size)
        self._store.commit(
            Manifest(
                serial=serial,
                step=moment.step,
                cursor=moment.cursor,
                world_size=self._ranks.world_size,
                config_digest=self._identity.config_digest,
                data_fingerprint=self._identity.data_fingerprint,
                metrics_bytes=moment.metrics_bytes,
                journal_lines=moment.journal_lines,
                train_state=moment.train_state,
                update_counts=counts,
                shapes=shapes,
                pieces=pieces,
                files=files,
            )
        )

    def _committed(self, serial: int, moment: Moment, failures: list[str]) -> None:
        self._saving = False
        if failures and serial not in self._left_behind:
            self._save_failed(serial, moment, failures)
        if failures:
            return
        record = Record(
            serial=serial, step=moment.step, cursor=moment.cursor, state=State.committed
        )
        self.records.append(record)
        if serial in self._left_behind:  # the run went back while it was being committed
            self._taint(record)
        self._retire()

    def _save_failed(self, serial: int, moment: Moment, failures: list[str]) -> None:
        self._saving = False
        self._discard_unfinished(serial)
        # A copy in memory is no comfort: it is gone with its node.
        stands = [record for record in on_disk(self.records) if record.state is State.clean]
        standing = f"clean checkpoint of step {stands[-1].step} stands" if stands else "none stands"
        self._report(
            Incident(
                kind="save_failed",
                step=moment.step,
                decision="go on" if stands else "stop",
                reason=f"checkpoint {serial}: {'; '.join(failures)}; {standing}",
            )
        )
        if not stands:
            raise CheckpointError(
                f"cannot save to {self._store.folder}: {'; '.join(failures)}, and no clean "
                "checkpoint stands; free space or choose another out"
            )

    def _discard_unfinished(self, serial: int) -> None:
        if self._ranks.rank == 0:
            # Give the space back; what is left of a failed write is never trusted.
            shutil.rmtree(self._store.writing_folder(serial), ignore_errors=True)

    # -- the tier in memory ---------------------------------------------------------------

    def before_update(self) -> None:
        """To be called before the optimizer changes the state; see :class:`Memory`."""
        if self._memory is not None:
            self._memory.before_update()

    def begin_memory(self) -> None:
        """The run is taken up: what earlier incarnations left goes, and own slots are made.

        In the background, so that training need not wait for it.
        """
        if self._memory is None:
            return
        self.records = [
            r for r in self.records if r.tier is Tier.disk or r.serial in self._slots.held
        ]
        self._earlier = {}
        self._memory.forget_earlier()
        for slot in range(self._memory.num_slots):
            self._prepare(self._memory, slot)
        if self._mirror is not None:
            mirror = self._mirror
            self._abroad[0].submit("prepare copies", mirror.prepare, self._mirror_prepared)

    def _mirror_prepared(self, failures: list[str]) -> None:
        if failures:
            self._mirror = None
            self._report_short("without copies on other nodes", failures)

    def _prepare(self, memory: Memory, slot: int) -> None:
        def prepared(failures: list[str]) -> None:
            if not failures:
                self._slots.add(slot)
                return
            self._report_short(f"without slot {slot}", failures)

        self._near.submit(f"prepare {slot}", lambda: memory.prepare(slot), prepared)

    def _report_short(self, without_what: str, failures: list[str]) -> None:
        self._report(
            Incident(
                kind="memory_short",
                step=self._step,
                decision=f"go on {without_what}",
                reason=f"no room for a snapshot in memory: {'; '.join(failures)}",
            )
        )

    def _slot_for(self, *, must: bool) -> int | None:
        """A slot to fill, its old snapshot given up."""
        if self._memory is None:
            return None
        slot = self._slots.free()
        if slot is None:
            slot = self._room(must=False)
        if slot is None and must:
            self._drain([self._near])
            slot = self._slots.free()
            slot = self._room(must=True) if slot is None else slot
        return slot

    def _room(self, *, must: bool) -> int | None:
        leaving = make_room(self.records, busy=self._slots.busy(), must=must)
        if leaving is not None:
            self._drop(leaving)
        return self._slots.free()

    def _take_snapshot(self, serial: int, held: Held, *, disk: bool) -> None:
        memory = self._memory
        assert memory is not None
        held.needs = {Need.seal, Need.kept} | ({Need.write} if disk else set())
        self._slots.held[serial] = held
        memory.fill(held.slot, self._holder.shards())
        self._near.submit(
            f"seal {serial}",
            lambda: memory.seal(held.slot, serial, held.moment, held.counts),
            lambda failures: self._sealed(serial, held, failures),
        )

    def _sealed(self, serial: int, held: Held, failures: list[str]) -> None:
        record = _in_memory(serial, held.moment.step, held.moment.cursor)
        if serial in self._left_behind:  # the run went back in the meantime
            if Need.write in held.needs:
                self._slots.done(serial, Need.write)
                self._saving = False
            self._drop(record)
        else:
            if Need.write in held.needs:
                self._write(serial, held, self._share_of_slot(held.slot))
            if failures:
                self._slots.done(serial, Need.kept)
                self._report_unsealed(serial, held, failures)
            else:
                self.records.append(record)
                self._send_abroad(serial, held.slot)
        self._slots.done(serial, Need.seal)

    def _send_abroad(self, serial: int, slot: int) -> None:
        """To a peer on another node, unless the one before is still on its way."""
        mirror = self._mirror
        if mirror is None or len(self._abroad[0]):
            return
        self._slots.need(serial, Need.mirror)
        self._abroad[0].submit(
            f"mirror {serial}",
            lambda: mirror.exchange(slot, serial),
            lambda failures: self._slots.done(serial, Need.mirror),
        )

    def _report_unsealed(self, serial: int, held: Held, failures: list[str]) -> None:
        self._report(
            Incident(
                kind="snapshot_failed",
                step=held.moment.step,
                decision="go on without it",
                reason=f"snapshot {serial} in memory: {'; '.join(failures)}",
            )
        )

    def _share_of_slot(self, slot: int) -> list[Snapshot]:
        assert self._memory is not None
        pieces = ((place.name, place.start, v) for place, v in self._memory.pieces(slot))
        return own_share(pieces, self._holder.replica)

    def _drop(self, record: Record) -> None:
        """Give up a copy in memory, for this process and for any later one."""
        self.records = without(self.records, record.serial, Tier.memory)
        held = self._slots.held.get(record.serial)
        if held is not None and self._memory is not None:
            self._memory.invalidate(held.slot)
            self._slots.done(record.serial, Need.kept)

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
        notes, refused = self._memory.left_by(incarnation)
        rows = [[n.serial, n.step, n.cursor, n.metrics_bytes] for n in notes.values()]
        copies = self._mirror.left_by(incarnation, metrics_bytes) if self._mirror else []
        told = self._ranks.gather(
            {
                "layout": self._memory.layout.digest,
                "own": [row[:3] for row in rows if row[3] <= metrics_bytes],
                "copies": copies,
                "refused": refused,
            }
        )
        saved = self._newest_on_disk()
        known = {(r.serial, r.step, r.cursor) for r in on_disk(self.records)}
        self._earlier_incarnation = incarnation
        for found in on_every_rank(told):
            is_newer = saved is None or found.serial > saved.serial
            is_known = (found.serial, found.step, found.cursor) in known
            record = _in_memory(found.serial, found.step, found.cursor)
            if (is_newer or is_known) and not is_refused(record):
                self._earlier[found.serial] = found
                self.records.append(record)
        newest = [row[0] for said in told for row in said["own"]]
        newest += [row[2] for said in told for row in said["copies"]]
        self._next_serial = max(self._next_serial, max(newest, default=0) + 1)
        return list(dict.fromkeys(words for said in told for words in said["refused"]))

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
        if record.tier is Tier.memory:
            self._prove_snapshot(record)
            return
        self._far.submit(
            f"verify {record.serial}",
            lambda: self._check_bytes(record),
            lambda failures: self._verified(record, failures),
        )

    def _prove_snapshot(self, record: Record) -> None:
        memory, slot = self._memory, self._slots.held[record.serial].slot
        assert memory is not None
        self._slots.need(record.serial, Need.prove)
        self._near.submit(
            f"verify {record.serial} in memory",
            lambda: memory.check(slot, finite=True),
            lambda failures: self._snapshot_verified(record, failures),
        )

    def _snapshot_verified(self, record: Record, failures: list[str]) -> None:
        self._slots.done(record.serial, Need.prove)
        self._being_proven.discard((record.serial, record.tier))
        if record not in self.records:  # given up in the meantime
            return
        if failures:
            self._found_damaged(record, failures, "never to be used")
        else:
            self.records = with_state(self.records, record.serial, State.clean, Tier.memory)

    def _check_bytes(self, record: Record) -> None:
        entry = self._store.read(self._store.folder_of(record))
        verify_files(entry, self._share_of(entry), finite=True)

    def _share_of(self, entry: Entry) -> list[str]:
        """The files that this rank verifies for all."""
        return sorted(entry.manifest.files)[self._ranks.rank :: self._ranks.world_size]

    def _verified(self, record: Record, failures: list[str]) -> None:
        if failures:
            self._found_damaged(record, failures, "never to be used")
            return
        self._far.submit(
            f"mark {record.serial}",
            lambda: self._on_first(lambda: self._store.mark(record, State.clean)),
            lambda failed: self._proven(record, failed),
        )

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
        self._far.submit(
            f"retire {record.serial}",
            lambda: self._on_first(lambda: self._store.remove(record)),
            lambda failures: None,
        )

    def _on_first(self, work: Callable[[], None]) -> None:
        if self._ranks.rank == 0:
            work()

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
            while any(map(len, lanes)):
                wait_for_any(lanes, _PATIENCE_SECONDS)
                late = float(is_late())
                told = self._work.tell()
                num_done, num_failed, num_late = self._ranks.sum([told.done, told.failed, late])
                self.settle(num_done, num_failed, told.jobs)
                if num_late and any(map(len, lanes)):
                    return False
        finally:
            self._pace.hurry.clear()
        return True

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
        for lane in (self.uplink, *self._abroad):  # it may wait for what is gone
            lane.close(wait=False)
        if self._mirror is not None:
            self._mirror.close(forget=forget)
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
                if record.tier is Tier.memory:
                    return self._load_snapshot(record)
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
            f"no checkpoint in {self._store.folder} can be loaded: "
            + ("; ".join(faults) or "there is none")
        )

    def _load_snapshot(self, record: Record) -> Restored:
        memory, serial = self._memory, record.serial
        assert memory is not None
        if serial in self._earlier:
            self._take_over(memory, self._earlier[serial])
        else:
            slot = self._slots.held[serial].slot
            self._ranks.all_or_none("verifying a snapshot", lambda: memory.check(slot, quick=True))
        held = self._slots.held[serial]

        def copy_back() -> None:
            self.before_update()
            memory.copy_out(held.slot, self._holder.shards())
            self._finish_load(held.counts, memory.path_of(held.slot))

        self._ranks.all_or_none("loading a snapshot", copy_back)
        moment = held.moment
        return Restored(
            serial=serial,
            step=moment.step,
            cursor=moment.cursor,
            train_state=moment.train_state,
            metrics_bytes=moment.metrics_bytes,
            tier=Tier.memory,
        )

    def _take_over(self, memory: Memory, found: Found) -> None:
        """Make an earlier incarnation's snapshot one of our own, in the first slot."""
        del self._earlier[found.serial]
        rank, earlier = self._ranks.rank, self._earlier_incarnation

        def take() -> None:
            memory.room(0)
            if rank not in found.holders:
                memory.take_over(earlier, found.serial, 0)

        self._ranks.all_or_none("taking a snapshot over", take)
        mirror = self._mirror
        if mirror is not None and found.holders:
            self._ranks.all_or_none(
                "fetching a snapshot from another node",
                lambda: mirror.give_back(found.holders, found.serial, earlier),
            )
        note = memory.note_of(0)
        # The lengths are those of the first rank's files.
        told = self._ranks.from_first(
            {
                "step": note.step,
                "cursor": note.cursor,
                "train_state": note.train_state,
                "metrics_bytes": note.metrics_bytes,
                "journal_lines": note.journal_lines,
            }
        )
        self._slots.add(0)
        self._slots.held[found.serial] = Held(
            slot=0, moment=Moment(**told), counts=note.update_counts, needs={Need.kept}
        )

    def _load(self, record: Record) -> Restored:
        # All ranks look at the files first: whoever changes one after another rank has found it
        # sound is noticed by the rank that reads it.
        looked: tuple[Entry, dict[str, Stamp]] = self._ranks.all_or_none(
            "opening a checkpoint", lambda: self._look_at(record)
        )
        entry, seen = looked
        self._ranks.all_or_none(
            "verifying a checkpoint",
            lambda: verify_files(entry, self._share_of(entry), finite=False, seen=seen),
        )
        self._ranks.all_or_none("loading a checkpoint", lambda: self._copy_in(entry, seen))
        manifest = entry.manifest
        return Restored(
            serial=manifest.serial,
            step=manifest.step,
            cursor=manifest.cursor,
            train_state=manifest.train_state,
            metrics_bytes=manifest.metrics_bytes,
            tier=Tier.disk,
        )

    def _look_at(self, record: Record) -> tuple[Entry, dict[str, Stamp]]:
        entry = self._store.read(self._store.folder_of(record))
        wanted = [(shard.name, shard.start, len(shard.local)) for shard in self._holder.shards()]
        return entry, stamps(entry, {*files_needed(entry, wanted), *self._share_of(entry)})

    def _copy_in(self, entry: Entry, seen: Mapping[str, Stamp]) -> None:
        shards = self._holder.shards()
        wanted = {shard.name: tuple(shard.shape) for shard in shards}
        if wanted != dict(entry.manifest.shapes):
            differing = sorted(set(wanted.items()) ^ set(entry.manifest.shapes.items()))
            raise CheckpointError(
                f"{entry.folder}: is of another model; first difference: {differing[0]}"
            )
        self.before_update()
        for shard in shards:
            values = read_range(entry, shard.name, shard.start, len(shard.local), seen=seen)
            shard.local.copy_(values)
        self._finish_load(entry.manifest.update_counts, entry.folder)

    def _finish_load(self, counts: Mapping[str, int], source: Path) -> None:
        try:
            self._holder.finish_load(counts)
        except KeyError as error:
            raise CheckpointError(f"{source}: has no update count of {error}") from None

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
        if record.tier is Tier.memory:
            self._drop(record)
            if self._mirror is not None:
                self._mirror.forget(record.serial)
            return
        self.records = with_state(self.records, record.serial, State.tainted)
        self._far.submit(
            f"taint {record.serial}",
            lambda: self._on_first(lambda: self._mark_if_there(record)),
            lambda failures: None,
        )

    def _mark_if_there(self, record: Record) -> None:
        if self._store.folder_of(record).exists():
            self._store.mark(record, State.tainted)

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


def _in_memory(serial: int, step: int, cursor: int) -> Record:
    return Record(serial=serial, step=step, cursor=cursor, state=State.committed, tier=Tier.memory)
