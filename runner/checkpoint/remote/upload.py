"""Uploads clean checkpoints to a remote while training goes on.

Every rank uploads its own files, rank 0 the rest. Each job is agreed among the ranks like the
ring's own (:mod:`runner.checkpoint.jobs`), in a queue of its own: a save or a proof never waits
for the network. A failure is reported and tried again with the next clean checkpoint; files that
are already there, and equal, are not sent twice. The last checkpoint before a stop is sent
unproven: a run whose disk is lost goes on from it, as it would from the disk.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.checkpoint.disk.directory import CLEAN, COMMITTED, MANIFEST, CheckpointDirectory
from runner.checkpoint.jobs import LockstepQueue, Process, QueuedJob, start
from runner.checkpoint.manifest import by_kind
from runner.checkpoint.protocol import RingRanks
from runner.checkpoint.remote.store import RemoteRing, WriterClaim
from runner.config.schema import CheckpointConfig
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Record, State, kept_there, next_upload

_PATIENCE_SECONDS = 0.2  # between checks of the time at the end of a run


@dataclass(eq=False)
class Uploads:
    """See the module's docstring. Everything but :meth:`close` is called on all ranks alike.

    Args:
        remote: where they go.
        directory: of the ring; in a run's own, beside its journal, metrics and settings.
        run: names the run, the same for all its incarnations; "" on ranks other than 0.
        claim: marks the remote as this incarnation's.
        stored: whole clean checkpoints that are already at the remote.
        tainted: serials that a rollback left behind.
        queue: the ring's queue for it.
        report: takes incidents, alike on every rank.
        show: told at the end of a run how far this rank's share is, in bytes.

    Attributes:
        best: the serials of the best of some checkpoints; these stay at the remote too.
    """

    remote: RemoteRing
    directory: CheckpointDirectory
    run: str
    claim: WriterClaim
    settings: CheckpointConfig
    stored: list[Record]
    tainted: set[int]
    queue: LockstepQueue
    ranks: RingRanks
    report: Callable[[Incident], None]
    show: Callable[[str, int, int], None] = lambda what, done, total: None
    best: Callable[[Iterable[Record]], set[int]] = lambda records: set()
    seconds: float = 0.0  # of this rank's share of the last upload; 0: unknown
    _takes_unproven: bool = False
    _has_claimed: bool = False
    _has_begun: bool = False  # any upload
    # Those to send and tainted ones to remove, tried; again after the next upload.
    _attempted: set[int] = field(default_factory=set)
    _sending: Record | None = None
    _step: int = 0
    _moved: int = 0  # bytes of this rank's share that were sent and read back
    _due: int = 0  # all of them
    _told: str = ""  # the last failure, without numbers: while it lasts it is told once

    @property
    def pinned(self) -> set[int]:
        """Serials that must not be retired from the ring now."""
        return {self._sending.serial} if self._sending else set()

    @property
    def has_tried(self) -> bool:
        """Whether an upload was begun, and none is under way."""
        return self._has_begun and not self.queue.num_jobs

    @property
    def _sound(self) -> list[Record]:
        """Those at the remote that are not tainted: a store may refuse to remove one."""
        return [record for record in self.stored if record.serial not in self.tainted]

    def after_step(self, records: Sequence[Record], step: int) -> None:
        """Begin the upload that is due; ``records`` are the ring's on disk."""
        self._step = step
        if self.queue.num_jobs:
            return
        for stored in self.stored:
            if stored.serial in self.tainted - self._attempted:
                start(self._withdraw(stored))
        # A rollback goes back to what is older than the tainted ones.
        records = [record for record in records if record.serial not in self.tainted]
        tried = max(self._attempted - self.tainted, default=0)
        newest = next_upload(records, self._sound, tried=tried, unproven=self._takes_unproven)
        record = newest or (None if self._takes_unproven else self._best_due(records))
        if record is not None:
            start(self._upload(record))

    def _best_due(self, records: Sequence[Record]) -> Record | None:
        """The best checkpoint, if it is clean and a newer one was sent in its place."""
        clean = [record for record in records if record.state is State.clean]
        sound = self._sound
        done = {stored.serial for stored in sound} | self._attempted
        due = self.best([*clean, *sound]) - done
        return next((record for record in clean if record.serial in due), None)

    def distrust(self, is_tainted: Callable[[Record], bool]) -> None:
        """Remove checkpoints that are no longer clean: a restart must not find them.

        Not for those that the disk damaged: the uploads may be their last good copies.
        """
        known = [*self.stored, *([self._sending] if self._sending else [])]
        self.tainted |= {record.serial for record in known if is_tainted(record)}

    def finish(self, records: Sequence[Record]) -> None:
        """At the end of a run, wait for the upload that is due, but not for ever. Collective."""
        seconds = self.settings.remote_wait_seconds
        limit = time.monotonic() + seconds
        if not self._wait(records, lambda: time.monotonic() > limit):
            self._say(f"not finished within {seconds:g} s of the end of the run")

    def finish_at_a_stop(self, records: Sequence[Record], left_seconds: Callable[[], float]) -> str:
        """Send the newest checkpoint, proven or not, if it is there in time. Collective.

        Returns:
            What came of it, for a person.
        """
        left = left_seconds()
        if self.ranks.sum([float(left < self.seconds)])[0]:
            return (
                f"not copied to {self.remote.url}: the last copy took {self.seconds:.1f} s, "
                f"and {max(0.0, left):.1f} s are left"
            )
        self._takes_unproven = True
        self._wait(records, lambda: left_seconds() < 0)
        newest = max(record.serial for record in records)
        is_there = newest in [record.serial for record in self.stored]
        return f"{'' if is_there else 'not '}copied to {self.remote.url}"

    def _wait(self, records: Sequence[Record], is_late: Callable[[], bool]) -> bool:
        """Wait for the upload that is due; False, on all ranks alike, when it is too late."""
        self.after_step(records, self._step)
        while self.queue.num_jobs:
            self.queue.wait(_PATIENCE_SECONDS)
            self.show("uploading", min(self._moved, self._due), self._due)
            late = float(is_late())
            num_done, num_failed, num_late = self.ranks.sum([*self.queue.progress(), late])
            self.queue.apply_progress(num_done, num_failed, self.ranks.world_size)
            if num_late and self.queue.num_jobs:
                return False
            self.after_step(records, self._step)
        return True

    def close(self) -> None:
        """Stop; the next start continues an unfinished upload."""
        self.remote.files.stop()

    # -- one checkpoint -------------------------------------------------------------------

    def _upload(self, record: Record) -> Process[None]:
        """Upload a checkpoint, its marker last; then remove checkpoints no longer kept."""
        self._attempted.add(record.serial)
        self._has_begun, self._sending = True, record
        # First of all prepared, so that nothing is written into another run's remote.
        prepare = self._on_first(record, self._prepare)
        for job in (prepare, QueuedJob(queue=self.queue, work=lambda: self._send(record))):
            failures = yield job
            if not self._goes_on(record, failures):
                self._sending = None
                return
        failures = yield self._on_first(record, self._publish)
        self._sending = None
        if not failures:
            self.stored = [*(r for r in self.stored if r.serial != record.serial), record]
            self._attempted.clear()
            self._told = ""
        if self._goes_on(record, failures):
            yield from self._remove_older(record)

    def _remove_older(self, record: Record) -> Process[None]:
        settings = self.settings
        sound = self._sound
        kept = kept_there(sound, keep=settings.keep, keep_every=settings.keep_every)
        serials = {known.serial for known in kept}
        serials |= self.best(known for known in sound if known.state is State.clean)
        failures = yield self._on_first(record, lambda to: self._sweep(serials, to))
        if failures:
            self._say(f"older checkpoints could not be removed: {'; '.join(failures)}")
        else:
            self.stored = [
                known
                for known in self.stored
                if known.serial in serials or known.serial >= record.serial
            ]

    def _withdraw(self, record: Record) -> Process[None]:
        """Remove a stored checkpoint that is not clean any more."""
        self._attempted.add(record.serial)
        failures = yield self._on_first(record, self._remove)
        if failures:
            self._say(f"tainted checkpoint {record.serial} is still there: {'; '.join(failures)}")
        else:
            self.stored = [known for known in self.stored if known.serial != record.serial]

    def _goes_on(self, record: Record, failures: list[str]) -> bool:
        """Whether an upload continues after a job; reports the job's failures."""
        if failures:
            self._say(f"checkpoint {record.serial} of step {record.step}: {'; '.join(failures)}")
        return not failures and record.serial not in self.tainted

    # -- its jobs -------------------------------------------------------------------------

    def _on_first(self, record: Record, work: Callable[[Record], None]) -> QueuedJob:
        """A job with work for rank 0 only."""
        is_first = self.ranks.rank == 0
        return QueuedJob(queue=self.queue, work=lambda: work(record) if is_first else None)

    def _own(self) -> None:
        """Check that this writer owns the remote, or fail."""
        self.directory.check()
        if not self._has_claimed:
            self.remote.claim(self.claim, self.run)
            self._has_claimed = True
        self.remote.check(self.claim)

    def _prepare(self, record: Record) -> None:
        self._own()
        folder = self.directory.folder_of(record)
        self.remote.prepare(folder.name, (folder / COMMITTED).read_bytes())

    def _send(self, record: Record) -> None:
        """Upload this rank's files, or its share of them after a change of the world size."""
        began, entry = time.monotonic(), self.directory.read(self.directory.folder_of(record))
        names = by_kind(entry.manifest.files)[self.ranks.rank :: self.ranks.world_size]
        self._moved, self._due = 0, 2 * sum(entry.manifest.files[name].num_bytes for name in names)

        def count(num_bytes: int) -> None:
            self._moved += num_bytes

        files = self.remote.files
        files.moved = count
        for name in names:
            facts = entry.manifest.files[name]
            files.put(entry.folder / name, f"ring/{entry.folder.name}/{name}", facts)
        files.moved = lambda count: None
        self.seconds = time.monotonic() - began

    def _publish(self, record: Record) -> None:
        folder, files = self.directory.folder_of(record), self.remote.files
        # A name that the next start sweeps away, should this process end in here.
        with tempfile.TemporaryDirectory(
            prefix="writing-run-", dir=self.directory.folder
        ) as scratch:
            self.remote.put_run_files(folder.name, self.directory.folder.parent, Path(scratch))
        for name in (MANIFEST, *([CLEAN] if record.state is State.clean else [])):
            files.put_bytes(f"ring/{folder.name}/{name}", (folder / name).read_bytes())
        committed = (folder / COMMITTED).read_bytes()
        self._own()
        files.put_bytes(f"ring/{folder.name}/{COMMITTED}", committed)

    def _sweep(self, kept: set[int], newest: Record) -> None:
        self._own()
        self.remote.sweep(kept, below=newest.serial)

    def _remove(self, record: Record) -> None:
        self._own()
        self.remote.remove(self.directory.folder_of(record).name)

    def _say(self, reason: str) -> None:
        before, self._told = self._told, re.sub(r"\d+", "", reason)
        if self._told == before:
            return
        self.report(
            Incident(
                kind="upload_failed",
                step=self._step,
                decision="go on; tried again with the next clean checkpoint",
                reason=f"{self.remote.url}: {reason}",
                detail={"stored": [record.serial for record in self.stored]},
            )
        )
