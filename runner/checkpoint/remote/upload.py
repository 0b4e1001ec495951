"""Uploads clean checkpoints to a remote while training goes on.

Every rank uploads its own files, rank 0 the rest. Each job is agreed among the ranks like the
ring's own (:mod:`runner.checkpoint.jobs`), in a queue of its own: a save or a proof never waits
for the network. A failure is reported and tried again with the next clean checkpoint; files that
are already there, and equal, are not sent twice.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.checkpoint.disk.directory import CLEAN, COMMITTED, MANIFEST, CheckpointDirectory
from runner.checkpoint.jobs import Job, LockstepQueue, Process, start
from runner.checkpoint.manifest import by_kind
from runner.checkpoint.protocol import Ranks
from runner.checkpoint.remote.store import RemoteRing, WriterClaim
from runner.config.schema import CheckpointConfig
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Record, next_upload
from runner.policy.retention.retire import kept_there

_PATIENCE_SECONDS = 0.2  # between checks of the time at the end of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTarget:
    """What one incarnation of a run uploads, where to, and under which claim.

    Args:
        ring: the remote.
        run: names the run, the same for all its incarnations; "" on ranks other than 0.
        claim: marks the remote as this incarnation's.
        out: the run's directory, for copies of its journal, metrics and settings.
        check: raises when a newer incarnation owns the run directory.
    """

    ring: RemoteRing
    run: str
    claim: WriterClaim
    out: Path
    check: Callable[[], None]


class Uploads:
    """See the module's docstring. Everything but :meth:`close` is called on all ranks alike.

    Args:
        stored: whole clean checkpoints that are already at the remote.
        tainted: serials that a rollback left behind.
        queue: the ring's queue for it.
        report: takes incidents, alike on every rank.

    Attributes:
        show: told at the end of a run how far this rank's share is, in bytes.
    """

    def __init__(
        self,
        target: RemoteTarget,
        directory: CheckpointDirectory,
        *,
        settings: CheckpointConfig,
        stored: Sequence[Record],
        tainted: Iterable[int],
        queue: LockstepQueue,
        ranks: Ranks,
        report: Callable[[Incident], None],
    ) -> None:
        self.stored = list(stored)
        self._target = target
        self._remote = target.ring
        self._directory = directory
        self._has_claimed = False
        self._settings = settings
        self._ranks = ranks
        self._report = report
        self._tried = 0
        self._tainted = set(tainted)
        self._withdrawn: set[int] = set()  # tried; again after the next upload
        self._sending: Record | None = None
        self._step = 0
        self._queue = queue
        self._moved = self._due = 0  # bytes of this rank's share: sent and read back, and of all
        self.show: Callable[[str, int, int], None] = lambda what, done, total: None

    @property
    def pinned(self) -> set[int]:
        """Serials that must not be retired from the ring now."""
        return {self._sending.serial} if self._sending else set()

    @property
    def is_busy(self) -> bool:
        return len(self._queue) > 0

    def after_step(self, records: Sequence[Record], step: int) -> None:
        """Begin the upload that is due; ``records`` are the ring's on disk."""
        self._step = step
        if len(self._queue):
            return
        for stored in self.stored:
            if stored.serial in self._tainted - self._withdrawn:
                start(self._withdraw(stored))
        record = next_upload(records, self.stored, tried=self._tried)
        if record is not None:
            start(self._upload(record))

    def distrust(self, is_tainted: Callable[[Record], bool]) -> None:
        """Remove checkpoints that are no longer clean: a restart must not find them.

        Not for those that the disk damaged: the uploads may be their last good copies.
        """
        known = [*self.stored, *([self._sending] if self._sending else [])]
        self._tainted |= {record.serial for record in known if is_tainted(record)}

    def finish(self, records: Sequence[Record], seconds: float) -> None:
        """At the end of a run, wait at most ``seconds`` for the upload that is due. Collective."""
        limit = time.monotonic() + seconds
        self.after_step(records, self._step)
        while len(self._queue):
            self._queue.wait(_PATIENCE_SECONDS)
            self.show("uploading", min(self._moved, self._due), self._due)
            late = float(time.monotonic() > limit)
            num_done, num_failed, num_late = self._ranks.sum([*self._queue.progress(), late])
            self._queue.apply_progress(num_done, num_failed, self._ranks.world_size)
            if num_late and len(self._queue):
                self._say(f"not finished within {seconds:g} s of the end of the run")
                return
            self.after_step(records, self._step)

    def close(self) -> None:
        """Stop; the next start continues an unfinished upload."""
        self._remote.files.stop()

    # -- one checkpoint -------------------------------------------------------------------

    def _upload(self, record: Record) -> Process[None]:
        """Upload a checkpoint, its marker last; then remove checkpoints no longer kept."""
        self._tried, self._sending = record.serial, record
        is_wanted = yield from self._store_whole(record)
        self._sending = None
        if is_wanted:
            yield from self._remove_older(record)

    def _store_whole(self, record: Record) -> Process[bool]:
        """Returns whether the checkpoint is there, and is still clean here."""
        # First of all, so that nothing is written into another run's remote.
        failures = yield self._on_first("prepare", record, self._prepare)
        if not self._goes_on(record, failures):
            return False
        failures = yield self._on_all("send", record, self._send)
        if not self._goes_on(record, failures):
            return False
        failures = yield self._on_first("publish", record, self._publish)
        if not failures:
            self.stored.append(record)
            self._withdrawn.clear()
        return self._goes_on(record, failures)

    def _remove_older(self, record: Record) -> Process[None]:
        settings = self._settings
        kept = kept_there(self.stored, keep=settings.remote_keep, keep_every=settings.keep_every)
        serials = {known.serial for known in kept}
        failures = yield self._on_first("sweep", record, lambda to: self._sweep(serials, to))
        if failures:
            self._say(f"older checkpoints could not be removed: {'; '.join(failures)}")
        else:
            self.stored = kept

    def _withdraw(self, record: Record) -> Process[None]:
        """Remove a stored checkpoint that is not clean any more."""
        self._withdrawn.add(record.serial)
        failures = yield self._on_first("withdraw", record, self._remove)
        if failures:
            self._say(f"tainted checkpoint {record.serial} is still there: {'; '.join(failures)}")
        else:
            self.stored = [known for known in self.stored if known.serial != record.serial]

    def _goes_on(self, record: Record, failures: list[str]) -> bool:
        """Whether an upload continues after a job; reports the job's failures."""
        if failures:
            self._say(f"checkpoint {record.serial} of step {record.step}: {'; '.join(failures)}")
        return not failures and record.serial not in self._tainted

    # -- its jobs -------------------------------------------------------------------------

    def _on_all(self, what: str, record: Record, work: Callable[[Record], None]) -> Job:
        return Job(queue=self._queue, name=f"{what} {record.serial}", work=lambda: work(record))

    def _on_first(self, what: str, record: Record, work: Callable[[Record], None]) -> Job:
        """A job with work for rank 0 only."""
        return self._on_all(what, record, work if self._ranks.rank == 0 else lambda record: None)

    def _own(self) -> None:
        """Check that this writer owns the remote, or fail."""
        self._target.check()
        if not self._has_claimed:
            self._remote.claim(self._target.claim, self._target.run)
            self._has_claimed = True
        self._remote.check(self._target.claim)

    def _prepare(self, record: Record) -> None:
        self._own()
        folder = self._directory.folder_of(record)
        self._remote.prepare(folder.name, (folder / COMMITTED).read_bytes())

    def _send(self, record: Record) -> None:
        """Upload this rank's files, or its share of them after a change of the world size."""
        entry = self._directory.read(self._directory.folder_of(record))
        names = by_kind(entry.manifest.files)[self._ranks.rank :: self._ranks.world_size]
        self._moved, self._due = 0, 2 * sum(entry.manifest.files[name].num_bytes for name in names)
        self._remote.files.moved = self._count
        for name in names:
            remote_path = f"ring/{entry.folder.name}/{name}"
            self._remote.files.put(entry.folder / name, remote_path, entry.manifest.files[name])
        self._remote.files.moved = lambda count: None

    def _count(self, num_bytes: int) -> None:
        self._moved += num_bytes

    def _publish(self, record: Record) -> None:
        folder = self._directory.folder_of(record)
        remote_folder = f"ring/{folder.name}"
        # A name that the next start sweeps away, should this process end in here.
        with tempfile.TemporaryDirectory(
            prefix="writing-run-", dir=self._directory.folder
        ) as scratch:
            self._remote.put_run_files(folder.name, self._target.out, Path(scratch))
        for name in (MANIFEST, CLEAN):
            self._remote.files.put_bytes(f"{remote_folder}/{name}", (folder / name).read_bytes())
        committed = (folder / COMMITTED).read_bytes()
        self._own()
        self._remote.files.put_bytes(f"{remote_folder}/{COMMITTED}", committed)

    def _sweep(self, kept: set[int], newest: Record) -> None:
        self._own()
        self._remote.sweep(kept, below=newest.serial)

    def _remove(self, record: Record) -> None:
        self._own()
        self._remote.remove(self._directory.folder_of(record).name)

    def _say(self, reason: str) -> None:
        self._report(
            Incident(
                kind="upload_failed",
                step=self._step,
                decision="go on; tried again with the next clean checkpoint",
                reason=f"{self._remote.url}: {reason}",
                detail={"stored": [record.serial for record in self.stored]},
            )
        )
