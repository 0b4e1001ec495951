"""The Dataset protocol: a corpus is numbered samples of a fixed length.

Owns the Dataset protocol and what file-backed corpora share: reading token files, cutting
a stream into windows, saying where a window comes from, and fingerprints. Must not know
file formats, the order in which samples are read, ranks, or the configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from runner.system.error import DataError
from runner.system.files import naming, open_regular
from runner.system.units import counted, first_few, format_bytes

Tokens = npt.NDArray[np.int64]
Segments = npt.NDArray[np.int32]

NOT_COUNTED: Final = -100  # torch's ignore_index: no loss, no gradient
WHOLE_CORPUS_BYTES: Final = 64 << 20
_HASH_BLOCK_BYTES: Final = 16 << 10
_NUM_BLOCKS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One window of the corpus.

    ``tokens`` is int64 [seq_len + 1]: inputs are all but the last, targets all but the
    first. ``segments`` is int32 [seq_len + 1], the number of the document within the
    window (0, 1, 2, ...), or None where boundaries are unknown or were not asked for.
    ``labels`` is int64 [seq_len + 1], the tokens themselves, or -100 (:data:`NOT_COUNTED`) for
    a token without a loss; None: all of them count.
    """

    tokens: Tokens
    segments: Segments | None
    labels: Tokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """A sample that is not a window of tokens: ``item`` comes from the user's own data set."""

    item: Any


class Dataset(Protocol):
    """Numbered samples. Reading one is free of side effects and the same every time.

    All are a :class:`Sample`, or all are a :class:`Record`: then it is a :class:`RecordDataset`.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every token is in ``[0, vocab_size)``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample | Record:
        """Sample ``index``, from 0.

        Raises:
            IndexError: there is no such sample.
            DataError: the file no longer holds what it held when it was opened.
        """

    def describe(self, index: int) -> str:
        """Where the sample comes from, for a person to look up; ranges are half open."""

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the contents and the windowing, not of where the files lie."""


@runtime_checkable
class RecordDataset(Dataset, Protocol):
    """Samples for a model of the user's own.

    ``example`` fills a place of a micro-batch that has no sample.
    """

    @property
    def example(self) -> Record: ...

    def collate(self, records: Sequence[Record]) -> dict[str, Any]:
        """Tensors by name, each with len(records) as its first dimension.

        Raises:
            DataError: the records do not fit together.
        """


def describe(dataset: Dataset, index: int) -> str:
    """The data set's name for a sample, which it may have to read for that. Never raises."""
    try:
        return dataset.describe(index)
    except Exception:
        return f"sample {index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """``num_tokens`` token ids in one file, from byte ``offset_bytes``.

    Holds no handle and no map: it can be sent to a loader process, thousands of files
    exhaust no limit, and a file cut short while training is an error with a name, where
    a map would end the process with SIGBUS.
    """

    path: Path
    dtype: str
    num_tokens: int
    offset_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * np.dtype(self.dtype).itemsize

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens ``[start, stop)`` in the file's own dtype.

        Raises:
            DataError: the file is shorter than it was when it was opened.
            OSError: the storage failed; starting again may help.
        """
        dtype = np.dtype(self.dtype)
        offset = self.offset_bytes + start * dtype.itemsize
        # Not np.fromfile: an error of the storage looks like the file's end there.
        with naming(self.path), self.path.open("rb", buffering=0) as file:
            data = _read_at(file.fileno(), (stop - start) * dtype.itemsize, offset)
        tokens = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
        if tokens.size != stop - start:
            raise DataError(
                f"{self.path}: tokens {start}-{stop} end early, after {tokens.size}; the file "
                f"held {self.num_tokens} tokens when it was opened. Restore it and start again"
            )
        return tokens


def _read_at(descriptor: int, num_bytes: int, offset: int) -> bytes:
    """Up to ``num_bytes``; fewer only where the file ends."""
    parts = []
    while num_bytes and (part := os.pread(descriptor, num_bytes, offset)):
        parts.append(part)
        num_bytes -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class TokenStream:
    """Token files read as one stream, in the given order."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._files = tuple(files)
        self.starts = cumulative([file.num_tokens for file in files])

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens ``[start, stop)`` of the stream, int64."""
        parts = [
            self._files[number].read(low, high).astype(np.int64)
            for number, low, high in overlaps(self.starts, start, stop)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


# Names a stretch of a stream, such as "json/decoder.py bytes 1200-1457", half open.
NameStretch = Callable[[int, int], str]


def name_in_files(
    names: Sequence[str], starts: npt.NDArray[np.int64], unit: str, start: int, stop: int
) -> str:
    """Name a stretch of files that lie one after another, as "a.bin tokens 1200-1457".

    ``starts`` is int64 [len(names) + 1], the last being the stream's length.
    """
    return first_few(
        list(overlaps(starts, start, stop)),
        name=lambda piece: f"{names[piece[0]]} {unit} {piece[1]}-{piece[2]}",
        what=" files",
    )


def contents_of(files: int, num_bytes: int) -> str:
    """How much there is, as "396 files, 1.7 MB"."""
    size = f", {format_bytes(num_bytes)}" if num_bytes else ""
    return f"{counted(files, 'file')}{size}"


class Windows:
    """A Dataset: sample ``i`` is tokens ``[i * seq_len, i * seq_len + seq_len + 1)``.

    Neighbours share one token, the last target of the one being the first input of the
    next. Of a table each row is a sample instead, padded to ``seq_len + 1`` tokens.
    Documents are separated where they start or after each ``end_token``; with neither,
    ``segments`` is None.

    Args:
        name: for messages.
        starts_between: stream offsets of documents in ``[low, high)``, sorted.
        width: tokens in a row of a table.

    Attributes:
        contents: see :func:`contents_of`.
        sampled_files: (name, path) of files of which ``source`` covers samples only; see
            :func:`sampled_files`.

    Raises:
        DataError: the stream is too short for one sample.
    """

    contents = ""
    sampled_files: Sequence[tuple[str, Path]] = ()

    def __init__(
        self,
        *,
        stream: TokenStream,
        name: NameStretch,
        seq_len: int,
        vocab_size: int,
        source: str,
        starts_between: Callable[[int, int], npt.NDArray[np.int64]] | None = None,
        end_token: int | None = None,
        width: int | None = None,
    ) -> None:
        if stream.num_tokens < (width or seq_len + 1):
            raise DataError(
                f"data.seq_len={seq_len} needs {width or seq_len + 1} tokens for one sample, the "
                f"corpus has {stream.num_tokens}; lower data.seq_len or give more data in data.path"
            )
        self.vocab_size = vocab_size
        self._stream = stream
        self._name = name
        self._seq_len = seq_len
        self._source = source
        self._starts_between = starts_between
        self._end_token = end_token
        self._width = width

    def __len__(self) -> int:
        if self._width is not None:
            return self._stream.num_tokens // self._width
        return (self._stream.num_tokens - 1) // self._seq_len

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._span(index)
        tokens = self._stream.read(start, stop)
        require_ids(tokens, self.vocab_size, lambda: self._name(start, stop))
        sample = Sample(tokens=tokens, segments=self._segments(start, tokens))
        return padded(sample, self._seq_len)

    def describe(self, index: int) -> str:
        return self._name(*self._span(index))

    def fingerprint(self) -> str:
        parts = [self._source, self.vocab_size, self._seq_len]
        if self._width is not None:
            return digest([*parts, "rows", self._width])
        return digest([*parts, self._starts_between is not None, self._end_token])

    def _span(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in 0..{len(self) - 1}")
        start = int(index) * (self._width or self._seq_len)
        return start, start + (self._width or self._seq_len + 1)

    def _segments(self, start: int, tokens: Tokens) -> Segments | None:
        if self._starts_between is None and self._end_token is None:
            return None
        begins = np.zeros(tokens.size, dtype=np.bool_)
        if self._end_token is not None:
            begins[1:] = tokens[:-1] == self._end_token
        if self._starts_between is not None:
            inside = self._starts_between(start + 1, start + tokens.size)
            begins[inside - start] = True
        return np.cumsum(begins, dtype=np.int32)


def padded(sample: Sample, seq_len: int) -> Sample:
    """Pad to ``seq_len + 1`` tokens; the padding comes last and does not count."""
    missing = seq_len + 1 - sample.tokens.size
    if not missing:
        return sample
    labels = sample.tokens if sample.labels is None else sample.labels
    segments = sample.segments
    if segments is not None:
        segments = np.pad(segments, (0, missing), constant_values=int(segments[-1]) + 1)
    return Sample(
        tokens=np.pad(sample.tokens, (0, missing)),
        labels=np.pad(labels, (0, missing), constant_values=NOT_COUNTED),
        segments=segments,
    )


def first_outside(tokens: npt.NDArray[Any], vocab_size: int) -> int | None:
    """The first id outside ``[0, vocab_size)``: on a GPU it would be a bare assertion."""
    if not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return None
    return int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])


def require_ids(
    tokens: npt.NDArray[Any],
    vocab_size: int,
    place: str | Callable[[], str],
    first: int | None = None,
) -> None:
    """
    Args:
        place: where the tokens are, for the message.
        first: the number of the first one in the file; None: counted in ``place``.

    Raises:
        DataError: an id is outside ``[0, vocab_size)``.
    """
    bad = first_outside(tokens, vocab_size)
    if bad is None:
        return
    where = place if isinstance(place, str) else place()
    where += f", token {bad} of it" if first is None else f": token {first + bad}"
    raise DataError(
        f"{where} has id {int(tokens[bad])}, allowed are 0..{vocab_size - 1} "
        f"(data.vocab_size={vocab_size}); raise data.vocab_size or repair the file"
    )


def file_size(path: Path) -> int:
    """Size in bytes of a file that can be read.

    Raises:
        DataError: it is missing, not a file, or not readable.
    """
    try:
        with open_regular(path, follow=True) as handle:
            return handle.seek(0, 2)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DataError:
    reason = error.strerror or str(error)
    return DataError(f"{path}: cannot be read ({reason}); data.path must name readable files")


def fingerprint_files(
    files: Sequence[tuple[str, Path]], *, whole_bytes: int = WHOLE_CORPUS_BYTES
) -> str:
    """SHA-256 (hex) of names, sizes and contents, in the order given.

    Corpora over ``whole_bytes`` are hashed in full only in files of up to 1 MiB, and in
    blocks spread over the larger ones, head and tail among them: an edit in place between
    the blocks goes unseen, a change of length does not.

    Raises:
        DataError: a file cannot be read.
    """
    sizes = [file_size(path) for _, path in files]
    whole = sum(sizes) <= whole_bytes
    hashed = hashlib.sha256()
    for (name, path), size in zip(files, sizes, strict=True):
        hashed.update(json.dumps([name, size]).encode())
        try:
            with path.open("rb") as handle:
                for start, stop in spread(size, block=_HASH_BLOCK_BYTES, whole=whole):
                    handle.seek(start)
                    hashed.update(handle.read(stop - start))
        except OSError as error:
            raise unreadable(path, error) from error
    return hashed.hexdigest()


def is_sampled(num_bytes: int) -> bool:
    """Whether a corpus is so large that :func:`fingerprint_files` samples its bytes."""
    return num_bytes > WHOLE_CORPUS_BYTES


def sampled_files(dataset: Dataset) -> list[tuple[str, Path]]:
    """(name, path) of the files of which the dataset's fingerprint covers samples only.

    A change in place between the samples is seen by :func:`runner.data.corpus_digest.whole_digest`.
    """
    return list(getattr(dataset, "sampled_files", ()))


def digest(value: Any) -> str:
    """SHA-256 (hex) of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def spread(total: int, *, block: int, whole: bool) -> list[tuple[int, int]]:
    """Half-open ranges in ``[0, total)``: all of it, or 64 blocks from head to tail."""
    if whole or total <= _NUM_BLOCKS * block:
        return [(start, min(start + block, total)) for start in range(0, total, block)]
    last = total - block
    starts = [last * number // (_NUM_BLOCKS - 1) for number in range(_NUM_BLOCKS)]
    return [(start, start + block) for start in starts]


def cumulative(lengths: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Starts of consecutive stretches, and their end: int64 [len(lengths) + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    return starts


def overlaps(
    starts: npt.NDArray[np.int64], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """(number, low, high) of each stretch that ``[start, stop)`` overlaps, relative to it."""
    first = int(np.searchsorted(starts, start, side="right")) - 1
    beyond = int(np.searchsorted(starts, stop, side="left"))
    for number in range(first, beyond):
        low, high = int(starts[number]), int(starts[number + 1])
        if high > low:
            yield number, max(start, low) - low, min(stop, high) - low
