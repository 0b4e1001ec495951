"""Reads a large corpus once, during training, to check that it has not changed since the start.

The fingerprint at the start covers only samples of a corpus over 64 MiB, so it misses a change in
place between them. The journal also has the digest of every byte. A resume computes it again, or
remembers it for unchanged files, and compares it before any checkpoint of the resumed run counts as
proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from runner.checkpoint.jobs import Process, QueuedJob, start
from runner.data.corpus_digest import Whole, stamp, whole_digest
from runner.data.dataset import sampled_files
from runner.policy.decision.history import Incident
from runner.system.error import ConfigError
from runner.train.run import EngineRun

_MOST_FILES = 64  # files named in a journal line


class CorpusCheck:
    """Reads in a background job that nothing waits for; all ranks learn the result together.

    Args:
        known: the journal line with the digest that the run began on; None if there is none, or
            if no checkpoint was loaded.
        notes: directory where digests are remembered.
        may_change: whether another corpus is only journalled.
    """

    def __init__(
        self, run: EngineRun, *, known: Mapping[str, Any] | None, notes: Path, may_change: bool
    ) -> None:
        dataset = run.corpus.dataset
        self._files = sampled_files(dataset)
        self._fingerprint = dataset.fingerprint()
        self._ranks = run.ranks
        self._ring = run.ring
        self._known = known
        self._is_change_allowed = may_change
        self._notes = notes
        self._good_step = self._step = run.resumed.step
        self._written = run.written
        self._heart = run.group.heart
        self._is_over = not self._files
        self._digest: Whole | None = None
        self._count = 0
        self._changed = ""

    def begin(self) -> None:
        """Start reading. One of the ranks that share the files reads them. Collective."""
        if self._is_over:
            return
        ranks = self._ranks
        stamps = ranks.gather(
            ranks.all_or_none("looking at the corpus", lambda: stamp(self._files))
        )
        reads = stamps.index(stamps[ranks.rank]) == ranks.rank
        start(self._compare(reads=reads))

    @property
    def holds_proofs(self) -> bool:
        """Whether no checkpoint may count as proven yet. Alike on all ranks."""
        return not self._is_over and self._known is not None and not self._is_change_allowed

    def look(self, step: int) -> None:
        """Compare once the reading is done; call after background jobs are applied. Collective.

        Raises:
            ConfigError: the corpus has changed; checkpoints since the resume are tainted.
        """
        self._step = step
        if self._changed:
            self._ring.distrust_after(self._good_step)
            raise ConfigError(self._changed)

    def finish(self, step: int) -> None:
        """Wait for the end of the reading. Collective. Raises like :meth:`look`."""
        last = -1.0
        while not self._is_over:
            self._ring.turn()
            [count] = self._ranks.sum([float(self._count)])
            if count != last:
                last = count
                self._heart.enter("save")
        self.look(step)

    def _read(self) -> None:
        def tell(what: str, done: int, total: int) -> None:
            self._count += 1

        self._digest = whole_digest(self._files, notes=self._notes, progress=tell)

    def _compare(self, *, reads: bool) -> Process[None]:
        """Read on the chosen ranks, then compare all results."""
        work = self._read if reads else lambda: None
        failures = yield QueuedJob(queue=self._ring.upload_queue, work=work)
        self._is_over = True
        if failures:
            # Steps handle samples that cannot be read; the next start reads again.
            self._written.report(self._incident("data_unchecked", "go on", "; ".join(failures), {}))
            return
        digests = self._ranks.gather(self._digest.sha256 if self._digest else None)
        whole = self._ranks.from_first(_plain(self._digest) if self._digest else None)
        if any(sha256 not in (None, whole["sha256"]) for sha256 in digests):
            self._end(f"ranks see different data; whole digests by rank: {digests}", whole)
        elif self._known is None or self._known.get("sha256") == whole["sha256"]:
            if self._known is None:
                self._note("read whole for the first time", whole)
        elif self._is_change_allowed:
            self._note("changed in place, which resume.allow_change=true allows", whole)
        else:
            self._end(_message(self._known, whole), whole)

    def _note(self, reason: str, whole: dict[str, Any]) -> None:
        incident = self._incident("data_digest", "go on", f"the corpus was {reason}", whole)
        self._written.journal.add(incident)

    def _end(self, message: str, whole: dict[str, Any]) -> None:
        self._changed = message
        self._written.report(self._incident("data_changed", "end", message, whole))

    def _incident(
        self, kind: str, decision: str, reason: str, whole: Mapping[str, Any]
    ) -> Incident:
        detail = {"data": self._fingerprint, **whole}
        return Incident(kind=kind, step=self._step, decision=decision, reason=reason, detail=detail)


def known_digest(journal: Iterable[Mapping[str, Any]], fingerprint: str) -> dict[str, Any] | None:
    """The newest journal line with the whole digest for this fingerprint."""
    newest = None
    for line in journal:
        detail = line["detail"]
        if line["kind"] == "data_digest" and detail.get("data") == fingerprint:
            newest = dict(detail) if isinstance(detail.get("sha256"), str) else None
    return newest


def _plain(whole: Whole) -> dict[str, Any]:
    files = [list(pair) for pair in whole.files] if len(whole.files) <= _MOST_FILES else []
    return {"sha256": whole.sha256, "bytes": whole.num_bytes, "files": files}


def _message(known: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    files = known.get("files")
    was = {tuple(pair) for pair in files} if isinstance(files, list) else set()
    changed = [name for name, sha256 in whole["files"] if was and (name, sha256) not in was]
    which = f": {', '.join(changed)} changed" if changed else ""
    return (
        f"data.path: the corpus is not the one that this run began on{which} (every byte was read; "
        f"SHA-256 {known['sha256'][:12]}, now {whole['sha256'][:12]}). The run ends, and "
        "checkpoints saved since the resume must not be used; the one that it resumed from stays "
        "valid. Restore the corpus, choose another out, or resume.allow_change=true"
    )
