"""Token caches: text is tokenised once, by one process at a time, and kept.

    CACHE/KEY/tokens.bin       the ids
    CACHE/KEY/documents.bin    where each document begins
    CACHE/KEY/index.json       what they are, with their digests; written last
    CACHE/.KEY.owner           which process is making it
    CACHE/.KEY.TOKEN           that process's draft

Must not trust a cache: it outlives crashes, so an entry counts only when its digests agree, and
a damaged one is rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from runner.data.claim import STALE_SECONDS, CacheClaim, Overtaken, Owners
from runner.data.corpus_digest import Progress
from runner.data.dataset import TokenFile, cumulative, digest
from runner.data.document_index import DocumentTable, TextPlaces
from runner.data.documents import Piece, Reader, TextFile
from runner.data.tokenizer import Codec
from runner.system.error import DataError
from runner.system.files import sync_directory

_TOKENS: Final = "tokens.bin"
_DOCUMENTS: Final = "documents.bin"
_INDEX: Final = "index.json"
_BLOCK_BYTES: Final = 1 << 22
_LOOK_SECONDS: Final = 0.2

# How much is held while tokenising: a token costs some hundred bytes on its way.
_BATCH_BYTES: Final = 1 << 24
_BATCH_PIECES: Final = 1 << 15
# A sync of a hundred gigabytes at the end would look like a hang.
_SYNC_BYTES: Final = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What ``index.json`` holds beside its own digest.

    ``files`` are (name, whether its documents are lines, how many) of each file;
    ``words`` is the notice of :class:`~runner.data.tokenizer.Codec`. ``num_bytes`` is the size of
    the files; earlier releases did not keep it.
    """

    dtype: str
    vocab_size: int
    unit: str
    num_begin_marks: int
    num_tokens: int
    num_documents: int
    source: str
    tokens_sha256: str
    documents_sha256: str
    files: list[list[Any]]
    words: str
    num_bytes: int = 0

    def tokens_at(self, place: Path) -> TokenFile:
        return TokenFile(path=place / _TOKENS, dtype=self.dtype, num_tokens=self.num_tokens)

    def documents_at(self, place: Path) -> DocumentTable:
        return DocumentTable(
            path=place / _DOCUMENTS, num_documents=self.num_documents, num_tokens=self.num_tokens
        )

    def places_at(self, place: Path) -> TextPlaces:
        return TextPlaces(
            documents=self.documents_at(place),
            names=[str(name) for name, _, _ in self.files],
            are_lines=[bool(lines) for _, lines, _ in self.files],
            firsts=cumulative([int(count) for _, _, count in self.files]),
            unit=self.unit,
            num_begin_marks=self.num_begin_marks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to tokenise; ``source`` is the fingerprint of the files."""

    files: Sequence[TextFile]
    field: str | None
    codec: Codec
    source: str


def cached(
    place: Path,
    job: Job,
    *,
    progress: Progress,
    owners: Owners | None = None,
    stale_seconds: float = STALE_SECONDS,
) -> Index:
    """Find the whole cache at ``place``, wait for it, or make it.

    Args:
        progress: called with the progress, also of another process; if it raises, no file is left.
        stale_seconds: an owner without progress for this long is taken for dead.

    Raises:
        DataError: the corpus cannot be read, or the cache cannot be written.
    """
    claim = CacheClaim(place.with_name(f".{place.name}.owner"), owners, stale_seconds=stale_seconds)
    while True:
        index = load(place, progress=progress)
        if index is not None:
            return index
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if not claim.take():
                _wait_for_owner(place, claim, progress)
                continue
            return _make(place, job, claim, progress)
        except Overtaken:
            continue
        except OSError as error:
            raise DataError(
                f"data.cache={place.parent}: the token cache cannot be written ({error}); "
                "give a directory that is writable and has room"
            ) from error


def load(place: Path, *, progress: Progress | None) -> Index | None:
    """Load the index of a whole cache; None if there is none or a digest disagrees.

    Args:
        progress: called while every byte is read; None: compare sizes only, where it is known that
            another process has verified it.
    """
    try:
        stored = json.loads((place / _INDEX).read_text())
        if digest(stored["index"]) != stored["digest"]:
            return None
        index = Index(**stored["index"])
        table = index.documents_at(place)
        sizes = [(place / name).stat().st_size for name in (_TOKENS, _DOCUMENTS)]
        if sizes != [index.tokens_at(place).num_bytes, table.num_bytes]:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if progress is None:
        return index
    expected = [(_TOKENS, index.tokens_sha256), (_DOCUMENTS, index.documents_sha256)]
    try:
        same = [_sha256(place / name, progress) == sha256 for name, sha256 in expected]
    except OSError:
        return None
    return index if all(same) else None


def _wait_for_owner(place: Path, claim: CacheClaim, progress: Progress) -> None:
    """Wait until the owner has ended, successfully or not."""
    while True:
        owner = claim.look()
        if owner is None:
            return
        if claim.is_dead(owner):
            token = claim.clear(owner)
            if token is not None:
                shutil.rmtree(_draft(place, token), ignore_errors=True)
            return
        host = f" on {owner.process['host']}" if owner.process else ""
        progress(f"waiting for the process that tokenises{host}", owner.done, owner.total)
        time.sleep(_LOOK_SECONDS)


def _draft(place: Path, token: str) -> Path:
    return place.with_name(f".{place.name}.{token}")


def _make(place: Path, job: Job, claim: CacheClaim, progress: Progress) -> Index:
    """Make the cache as its owner, publish it, read it back."""

    def beat(what: str, done: int, total: int) -> None:
        claim.beat(done, total)
        progress(what, done, total)

    # Not mkdtemp: its private mode would hide a shared cache from other users.
    draft = _draft(place, claim.token)
    try:
        index = load(place, progress=beat)  # another owner may have ended just before the claim
        if index is None:
            draft.mkdir(parents=True)
            _build(draft, job, beat)
            _publish(draft, place)
            index = load(place, progress=beat)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        claim.release()
    if index is None:
        raise DataError(
            f"data.cache={place.parent}: {place.name} does not read back as it was written; "
            "give a directory on storage that works"
        )
    return index


def _build(draft: Path, job: Job, progress: Progress) -> None:
    """Write the draft: the marker last, everything synced before it."""
    codec = job.codec
    dtype = "<u2" if codec.vocab_size <= 2**16 else "<u4"
    with (draft / _TOKENS).open("wb") as tokens, (draft / _DOCUMENTS).open("wb") as documents:
        writer = _Writer(tokens, documents, codec, dtype, num_files=len(job.files))
        reader = Reader(job.files, job.field)
        for batch in _batches(reader.pieces()):
            writer.add(batch)
            progress("tokenising", reader.done_bytes, reader.total_bytes)
        writer.finish()
    index = Index(
        dtype=dtype,
        vocab_size=codec.vocab_size,
        unit=codec.unit,
        num_begin_marks=int(codec.begin_token is not None),
        num_tokens=writer.num_tokens,
        num_documents=sum(writer.counts),
        source=job.source,
        tokens_sha256=writer.tokens_sha256,
        documents_sha256=writer.documents_sha256,
        files=[
            [file.name, file.is_lines, count]
            for file, count in zip(job.files, writer.counts, strict=True)
        ],
        words="; ".join(filter(None, (codec.notice, reader.notice))),
        num_bytes=reader.total_bytes,
    )
    stored = {"digest": digest(asdict(index)), "index": asdict(index)}
    with (draft / _INDEX).open("wb") as out:
        out.write(json.dumps(stored).encode())
        _sync(out)
    sync_directory(draft)


Batch = list[tuple[int, Piece]]


def _batches(pieces: Iterator[tuple[int, Piece]]) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for number, piece in pieces:
        batch.append((number, piece))
        size += len(piece.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Appends documents; ``counts`` has how many each file gave."""

    def __init__(
        self, tokens: BinaryIO, documents: BinaryIO, codec: Codec, dtype: str, *, num_files: int
    ) -> None:
        self.num_tokens = 0
        self.counts = [0] * num_files
        self._tokens = tokens
        self._documents = documents
        self._codec = codec
        self._dtype = dtype
        begin = [] if codec.begin_token is None else [codec.begin_token]
        self._begin = np.array(begin, dtype=dtype)
        self._end = np.array([codec.end_token], dtype=dtype)
        self._sha256 = hashlib.sha256()
        self._documents_sha256 = hashlib.sha256()
        self._every: list[npt.NDArray[np.int64]] = []
        self._unsynced = 0

    def add(self, batch: Batch) -> None:
        """Append pieces of documents, in order."""
        ids = self._codec.encode([piece.text for _, piece in batch])
        parts: list[npt.NDArray[Any]] = []
        starts: list[int] = []
        for (number, piece), piece_ids in zip(batch, ids, strict=True):
            if piece.begins:
                starts.append(self.num_tokens)
                self.counts[number] += 1
                parts.append(self._begin)
                self.num_tokens += self._begin.size
            parts.append(piece_ids.astype(self._dtype))
            self.num_tokens += piece_ids.size
            if piece.ends:
                parts.append(self._end)
                self.num_tokens += 1
        self._write(np.concatenate(parts).tobytes())
        self._write_starts(np.array(starts, dtype="<i8"))

    def _write(self, data: bytes) -> None:
        self._tokens.write(data)
        self._sha256.update(data)
        self._unsynced += len(data)
        if self._unsynced >= _SYNC_BYTES:
            self._unsynced = 0
            _sync(self._tokens)

    def _write_starts(self, starts: npt.NDArray[np.int64]) -> None:
        self._documents.write(starts.tobytes())
        self._documents_sha256.update(starts.tobytes())
        self._every.append(starts)

    def finish(self) -> None:
        """Append the table's summary, and make both files durable."""
        summary = DocumentTable.summary_of(self._every)
        self._write_starts(summary)
        _sync(self._documents)
        _sync(self._tokens)

    @property
    def tokens_sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def documents_sha256(self) -> str:
        return self._documents_sha256.hexdigest()


def _publish(draft: Path, place: Path) -> None:
    """Rename the draft to its final name; where another process was first, use its cache.

    A damaged cache is repaired file by file: the same corpus gives the same bytes, so two
    processes that repair at once, or a third that reads, never find a file missing.
    """
    try:
        os.rename(draft, place)
    except OSError:
        if not place.is_dir():
            raise
        if load(place, progress=lambda *_: None) is None:
            for name in (_TOKENS, _DOCUMENTS, _INDEX):
                os.replace(draft / name, place / name)
            sync_directory(place)
    sync_directory(place.parent)


def _sha256(path: Path, progress: Progress) -> str:
    hashed, done = hashlib.sha256(), 0
    total = path.stat().st_size
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK_BYTES):
            hashed.update(block)
            done += len(block)
            progress("verifying the tokens", done, total)
    return hashed.hexdigest()


def _sync(out: BinaryIO) -> None:
    out.flush()
    os.fsync(out.fileno())
