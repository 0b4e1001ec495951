"""The disk tier: its jobs, each of them one rank's part of the work.

Each rank writes and verifies its own share of the bytes; rank 0 alone changes names. Knows bytes,
names and its queue of jobs, but no states of a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from runner.checkpoint.disk.directory import CheckpointDirectory, Entry
from runner.checkpoint.disk.shards import (
    PieceLayout,
    RateLimit,
    ShardReader,
    Snapshot,
    Stamp,
    collect_indexes,
    files_needed,
    numbers,
    own_share,
    stamps,
    verify_files,
    write_rank_file,
)
from runner.checkpoint.elements import element_type, name_of
from runner.checkpoint.jobs import LockstepQueue, QueuedJob
from runner.checkpoint.manifest import FLOAT32, Manifest, by_kind
from runner.checkpoint.protocol import (
    Identity,
    PendingCheckpoint,
    Restored,
    RingRanks,
    ShardedState,
    check_counts,
)
from runner.policy.retention.records import Record, State, Tier
from runner.system.error import CheckpointError

_FP32_BYTES = 4


@dataclass(eq=False)
class DiskTier:
    """
    Args:
        queue: the queue of its jobs.
        before_write: called with the step in the background, before this rank's file.

    Attributes:
        show: called with a load's progress on this rank, in bytes of its own share.
    """

    directory: CheckpointDirectory
    sharded: ShardedState
    ranks: RingRanks
    identity: Identity
    queue: LockstepQueue
    pace: RateLimit
    before_write: Callable[[int], None]
    show: Callable[[str, int, int], None] = lambda what, done, total: None
    _layout: PieceLayout | None = None  # layout of the last save, on rank 0

    # -- making one -----------------------------------------------------------------------

    def copies(self) -> list[Snapshot]:
        """Copy this rank's share of the state to the host."""
        return [
            # Made once: cpu() of a CUDA tensor is a copy already.
            replace(part, values=part.values.detach().to("cpu", copy=True))
            for part in self._own_parts()
        ]

    def _own_parts(self) -> Iterator[Snapshot]:
        """What this rank writes and reads of the state: views, see :func:`own_share`."""
        pieces = ((shard.name, shard.start, shard.local) for shard in self.sharded.shards())
        return own_share(pieces, self.sharded.replica)

    def write(
        self, pending: PendingCheckpoint, snapshots: Sequence[Snapshot], check: Callable[[], None]
    ) -> QueuedJob:
        """Write this rank's file.

        Args:
            check: called after the write; raises if the written bytes must not be used.
        """
        folder = self.directory.writing_folder(pending.serial)
        tensors = numbers([shard.name for shard in self.sharded.shards()])

        def work() -> None:
            self.before_write(pending.metadata.step)
            write_rank_file(folder, self.ranks.rank, snapshots, tensors, self.pace)
            check()

        return QueuedJob(queue=self.queue, work=work)

    def commit(self, pending: PendingCheckpoint) -> QueuedJob:
        """Publish the checkpoint: every rank's file is written."""
        shards = self.sharded.shards()
        shapes = {shard.name: shard.shape for shard in shards}
        types = {shard.name: name_of(element_type(shard)) for shard in shards}
        dtypes = {name: dtype for name, dtype in types.items() if dtype != FLOAT32}
        return self._on_first(lambda: self._publish(pending, shapes, dtypes))

    def _publish(
        self,
        pending: PendingCheckpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, str],
    ) -> None:
        folder = self.directory.writing_folder(pending.serial)
        self._layout, files = collect_indexes(
            folder, list(shapes), self.ranks.world_size, known=self._layout, dtypes=dtypes
        )
        self.directory.commit(
            Manifest(
                serial=pending.serial,
                **pending.metadata.metadata(),
                world_size=self.ranks.world_size,
                config_digest=self.identity.config_digest,
                data_fingerprint=self.identity.data_fingerprint,
                update_counts=pending.counts,
                shapes=shapes,
                runs=self._layout.runs,
                files=files,
                dtypes=dtypes,
            )
        )

    def discard_unfinished(self, serial: int) -> None:
        """Free the space; the rest of a failed write is never trusted."""
        if self.ranks.rank == 0:
            shutil.rmtree(self.directory.writing_folder(serial), ignore_errors=True)

    # -- after the commit -----------------------------------------------------------------

    def verify(self, record: Record) -> QueuedJob:
        """Read every byte back, and refuse NaN and Inf."""

        def work() -> None:
            entry = self.directory.read(self.directory.folder_of(record))
            verify_files(entry, self._share_of(entry), finite=True)

        return QueuedJob(queue=self.queue, work=work)

    def mark_clean(self, record: Record) -> QueuedJob:
        """Mark it clean, durably."""
        return self._on_first(lambda: self.directory.mark(record, State.clean))

    def taint(self, record: Record) -> QueuedJob:
        """Mark it tainted, durably, unless it is gone."""

        def work() -> None:
            if self.directory.folder_of(record).exists():
                self.directory.mark(record, State.tainted)

        return self._on_first(work)

    def remove(self, record: Record) -> QueuedJob:
        """Delete its files."""
        return self._on_first(lambda: self.directory.remove(record))

    def _on_first(self, work: Callable[[], None]) -> QueuedJob:
        """A job with work for rank 0 only."""
        is_first = self.ranks.rank == 0
        return QueuedJob(queue=self.queue, work=work if is_first else lambda: None)

    def _share_of(self, entry: Entry) -> list[str]:
        """The files that this rank verifies for all."""
        return by_kind(entry.manifest.files)[self.ranks.rank :: self.ranks.world_size]

    # -- loading one ----------------------------------------------------------------------

    def load(self, record: Record, *, before_copy: Callable[[], None]) -> Restored:
        """Verify all of it, then copy it into the sharded state. Collective.

        Args:
            before_copy: called before the sharded state is overwritten.

        Raises:
            CheckpointError: it cannot be used; :class:`CorruptCheckpoint` if it is damaged.
        """
        # All ranks stamp the files first: a change after another rank has found a file
        # sound is then noticed by the rank that reads it.
        looked: tuple[Entry, dict[str, Stamp]] = self.ranks.all_or_none(
            "opening a checkpoint", lambda: self._look_at(record)
        )
        entry, seen = looked
        moved = self._counter(entry)
        # The slowest disk may take longer than a collective waits.
        self.ranks.all_or_none_patiently(
            "verifying a checkpoint",
            lambda: verify_files(
                entry, self._share_of(entry), finite=False, seen=seen, moved=moved
            ),
        )

        def copy_in() -> None:
            self._refuse_other_model(entry)
            check_counts(self.sharded, entry.manifest.update_counts, entry.folder)
            before_copy()
            with ShardReader(entry, seen=seen) as reader:
                for part in self._own_parts():
                    part.values.copy_(reader.read(part.name, part.start, len(part.values)))
                    moved(_FP32_BYTES * len(part.values))

        self.ranks.all_or_none_patiently("loading a checkpoint", copy_in)
        # Only after all ranks have read theirs: these are collectives, and a rank that refused
        # would be waited for.
        self.sharded.complete_copies()
        self.sharded.finish_load(entry.manifest.update_counts)
        return Restored(serial=record.serial, tier=Tier.disk, **entry.manifest.metadata())

    def _counter(self, entry: Entry) -> Callable[[int], None]:
        """A function that adds up the bytes read, to compare or to copy, and shows the sum."""
        verified = sum(entry.manifest.files[name].num_bytes for name in self._share_of(entry))
        copied = sum(_FP32_BYTES * len(part.values) for part in self._own_parts())
        done = 0

        def moved(count: int) -> None:
            nonlocal done
            done += count
            self.show("restoring", done, verified + copied)

        return moved

    def _look_at(self, record: Record) -> tuple[Entry, dict[str, Stamp]]:
        entry = self.directory.read(self.directory.folder_of(record))
        ranges = [(part.name, part.start, len(part.values)) for part in self._own_parts()]
        return entry, stamps(entry, {*files_needed(entry, ranges), *self._share_of(entry)})

    def _refuse_other_model(self, entry: Entry) -> None:
        manifest = entry.manifest
        expected = {
            shard.name: (tuple(shard.shape), name_of(element_type(shard)))
            for shard in self.sharded.shards()
        }
        stored = {n: (tuple(shape), manifest.dtype(n)) for n, shape in manifest.shapes.items()}
        if expected != stored:
            differing = sorted(set(expected.items()) ^ set(stored.items()))
            raise CheckpointError(
                f"{entry.folder}: is of another model; first difference: {differing[0]}"
            )
