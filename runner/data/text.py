"""Text files as a corpus: tokenised once, by one process at a time, and read from a cache.

    CACHE/KEY/tokens.bin       the ids
    CACHE/KEY/documents.bin    where each document begins
    CACHE/KEY/index.json       what they are, with their digests; written last
    CACHE/.KEY.owner           locked by the process that is making it; holds its progress
    CACHE/.KEY.TOKEN@HOST      that process's draft

Two parts, for two kinds of processes: :func:`prepare_text` may take hours and is for one process
of a node; :func:`open_prepared` is for all. Must not know ranks.

Must not trust a cache: it outlives crashes, so an entry counts only when its digests agree, and
a damaged one is rebuilt. The lock saves work, and correctness does not depend on it: results are
published by a rename, so two processes that make the same entry only waste time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from runner.config.schema import DataConfig
from runner.data.corpus_digest import Progress, hash_file, notes_in, of_all, whole_digest
from runner.data.dataset import (
    Dataset,
    TokenFile,
    TokenStream,
    Windows,
    contents_of,
    cumulative,
    digest,
    fingerprint_files,
    is_sampled,
    overlaps,
)
from runner.data.documents import Piece, Reader, TextFile, find_files
from runner.data.tokenizer import Codec, open_codec
from runner.system.error import DataError
from runner.system.files import sync_directory
from runner.system.units import first_few

_FORMAT: Final = "holdfast-text-2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A verified cache, and notes for a person on how it was made."""

    place: Path
    notice: str


def prepare_text(data: DataConfig, cache: Path, *, progress: Progress) -> Prepared:
    """Put the tokens into the cache: find them, wait for the process that makes them, or make them.

    Args:
        cache: directory of token caches; one is added under the corpus' fingerprint.
        progress: called with the progress; if it raises, no file is left.

    Raises:
        DataError: a path cannot be read, nothing matches, the corpus is empty, a JSON line holds
            no document, the tokenizer is not valid or does not say what ends a document, or
            the cache cannot be written.
    """
    files = find_files(data.path, data.suffixes, data.field)
    codec = open_codec(data.tokenizer, begin_token=data.begin_token, end_token=data.end_token)
    named = [(file.name, file.path) for file in files]
    fingerprint = fingerprint_files(named)
    identity: list[str | None] = [_FORMAT, fingerprint, codec.identity]
    if any(file.is_lines for file in files):
        identity.append(data.field)
    if any(file.compression and not file.is_lines for file in files):
        identity.append("decompressed")  # earlier releases took the compressed bytes for text
    if is_sampled(sum(file.num_bytes for file in files)):
        identity.append(whole_digest(named, notes=notes_in(cache), progress=progress).sha256)
    place = cache / digest(identity)
    job = TokenizingJob(files=files, field=data.field, codec=codec, source=fingerprint)
    index = cached(place, job, progress=progress)
    return Prepared(place=place, notice=index.words)


def open_prepared(place: Path, data: DataConfig) -> Dataset:
    """Open a cache that :func:`prepare_text` of this or another process has verified.

    Raises:
        DataError: it is gone or damaged, or too short for one sample.
    """
    index = load(place, progress=None)
    if index is None:
        raise DataError(
            f"data.cache={place.parent}: {place.name} cannot be read by this process, and was "
            "whole a moment ago; give a directory that all processes of the node see"
        )
    table = index.documents_at(place)
    places = TextPlaces(
        documents=table,
        names=[str(name) for name, _, _ in index.files],
        are_lines=[bool(lines) for _, lines, _ in index.files],
        firsts=cumulative([int(count) for _, _, count in index.files]),
        unit=index.unit,
        num_begin_marks=index.num_begin_marks,
    )
    windows = Windows(
        stream=TokenStream([index.tokens_at(place)]),
        name=places.name,
        seq_len=data.seq_len,
        vocab_size=min(index.vocab_size, data.vocab_size or index.vocab_size),
        source=digest([index.source, index.tokens_sha256]),
        starts_between=table.between if data.isolate_documents else None,
    )
    windows.contents = contents_of(len(index.files), index.num_bytes)
    return windows


# ---- the cache of tokens


_TOKENS: Final = "tokens.bin"
_DOCUMENTS: Final = "documents.bin"
_INDEX: Final = "index.json"
_LOOK_SECONDS: Final = 0.2
_BEAT_SECONDS: Final = 1.0
# A lock of a node that died may stay on a network file system.
_STALE_SECONDS: Final = 120.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizingJob:
    """What to tokenise; ``source`` is the fingerprint of the files."""

    files: Sequence[TextFile]
    field: str | None
    codec: Codec
    source: str


def cached(
    place: Path, job: TokenizingJob, *, progress: Progress, stale_seconds: float = _STALE_SECONDS
) -> Index:
    """Find the whole cache at ``place``, wait for it, or make it.

    Args:
        progress: called with the progress, also of another process; if it raises, no file is left.
        stale_seconds: an owner without progress for this long is taken for dead.

    Raises:
        DataError: the corpus cannot be read, or the cache cannot be written.
    """
    index = load(place, progress=progress)
    if index is not None:
        return index
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(place, progress, stale_seconds) as beat:
            return load(place, progress=beat) or _make(place, job, beat)
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
        for (name, sha256), size in zip(expected, sizes, strict=True):
            report = partial(of_all, progress, 0, size)
            if hash_file(place / name, "verifying the tokens", report)[0] != sha256:
                return None
    except OSError:
        return None
    return index


@contextlib.contextmanager
def _claimed(place: Path, progress: Progress, stale_seconds: float) -> Iterator[Progress]:
    """Wait until no other process makes the entry; gives what to call with one's own progress."""
    path = place.with_name(f".{place.name}.owner")
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            is_locked = _wait_for_lock(file, progress, stale_seconds)
            if is_locked and not _is_at(path, file):
                continue  # the owner before removed it, and another may have locked a new one
            if is_locked:
                _sweep(place)
            try:
                yield _beating(file, progress)
            finally:
                if _is_at(path, file):
                    path.unlink(missing_ok=True)
            return


def _wait_for_lock(file: BinaryIO, progress: Progress, stale_seconds: float) -> bool | None:
    """As :func:`_lock`; False: the owner made no progress for ``stale_seconds``."""
    seen, moved = b"", time.monotonic()
    while (is_locked := _lock(file)) is False:
        held = os.pread(file.fileno(), 64, 0)
        if held != seen:
            seen, moved = held, time.monotonic()
        elif time.monotonic() > moved + stale_seconds:
            break
        numbers = [int(word) for word in held.split() if word.isdigit()]
        done, total = numbers if len(numbers) == 2 else (0, 0)
        progress("waiting for the process that tokenises", done, total)
        time.sleep(_LOOK_SECONDS)
    return is_locked


def _beating(file: BinaryIO, progress: Progress) -> Progress:
    """``progress``, which also writes what is done into the owner's file."""
    beaten = 0.0

    def beat(what: str, done: int, total: int) -> None:
        nonlocal beaten
        if time.monotonic() > beaten + _BEAT_SECONDS:
            beaten = time.monotonic()
            os.pwrite(file.fileno(), f"{done:20} {total:20}".encode(), 0)
        progress(what, done, total)

    return beat


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _sweep(place: Path) -> None:
    """Remove the drafts of processes of this node that were killed.

    Who passed a silent owner over works without the owner's lock, so each maker locks its tokens.
    """
    for draft in place.parent.glob(f".{place.name}.*@{platform.node()}"):
        try:
            with (draft / _TOKENS).open("r+b") as tokens:
                is_abandoned = _lock(tokens) is True
        except FileNotFoundError:
            is_abandoned = True
        except OSError:  # such as another user's
            is_abandoned = False
        if is_abandoned:
            shutil.rmtree(draft, ignore_errors=True)


def _lock(file: BinaryIO) -> bool | None:
    """Take the lock; False: another process has it, None: the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _make(place: Path, job: TokenizingJob, progress: Progress) -> Index:
    """Make the cache, publish it, read it back."""
    # Not mkdtemp: its private mode would hide a shared cache from other users.
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}@{platform.node()}")
    try:
        draft.mkdir(parents=True)
        _build(draft, job, progress)
        _publish(draft, place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    index = load(place, progress=progress)
    if index is None:
        raise DataError(
            f"data.cache={place.parent}: {place.name} does not read back as it was written; "
            "give a directory on storage that works"
        )
    return index


def _build(draft: Path, job: TokenizingJob, progress: Progress) -> None:
    """Write the draft: the marker last, everything synced before it."""
    codec = job.codec
    dtype = "<u2" if codec.vocab_size <= 2**16 else "<u4"
    begin = np.array([] if codec.begin_token is None else [codec.begin_token], dtype=dtype)
    end = np.array([codec.end_token], dtype=dtype)
    reader = Reader(job.files, job.field)
    counts = [0] * len(job.files)
    num_tokens = 0
    every: list[npt.NDArray[np.int64]] = []
    with _Written(draft / _TOKENS) as tokens, _Written(draft / _DOCUMENTS) as documents:
        _lock(tokens.file)  # this draft is alive: see _sweep
        for batch in _batches(reader.pieces()):
            starts: list[int] = []
            encoded = codec.encode([piece.text for _, piece in batch])
            for (number, piece), ids in zip(batch, encoded, strict=True):
                if piece.begins:
                    starts.append(num_tokens)
                    counts[number] += 1
                    num_tokens += tokens.append(begin)
                num_tokens += tokens.append(ids.astype(dtype))
                if piece.ends:
                    num_tokens += tokens.append(end)
            every.append(np.array(starts, dtype="<i8"))
            documents.append(every[-1])
            progress("tokenising", reader.done_bytes, reader.total_bytes)
        documents.append(DocumentTable.summary_of(every))
    index = Index(
        dtype=dtype,
        vocab_size=codec.vocab_size,
        unit=codec.unit,
        num_begin_marks=int(codec.begin_token is not None),
        num_tokens=num_tokens,
        num_documents=sum(counts),
        source=job.source,
        tokens_sha256=tokens.sha256.hexdigest(),
        documents_sha256=documents.sha256.hexdigest(),
        files=[
            [file.name, file.is_lines, count] for file, count in zip(job.files, counts, strict=True)
        ],
        words="; ".join(filter(None, (codec.notice, reader.notice))),
        num_bytes=reader.total_bytes,
    )
    stored = {"digest": digest(asdict(index)), "index": asdict(index)}
    with _Written(draft / _INDEX) as out:
        out.write(json.dumps(stored).encode())
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


class _Written:
    """A file with the digest of what is appended; durable at the end."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self.sha256 = hashlib.sha256()
        self._unsynced = 0

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.file:
            if kind is None:
                self._sync()

    def append(self, items: npt.NDArray[Any]) -> int:
        """Returns their number."""
        self.write(items.tobytes())
        return items.size

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self._unsynced += len(data)
        if self._unsynced >= _SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        self._unsynced = 0
        self.file.flush()
        os.fsync(self.file.fileno())


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


# A corpus may have more documents than fit into memory: their starts stay in a file, and only
# every thousandth is held.
Starts = npt.NDArray[np.int64]

_STRIDE: Final = 1024
_ITEM_BYTES: Final = 8


class DocumentTable:
    """Starts of documents in a stream of ``num_tokens``, little-endian int64 in one file.

    A summary follows the starts: every thousandth of them, to find a place quickly.
    Holds no handle, like a TokenFile.
    """

    def __init__(self, *, path: Path, num_documents: int, num_tokens: int) -> None:
        self.num_documents = num_documents
        self._path = path
        self._num_tokens = num_tokens

    @property
    def num_bytes(self) -> int:
        return _ITEM_BYTES * (self.num_documents + self._num_summary)

    @staticmethod
    def summary_of(parts: Sequence[Starts]) -> Starts:
        """The summary of all starts, in order."""
        chunks: list[Starts] = []
        before = 0
        for part in parts:
            chunks.append(part[-before % _STRIDE :: _STRIDE])
            before += part.size
        return np.concatenate(chunks) if chunks else np.zeros(0, dtype="<i8")

    def between(self, low: int, high: int) -> Starts:
        """Starts in ``[low, high)``."""
        return self.read(self._number_behind(low), self._number_behind(high))

    def at(self, position: int) -> int:
        """The number of the document that the token at ``position`` belongs to."""
        return self._number_behind(position + 1) - 1

    def read(self, first: int, last: int) -> Starts:
        """Starts of documents ``[first, last)``; the summary follows them.

        Raises:
            DataError: the file is shorter than it was.
            OSError: the storage failed; starting again may help.
        """
        file = TokenFile(path=self._path, dtype="<i8", num_tokens=self.num_bytes // _ITEM_BYTES)
        return file.read(first, last)

    def span(self, number: int) -> tuple[int, int]:
        """A document's start and end: the start of the next."""
        starts = self.read(number, min(number + 2, self.num_documents)).tolist()
        begin, end = [*starts, self._num_tokens][:2]
        return begin, end

    @property
    def _num_summary(self) -> int:
        return -(-self.num_documents // _STRIDE)

    @cached_property
    def _summary(self) -> Starts:
        return self.read(self.num_documents, self.num_documents + self._num_summary)

    def _number_behind(self, position: int) -> int:
        """The number of the first document that begins at ``position`` or later."""
        block = max(int(np.searchsorted(self._summary, position, side="left")) - 1, 0)
        first = block * _STRIDE
        starts = self.read(first, min(first + _STRIDE, self.num_documents))
        return first + int(np.searchsorted(starts, position, side="left"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextPlaces:
    """Names for stretches of a text corpus.

    Args:
        names: of the files.
        are_lines: whether a file's documents are its lines.
        firsts: int64 [files + 1], the number of each file's first document.
        unit: what a token is.
        num_begin_marks: tokens before each document that are not in the file; after
            it there is one.
    """

    documents: DocumentTable
    names: Sequence[str]
    are_lines: Sequence[bool]
    firsts: Starts
    unit: str
    num_begin_marks: int

    def name(self, start: int, stop: int) -> str:
        """Name a stretch: "json/decoder.py bytes 1200-1457", or "a.jsonl line 7 tokens 0-9"."""
        first, last = self.documents.at(start), self.documents.at(stop - 1)
        return first_few(
            list(overlaps(self.firsts, first, last + 1)),
            name=lambda piece: self._name(piece[0], piece[1], piece[2], start, stop),
            what=" files",
        )

    def _name(self, file: int, from_: int, to: int, start: int, stop: int) -> str:
        begins = int(self.firsts[file])
        first, last = begins + from_, begins + to - 1
        low, _ = self._within(first, start, stop)
        _, high = self._within(last, start, stop)
        name = self.names[file]
        if not self.are_lines[file]:
            return f"{name} {self.unit} {low}-{high}"
        word, begin = ("line", 1) if ".jsonl" in name[-len(".jsonl.bz2") :] else ("row", 0)
        if first == last:
            return f"{name} {word} {from_ + begin} {self.unit} {low}-{high}"
        return (
            f"{name} {word}s {from_ + begin}-{to - 1 + begin} (from {self.unit} {low} of the first "
            f"to {high} of the last)"
        )

    def _within(self, document: int, start: int, stop: int) -> tuple[int, int]:
        """The part of a document that ``[start, stop)`` covers, counted without marks."""
        begin, end = self.documents.span(document)
        begin += self.num_begin_marks
        length = end - 1 - begin
        low, high = max(start - begin, 0), max(min(stop - begin, length), 0)
        return min(low, length), high
