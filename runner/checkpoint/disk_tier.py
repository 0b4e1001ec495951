"""The tier on disk: its jobs, each of them one rank's part of the work.

Each rank writes and verifies its own share of the bytes; rank 0 alone changes names. Knows bytes,
names and its queue of jobs, and nothing of what becomes of a checkpoint. ``then`` gets the
sentences of the ranks that failed, at the same step on all of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from runner.checkpoint.manifest import Manifest
from runner.checkpoint.protocol import (
    Holder,
    Identity,
    Ranks,
    Restored,
    Save,
    Then,
    finish_load,
)
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
from runner.checkpoint.store import Entry, RingStore
from runner.checkpoint.work import AgreedWork
from runner.error import CheckpointError
from runner.policy.ring import Record, State, Tier


class DiskTier:
    """
    Args:
        lane: the queue of its jobs.
        before_write: called with the step in the background, before this rank's file.
    """

    def __init__(
        self,
        store: RingStore,
        *,
        holder: Holder,
        ranks: Ranks,
        identity: Identity,
        lane: AgreedWork,
        pace: Pace,
        before_write: Callable[[int], None],
    ) -> None:
        self._store = store
        self._holder = holder
        self._ranks = ranks
        self._identity = identity
        self._lane = lane
        self._pace = pace
        self._before_write = before_write

    @property
    def folder(self) -> Path:
        return self._store.folder

    def folder_of(self, record: Record) -> Path:
        return self._store.folder_of(record)

    # -- making one -----------------------------------------------------------------------

    def copies(self) -> list[Snapshot]:
        """This rank's share of the state, copied to the host."""
        pieces = ((shard.name, shard.start, shard.local) for shard in self._holder.shards())
        return [
            replace(part, values=part.values.detach().cpu().clone())
            for part in own_share(pieces, self._holder.replica)
        ]

    def write(
        self,
        save: Save,
        snapshots: Sequence[Snapshot],
        then: Then,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """This rank's file.

        Args:
            check: called after the write; may find that what was written is not to be used.
        """
        folder = self._store.writing_folder(save.serial)

        def work() -> None:
            self._before_write(save.moment.step)
            write_rank_file(folder, self._ranks.rank, snapshots, self._pace)
            check()

        self._lane.submit(f"write {save.serial}", work, then)

    def commit(self, save: Save, then: Then) -> None:
        """Publish it: every rank's file is written."""
        shapes = {shard.name: shard.shape for shard in self._holder.shards()}
        self._submit_first(f"commit {save.serial}", lambda: self._publish(save, shapes), then)

    def _publish(self, save: Save, shapes: Mapping[str, tuple[int, ...]]) -> None:
        folder, moment = self._store.writing_folder(save.serial), save.moment
        pieces, files = collect_pieces(folder, self._ranks.world_size)
        self._store.commit(
            Manifest(
                serial=save.serial,
                step=moment.step,
                cursor=moment.cursor,
                world_size=self._ranks.world_size,
                config_digest=self._identity.config_digest,
                data_fingerprint=self._identity.data_fingerprint,
                metrics_bytes=moment.metrics_bytes,
                journal_lines=moment.journal_lines,
                train_state=moment.train_state,
                update_counts=save.counts,
                shapes=shapes,
                pieces=pieces,
                files=files,
            )
        )

    def discard_unfinished(self, serial: int) -> None:
        """Give the space back; what is left of a failed write is never trusted."""
        if self._ranks.rank == 0:
            shutil.rmtree(self._store.writing_folder(serial), ignore_errors=True)

    # -- what becomes of it ---------------------------------------------------------------

    def verify(self, record: Record, then: Then) -> None:
        """Read every byte back, and refuse NaN and Inf."""

        def work() -> None:
            entry = self._store.read(self._store.folder_of(record))
            verify_files(entry, self._share_of(entry), finite=True)

        self._lane.submit(f"verify {record.serial}", work, then)

    def mark_clean(self, record: Record, then: Then) -> None:
        """Make it durable that it is clean."""
        self._submit_first(
            f"mark {record.serial}", lambda: self._store.mark(record, State.clean), then
        )

    def taint(self, record: Record) -> None:
        """Make it durable that it is never to be used, unless it is gone."""

        def work() -> None:
            if self._store.folder_of(record).exists():
                self._store.mark(record, State.tainted)

        self._submit_first(f"taint {record.serial}", work, lambda failures: None)

    def remove(self, record: Record) -> None:
        """Delete its files."""
        self._submit_first(
            f"retire {record.serial}", lambda: self._store.remove(record), lambda failures: None
        )

    def _submit_first(self, name: str, work: Callable[[], None], then: Then) -> None:
        """A job with work for rank 0 only."""
        self._lane.submit(name, work if self._ranks.rank == 0 else lambda: None, then)

    def _share_of(self, entry: Entry) -> list[str]:
        """The files that this rank verifies for all."""
        return sorted(entry.manifest.files)[self._ranks.rank :: self._ranks.world_size]

    # -- loading one ----------------------------------------------------------------------

    def load(self, record: Record, *, before_copy: Callable[[], None]) -> Restored:
        """Verify all of it, then copy it into the holder. Collective.

        Args:
            before_copy: called before the holder's state is overwritten.

        Raises:
            CheckpointError: it cannot be used; :class:`CorruptCheckpoint` where it is damaged.
        """
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

        def copy_in() -> None:
            self._refuse_other_model(entry)
            before_copy()
            for shard in self._holder.shards():
                values = read_range(entry, shard.name, shard.start, len(shard.local), seen=seen)
                shard.local.copy_(values)
            finish_load(self._holder, entry.manifest.update_counts, entry.folder)

        self._ranks.all_or_none("loading a checkpoint", copy_in)
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

    def _refuse_other_model(self, entry: Entry) -> None:
        wanted = {shard.name: tuple(shard.shape) for shard in self._holder.shards()}
        if wanted != dict(entry.manifest.shapes):
            differing = sorted(set(wanted.items()) ^ set(entry.manifest.shapes.items()))
            raise CheckpointError(
                f"{entry.folder}: is of another model; first difference: {differing[0]}"
            )
