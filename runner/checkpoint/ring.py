"""The ring of one run on one rank: saves, proves, retires and restores checkpoints.

Every rank holds the same records and changes them at the same step. Rank 0 alone changes
names on disk; each rank writes and verifies its own share of the bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.protocol import Holder, Identity, Moment, Ranks, RingRules
from runner.checkpoint.shards import (
    Snapshot,
    Stamp,
    collect_pieces,
    files_needed,
    read_range,
    stamps,
    verify_files,
    write_rank_file,
)
from runner.checkpoint.store import Entry, RingStore
from runner.checkpoint.upload import Uploads
from runner.checkpoint.work import AgreedWork
from runner.error import CheckpointError, CorruptCheckpoint
from runner.policy.history import Incident
from runner.policy.ring import (
    Record,
    State,
    abandoned_by_rollback,
    due_for_proof,
    retire,
    with_state,
)

_PATIENCE_SECONDS = 0.2  # between looks at the time while a disk is slow


class Ring:
    """See the module's docstring.

    Args:
        report: takes incidents, alike on every rank.
        before_write: called with the step in the background, before this rank's file.
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
        self._being_proven: set[int] = set()
        self._saving = False
        self._work = AgreedWork(ranks.gather)
        self.uploads: Uploads | None = None

    @property
    def next_serial(self) -> int:
        return self._next_serial

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written, proven, sent or removed."""
        return len(self._work) > 0 or (self.uploads is not None and self.uploads.is_busy)

    def adopt(self, records: Iterable[Record], *, next_serial: int) -> None:
        """Take over what an earlier process left."""
        self.records = list(records)
        self._next_serial = next_serial

    def newest(self) -> Path | None:
        """Folder of the newest committed checkpoint."""
        return self._store.folder_of(self.records[-1]) if self.records else None

    # -- saving ---------------------------------------------------------------------------

    def save(self, moment: Moment) -> None:
        """Copy the state now; write, sync and commit it while training goes on.

        Waits first for a save that is still under way: a disk slower than the interval must
        slow the run down rather than fill the memory with copies.
        """
        if self._saving:
            self.drain()
        self._saving = True
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        snapshots = self._snapshots()
        counts = self._holder.update_counts()
        folder = self._store.writing_folder(serial)

        def write() -> None:
            self._before_write(moment.step)
            write_rank_file(folder, self._ranks.rank, snapshots)

        self._work.submit(
            f"write {serial}",
            write,
            lambda failures: self._written(serial, moment, counts, failures),
        )
        if not self._rules.background:
            self.drain()

    def _snapshots(self) -> list[Snapshot]:
        index, count = self._holder.replica
        return [
            Snapshot(name=shard.name, start=shard.start + first, values=part.detach().cpu().clone())
            for shard in self._holder.shards()
            for first, part in [_share(shard.local, index, count)]
            if part.numel()
        ]

    def _written(
        self, serial: int, moment: Moment, counts: Mapping[str, int], failures: list[str]
    ) -> None:
        if failures:
            self._save_failed(serial, moment, failures)
            return
        shapes = {shard.name: shard.shape for shard in self._holder.shards()}
        self._work.submit(
            f"commit {serial}",
            lambda: self._commit(serial, moment, counts, shapes),
            lambda failed: self._committed(serial, moment, failed),
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
        if failures:
            self._save_failed(serial, moment, failures)
            return
        self.records.append(
            Record(serial=serial, step=moment.step, cursor=moment.cursor, state=State.committed)
        )
        self._retire()

    def _save_failed(self, serial: int, moment: Moment, failures: list[str]) -> None:
        self._saving = False
        if self._ranks.rank == 0:
            # Give the space back; what is left of a failed write is never trusted.
            shutil.rmtree(self._store.writing_folder(serial), ignore_errors=True)
        stands = [record for record in self.records if record.state is State.clean]
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
            if record.serial not in self._being_proven:
                self._being_proven.add(record.serial)
                self._prove(record)
        if self.uploads is not None:
            self.uploads.after_step(self.records, step)

    def _prove(self, record: Record) -> None:
        self._work.submit(
            f"verify {record.serial}",
            lambda: self._check_bytes(record),
            lambda failures: self._verified(record, failures),
        )

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
        self._work.submit(
            f"mark {record.serial}",
            lambda: self._on_first(lambda: self._store.mark(record, State.clean)),
            lambda failed: self._proven(record, failed),
        )

    def _proven(self, record: Record, failures: list[str]) -> None:
        self._being_proven.discard(record.serial)
        known = {r.serial: r.state for r in self.records}
        if not failures and known.get(record.serial) is State.committed:
            self.records = with_state(self.records, record.serial, State.clean)
            self._retire()

    def _retire(self) -> None:
        leaving = retire(self.records, keep=self._rules.keep, keep_every=self._rules.keep_every)
        pinned = self.uploads.pinned if self.uploads else set()
        serials = {record.serial for record in leaving} - self._being_proven - pinned
        self.records = [record for record in self.records if record.serial not in serials]
        for record in leaving:
            if record.serial in serials:
                self.remove(record)

    def remove(self, record: Record) -> None:
        """Delete a checkpoint's files in the background."""
        self._work.submit(
            f"retire {record.serial}",
            lambda: self._on_first(lambda: self._store.remove(record)),
            lambda failures: None,
        )

    def _on_first(self, work: Callable[[], None]) -> None:
        if self._ranks.rank == 0:
            work()

    # -- agreement ------------------------------------------------------------------------

    def tell(self) -> tuple[float, float, float, float]:
        """This rank's numbers for the step's packed agreement: the ring's and the uploads'."""
        return (*self._work.tell(), *(self.uploads.tell() if self.uploads else (0.0, 0.0)))

    def settle(
        self, num_done: float, num_failed: float, num_sent: float = 0.0, num_unsent: float = 0.0
    ) -> None:
        """Take the sums; records change here, on all ranks alike."""
        self._work.settle(num_done, num_failed, self._ranks.world_size)
        if self.uploads is not None:
            self.uploads.settle(num_sent, num_unsent)

    def drain(self, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Finish everything that is under way. Collective.

        Returns False, on all ranks alike, when some rank said it is too late to wait longer.
        """
        while len(self._work):
            self._work.wait(_PATIENCE_SECONDS)
            late = float(is_late())
            num_done, num_failed, num_late = self._ranks.sum([*self._work.tell(), late])
            self.settle(num_done, num_failed)
            if num_late and len(self._work):
                return False
        return True

    def close(self, *, wait: bool = True) -> None:
        """End the background thread; ``wait`` False leaves a file it is writing unfinished."""
        self._work.close(wait=wait)
        if self.uploads is not None:
            self.uploads.close()

    # -- restoring ------------------------------------------------------------------------

    def restore(self, candidates: Sequence[Record]) -> Manifest:
        """Load the first candidate whose every byte is as it was written. Collective.

        Raises:
            CheckpointError: none of them can be used; each one's fault is named.
        """
        faults: list[str] = []
        for record in candidates:
            try:
                return self._load(record)
            except CorruptCheckpoint as error:
                faults.append(str(error))
                self._found_damaged(record, [str(error)], "an older checkpoint is used")
        raise CheckpointError(
            f"no checkpoint in {self._store.folder} can be loaded: "
            + ("; ".join(faults) or "there is none")
        )

    def _load(self, record: Record) -> Manifest:
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
        return entry.manifest

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
        for shard in shards:
            values = read_range(entry, shard.name, shard.start, len(shard.local), seen=seen)
            shard.local.copy_(values)
        try:
            self._holder.finish_load(entry.manifest.update_counts)
        except KeyError as error:
            raise CheckpointError(f"{entry.folder}: has no update count of {error}") from None

    def _found_damaged(self, record: Record, faults: list[str], decision: str) -> None:
        self._being_proven.discard(record.serial)
        self._taint(record)
        self._report(
            Incident(
                kind="checkpoint_damaged",
                step=self._step,
                decision=decision,
                reason=f"checkpoint {record.serial} of step {record.step}: {'; '.join(faults)}",
                detail={"serial": record.serial},
            )
        )

    def _taint(self, record: Record) -> None:
        self.records = with_state(self.records, record.serial, State.tainted)
        self._work.submit(
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
        """Taint every checkpoint newer than the one the run went back to, then retire them."""
        for record in abandoned_by_rollback(self.records, serial):
            self._taint(record)
        if self.uploads is not None:
            self.uploads.distrust(lambda record: record.serial > serial)
        self._retire()


def _share(local: torch.Tensor, index: int, count: int) -> tuple[int, torch.Tensor]:
    """Replicas hold the same bytes: each writes its own part. (first element, view)."""
    size = -(-len(local) // count)
    first = min(len(local), index * size)
    return first, local[first : first + size]
