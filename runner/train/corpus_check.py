"""Reads a large corpus once, during training, to check that it has not changed since the start.

The fingerprint that ranks compare at the start covers samples of a corpus over 64 MiB: a change
in place between them goes unseen. The journal also has the digest of every byte; at a
resume it is computed again, or remembered for unchanged files, and compared before any
checkpoint of the resumed run counts as proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.checkpoint.jobs import Job, Process, start
from runner.checkpoint.ring import Ring
from runner.data.dataset import Dataset, sampled_files
from runner.data.whole import Whole, stamp, whole_digest
from runner.distributed.agreement import Ranks
from runner.policy.decision.history import Incident
from runner.system.error import ConfigError

_MOST_FILES = 64  # at most so many named in a journal line


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedOn:
    """What a start resumes from.

    Args:
        step: of the loaded checkpoint; 0: none was loaded.
        known: the journal line with the digest that the run began on, if there is one.
        is_change_allowed: whether a changed digest is journalled and the run continues.
    """

    step: int
    known: Mapping[str, Any] | None
    is_change_allowed: bool


class CorpusCheck:
    """Reads in a background job that nothing waits for; all ranks learn the result together.

    Args:
        notes: directory where digests are remembered.
        report: takes incidents, alike on every rank.
        journal: takes incidents that are recorded but not printed; alike as well.
        moved: called while the run waits, whenever the reading has advanced.
    """

    def __init__(
        self,
        *,
        dataset: Dataset,
        ranks: Ranks,
        ring: Ring,
        resumed: ResumedOn,
        notes: Path,
        report: Callable[[Incident], None],
        journal: Callable[[Incident], None],
        moved: Callable[[], None],
    ) -> None:
        self._files = sampled_files(dataset)
        self._fingerprint = dataset.fingerprint()
        self._ranks = ranks
        self._ring = ring
        self._known = resumed.known
        self._is_change_allowed = resumed.is_change_allowed
        self._notes = notes
        self._good_step = resumed.step
        self._report = report
        self._journal = journal
        self._moved = moved
        self._is_over = not self._files
        self._found: Whole | None = None
        self._count = 0
        self._step = resumed.step
        self._changed = ""

    def begin(self) -> None:
        """Start reading. One of the ranks that share the files reads them. Collective."""
        if self._is_over:
            return
        ranks = self._ranks
        seen = ranks.gather(ranks.all_or_none("looking at the corpus", self._stamp))
        reads = seen.index(seen[ranks.rank]) == ranks.rank
        start(self._compare(reads=reads))

    @property
    def holds_proofs(self) -> bool:
        """Whether no checkpoint may count as proven yet. Alike on all ranks."""
        return not self._is_over and self._known is not None and not self._is_change_allowed

    def look(self, step: int) -> None:
        """Compare when the reading is done; call it after background jobs are applied. Collective.

        Raises:
            ConfigError: the corpus has changed; checkpoints since the resume are tainted.
        """
        self._step = step
        if self._changed:
            self._ring.distrust_after(self._good_step)
            raise ConfigError(self._changed)

    def finish(self, step: int) -> None:
        """Wait for the end of the reading. Collective. Raises as :meth:`look`."""
        last = -1.0
        while not self._is_over:
            self._ring.turn()
            [count] = self._ranks.sum([float(self._count)])
            if count != last:
                last = count
                self._moved()
        self.look(step)

    def _stamp(self) -> str:
        return stamp(self._files)

    def _read(self) -> None:
        self._found = whole_digest(self._files, notes=self._notes, tell=self._tell)

    def _tell(self, what: str, done: int, total: int) -> None:
        self._count += 1

    def _compare(self, *, reads: bool) -> Process[None]:
        """Read on the chosen ranks, then compare all results."""
        failures = yield Job(
            queue=self._ring.upload_queue,
            name="reading the corpus whole",
            work=self._read if reads else _nothing,
        )
        self._is_over = True
        if failures:
            # The step judges a sample that cannot be read; the next start reads again.
            self._report(self._incident("data_unchecked", "go on", "; ".join(failures), {}))
            return
        digests = self._ranks.gather(self._found.sha256 if self._found else None)
        whole = self._ranks.from_first(_plain(self._found) if self._found else None)
        if any(sha256 not in (None, whole["sha256"]) for sha256 in digests):
            self._end(f"ranks see different data; whole digests by rank: {digests}", whole)
        elif self._known is None or self._known.get("sha256") == whole["sha256"]:
            if self._known is None:
                self._note("read whole for the first time", whole)
        elif self._is_change_allowed:
            self._note("changed in place, which resume.allow_change=true allows", whole)
        else:
            self._end(_words(self._known, whole), whole)

    def _note(self, reason: str, whole: dict[str, Any]) -> None:
        self._journal(self._incident("data_digest", "go on", f"the corpus was {reason}", whole))

    def _end(self, words: str, whole: dict[str, Any]) -> None:
        self._changed = words
        self._report(self._incident("data_changed", "end", words, whole))

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


def _nothing() -> None:
    pass


def _plain(whole: Whole) -> dict[str, Any]:
    files = [list(pair) for pair in whole.files] if len(whole.files) <= _MOST_FILES else []
    return {"sha256": whole.sha256, "bytes": whole.num_bytes, "files": files}


def _words(known: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    files = known.get("files")
    was = {tuple(pair) for pair in files} if isinstance(files, list) else set()
    changed = [name for name, sha256 in whole["files"] if was and (name, sha256) not in was]
    which = f": {', '.join(changed)} changed" if changed else ""
    return (
        f"data.path: the corpus is not the one that this run was begun on{which} (every byte was "
        f"read; SHA-256 {known['sha256'][:12]}, now {whole['sha256'][:12]}). The run ends, and "
        "what it saved since it was taken up is not to be used; the checkpoint it was taken up "
        "from stands. Restore the corpus, choose another out, or resume.allow_change=true"
    )
