"""Sends clean checkpoints to a remote while training goes on.

Every rank sends its own files, rank 0 the rest, each job agreed among the ranks like the
ring's own (:mod:`runner.checkpoint.work`), in a queue of its own: a save or a proof never waits
for the network. What fails is told and tried again with the next clean checkpoint; files that
are there already, and the same, are not sent twice.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from runner.checkpoint.protocol import Ranks
from runner.checkpoint.remote import Claim, RemoteRing
from runner.checkpoint.store import CLEAN, COMMITTED, MANIFEST, RingStore
from runner.checkpoint.work import AgreedWork
from runner.policy.history import Incident
from runner.policy.remote import kept_there, next_upload
from runner.policy.ring import Record

_PATIENCE_SECONDS = 0.2  # between looks at the time at the end of a run


class Uploads:
    """See the module's docstring. Everything but :meth:`close` is called on all ranks alike.

    Args:
        out: the run's directory, for copies of its journal, metrics and settings.
        run: names the run, the same for all its incarnations.
        stored: whole clean checkpoints that are at the remote already.
        tainted: serials that a rollback left behind.
        keep, keep_every: as the ring's, for the remote.
        work: the ring's queue for it.
        check: raises when a newer incarnation owns the run directory.
        report: takes incidents, alike on every rank.
    """

    def __init__(
        self,
        remote: RemoteRing,
        store: RingStore,
        *,
        out: Path,
        run: str,
        claim: Claim,
        stored: Sequence[Record],
        tainted: Iterable[int],
        keep: int,
        keep_every: int,
        work: AgreedWork,
        ranks: Ranks,
        check: Callable[[], None],
        report: Callable[[Incident], None],
    ) -> None:
        self.stored = list(stored)
        self._remote = remote
        self._store = store
        self._out = out
        self._run = run
        self._claim = claim
        self._has_claimed = False
        self._keep = keep
        self._keep_every = keep_every
        self._ranks = ranks
        self._check = check
        self._report = report
        self._tried = 0
        self._tainted = set(tainted)
        self._withdrawn: set[int] = set()  # tried; again after the next upload
        self._sending: Record | None = None
        self._step = 0
        self._work = work

    @property
    def pinned(self) -> set[int]:
        """Serials that must not be retired from the ring now."""
        return {self._sending.serial} if self._sending else set()

    @property
    def is_busy(self) -> bool:
        return len(self._work) > 0

    def after_step(self, records: Sequence[Record], step: int) -> None:
        """Begin what is due; ``records`` are the ring's that are on disk."""
        self._step = step
        if len(self._work):
            return
        for stored in self.stored:
            if stored.serial in self._tainted - self._withdrawn:
                self._withdraw(stored)
        record = next_upload(records, self.stored, tried=self._tried)
        if record is not None:
            self._upload(record)

    def distrust(self, is_tainted: Callable[[Record], bool]) -> None:
        """These are not clean any more: a restart must not find them at the remote.

        Not for those that the disk damaged: theirs may be the last good copies.
        """
        known = [*self.stored, *([self._sending] if self._sending else [])]
        self._tainted |= {record.serial for record in known if is_tainted(record)}

    def finish(self, records: Sequence[Record], seconds: float) -> None:
        """At the end of a run, wait at most ``seconds`` for what is due. Collective."""
        limit = time.monotonic() + seconds
        self.after_step(records, self._step)
        while len(self._work):
            self._work.wait(_PATIENCE_SECONDS)
            late = float(time.monotonic() > limit)
            num_done, num_failed, num_late = self._ranks.sum([*self._work.tell(), late])
            self._work.settle(num_done, num_failed, self._ranks.world_size)
            if num_late and len(self._work):
                self._say(f"not finished within {seconds:g} s of the end of the run")
                return
            self.after_step(records, self._step)

    def close(self) -> None:
        """Leave what is under way: the next start goes on with it."""
        self._remote.files.stop()

    # -- one checkpoint -------------------------------------------------------------------

    def _upload(self, record: Record) -> None:
        self._tried = record.serial
        self._sending = record
        # First of all, so that nothing is written into another run's remote.
        self._submit("prepare", record, self._prepare, self._prepared)

    def _submit(
        self,
        what: str,
        record: Record,
        work: Callable[[Record], None],
        then: Callable[[Record, list[str]], None],
        *,
        everywhere: bool = False,
    ) -> None:
        def on_this_rank() -> None:
            if everywhere or self._ranks.rank == 0:
                work(record)

        self._work.submit(
            f"{what} {record.serial}", on_this_rank, lambda failures: then(record, failures)
        )

    def _own(self) -> None:
        """Be the one that writes there, or fail."""
        self._check()
        if not self._has_claimed:
            self._remote.claim(self._claim, self._run)
            self._has_claimed = True
        self._remote.check(self._claim)

    def _prepare(self, record: Record) -> None:
        self._own()
        folder = self._store.folder_of(record)
        self._remote.prepare(folder.name, (folder / COMMITTED).read_bytes())

    def _prepared(self, record: Record, failures: list[str]) -> None:
        if self._goes_on(record, failures):
            self._submit("send", record, self._send, self._sent, everywhere=True)

    def _send(self, record: Record) -> None:
        """This rank's files; where the world has changed, its share of them."""
        entry = self._store.read(self._store.folder_of(record))
        names = sorted(entry.manifest.files)[self._ranks.rank :: self._ranks.world_size]
        for name in names:
            there = f"ring/{entry.folder.name}/{name}"
            self._remote.files.put(entry.folder / name, there, entry.manifest.files[name])

    def _sent(self, record: Record, failures: list[str]) -> None:
        if self._goes_on(record, failures):
            self._submit("publish", record, self._publish, self._published)

    def _publish(self, record: Record) -> None:
        folder = self._store.folder_of(record)
        there = f"ring/{folder.name}"
        # A name that the next start sweeps away, should this process end in here.
        with tempfile.TemporaryDirectory(prefix="writing-run-", dir=self._store.folder) as scratch:
            self._remote.put_run_files(folder.name, self._out, Path(scratch))
        for name in (MANIFEST, CLEAN):
            self._remote.files.put_bytes(f"{there}/{name}", (folder / name).read_bytes())
        committed = (folder / COMMITTED).read_bytes()
        self._own()
        self._remote.files.put_bytes(f"{there}/{COMMITTED}", committed)

    def _published(self, record: Record, failures: list[str]) -> None:
        if not failures:
            self.stored.append(record)
            self._withdrawn.clear()
        if not self._goes_on(record, failures):
            return
        self._sending = None
        kept = kept_there(self.stored, keep=self._keep, keep_every=self._keep_every)
        serials = {known.serial for known in kept}
        self._submit(
            "sweep",
            record,
            lambda newest: self._sweep(serials, newest),
            lambda newest, failed: self._swept(kept, failed),
        )

    def _sweep(self, kept: set[int], newest: Record) -> None:
        self._own()
        self._remote.sweep(kept, below=newest.serial)

    def _swept(self, kept: list[Record], failures: list[str]) -> None:
        if failures:
            self._say(f"older checkpoints could not be removed: {'; '.join(failures)}")
        else:
            self.stored = kept

    def _goes_on(self, record: Record, failures: list[str]) -> bool:
        """Whether the next job of an upload is to begin; says why not."""
        if failures:
            self._say(f"checkpoint {record.serial} of step {record.step}: {'; '.join(failures)}")
        elif record.serial not in self._tainted:
            return True
        self._sending = None
        return False

    def _withdraw(self, record: Record) -> None:
        self._withdrawn.add(record.serial)
        self._submit("withdraw", record, self._remove, self._removed)

    def _remove(self, record: Record) -> None:
        self._own()
        self._remote.remove(self._store.folder_of(record).name)

    def _removed(self, record: Record, failures: list[str]) -> None:
        if failures:
            self._say(f"tainted checkpoint {record.serial} is still there: {'; '.join(failures)}")
        else:
            self.stored = [known for known in self.stored if known.serial != record.serial]

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
