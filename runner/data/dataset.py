"""What a corpus looks like to the rest of the runner: numbered samples of a fixed length.

Owns the Dataset protocol and what file-backed corpora share: reading token files, cutting
a stream into windows, saying where a window comes from, and fingerprints. Must not know
file formats, the order in which samples are read, ranks, or the configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from runner.error import DataError
from runner.files import open_regular

Tokens = npt.NDArray[np.int64]
Segments = npt.NDArray[np.int32]

WHOLE_CORPUS_BYTES: Final = 64 << 20
_HASH_BLOCK_BYTES: Final = 16 << 10
_NUM_BLOCKS: Final = 64
_NAMED_PIECES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One window of the corpus.

    ``tokens`` is int64 [seq_len + 1]: inputs are all but the last, targets all but the
    first. ``segments`` is int32 [seq_len + 1], the number of the document within the
    window (0, 1, 2, ...), or None where boundaries are unknown or were not asked for.
    """

    tokens: Tokens
    segments: Segments | None


class Dataset(Protocol):
    """Numbered samples. Reading one is free of side effects and the same every time."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; every token is in ``[0, vocab_size)``."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``, from 0.

        Raises:
            IndexError: there is no such sample.
            DataError: the file no longer holds what it held when it was opened.
        """

    def describe(self, index: int) -> str:
        """Where the sample comes from, for a person to look up; ranges are half open."""

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the contents and the windowing, not of where the files lie."""


class MapStyle(Protocol):
    """The least a user's own dataset must have."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


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
        found = np.fromfile(self.path, dtype=dtype, count=stop - start, offset=offset)
        if found.size != stop - start:
            raise DataError(
                f"{self.path}: tokens {start}-{stop} end early, after {found.size}; the file "
                f"held {self.num_tokens} tokens when it was opened. Restore it and start again"
            )
        return found


class TokenStream:
    """Token files read as one, in the order given."""

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
            for number, low, high in _overlaps(self.starts, start, stop)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Names for stretches of a stream.

    ``starts`` is int64 [len(names) + 1], the last being the stream's length. ``marks`` is
    how many tokens at the end of each stretch stand for nothing in the file.
    """

    names: Sequence[str]
    starts: npt.NDArray[np.int64]
    unit: str
    marks: int = 0

    def describe(self, start: int, stop: int) -> str:
        """Such as "json/decoder.py bytes 1200-1457", half open."""
        found = list(_overlaps(self.starts, start, stop))
        named = [self._piece(*piece) for piece in found[:_NAMED_PIECES]]
        rest = len(found) - len(named)
        return ", ".join(named) + (f" and {rest} more files" if rest else "")

    def _piece(self, number: int, low: int, high: int) -> str:
        limit = int(self.starts[number + 1] - self.starts[number]) - self.marks
        return f"{self.names[number]} {self.unit} {min(low, limit)}-{min(high, limit)}"


class Windows:
    """A Dataset: sample ``i`` is tokens ``[i * seq_len, i * seq_len + seq_len + 1)``.

    Neighbours share one token, the last target of the one being the first input of the
    next. Documents are told apart where ``document_starts`` (int64, sorted, stream
    offsets) say so or after each ``end_token``; with neither, ``segments`` is None.

    Raises:
        DataError: the stream is too short for one sample.
    """

    def __init__(
        self,
        *,
        stream: TokenStream,
        places: Places,
        seq_len: int,
        vocab_size: int,
        source: str,
        document_starts: npt.NDArray[np.int64] | None = None,
        end_token: int | None = None,
    ) -> None:
        _check_length(stream.num_tokens, seq_len)
        self.vocab_size = vocab_size
        self._stream = stream
        self._places = places
        self._seq_len = seq_len
        self._source = source
        self._document_starts = document_starts
        self._end_token = end_token

    def __len__(self) -> int:
        return (self._stream.num_tokens - 1) // self._seq_len

    def __getitem__(self, index: int) -> Sample:
        start, stop = self._span(index)
        tokens = self._stream.read(start, stop)
        bad = first_outside(tokens, self.vocab_size)
        if bad is not None:
            place = f"{self._places.describe(start, stop)}, token {bad} of it"
            raise outside(place, int(tokens[bad]), self.vocab_size)
        return Sample(tokens=tokens, segments=self._segments(start, tokens))

    def describe(self, index: int) -> str:
        return self._places.describe(*self._span(index))

    def fingerprint(self) -> str:
        isolated = self._document_starts is not None
        return digest([self._source, self.vocab_size, self._seq_len, isolated, self._end_token])

    def _span(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in 0..{len(self) - 1}")
        start = int(index) * self._seq_len
        return start, start + self._seq_len + 1

    def _segments(self, start: int, tokens: Tokens) -> Segments | None:
        if self._document_starts is None and self._end_token is None:
            return None
        begins = np.zeros(tokens.size, dtype=np.bool_)
        if self._end_token is not None:
            begins[1:] = tokens[:-1] == self._end_token
        if self._document_starts is not None:
            window = (start + 1, start + tokens.size)
            low, high = np.searchsorted(self._document_starts, window, side="left")
            begins[self._document_starts[low:high] - start] = True
        return np.cumsum(begins, dtype=np.int32)


class Adapted:
    """A Dataset around a user's own map-style object. Build it with :func:`adapt`."""

    def __init__(self, dataset: MapStyle, *, vocab_size: int, seq_len: int, name: str) -> None:
        self.vocab_size = vocab_size
        self._dataset = dataset
        self._seq_len = seq_len
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in 0..{len(self) - 1}")
        sample = _as_sample(self._dataset[int(index)])
        if sample.tokens.shape != (self._seq_len + 1,):
            raise DataError(
                f"{self.describe(index)}: tokens have shape {list(sample.tokens.shape)}, "
                f"data.seq_len={self._seq_len} needs [{self._seq_len + 1}]; mend the dataset"
            )
        bad = first_outside(sample.tokens, self.vocab_size)
        if bad is not None:
            place = f"{self.describe(index)}, token {bad} of it"
            raise outside(place, int(sample.tokens[bad]), self.vocab_size)
        return sample

    def describe(self, index: int) -> str:
        own = getattr(self._dataset, "describe", None)
        return str(own(index)) if own else f"{self._name} sample {index}"

    def fingerprint(self) -> str:
        own = getattr(self._dataset, "fingerprint", None)
        contents = str(own()) if own else self._sampled()
        return digest([contents, self.vocab_size, self._seq_len])

    def _sampled(self) -> str:
        hashed = hashlib.sha256(json.dumps([self._name, len(self)]).encode())
        for start, _ in spread(len(self), block=1, whole=False):
            hashed.update(self[start].tokens.astype("<i8").tobytes())
        return hashed.hexdigest()


def adapt(dataset: MapStyle, *, vocab_size: int, seq_len: int, name: str = "dataset") -> Dataset:
    """Make a Dataset of any object with ``__len__`` and ``__getitem__``.

    Items are a :class:`Sample`, ``seq_len + 1`` token ids as a sequence, array or CPU
    tensor, or a mapping that has them under ``input_ids``. The object's own ``describe``
    and ``fingerprint`` are used where it has them; the default fingerprint covers the
    length and up to 64 samples, first and last among them.

    Raises:
        DataError: the object is empty; and on reading, an item of another shape or with
            an id outside ``[0, vocab_size)``.
    """
    if len(dataset) < 1:
        raise DataError(f"{name} has {len(dataset)} samples; training needs at least 1")
    return Adapted(dataset, vocab_size=vocab_size, seq_len=seq_len, name=name)


def first_outside(tokens: npt.NDArray[Any], vocab_size: int) -> int | None:
    """Where the first id outside ``[0, vocab_size)`` stands: on a GPU it is a bare assertion."""
    if not tokens.size or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return None
    return int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])


def outside(place: str, token: int, vocab_size: int) -> DataError:
    return DataError(
        f"{place} has id {token}, allowed are 0..{vocab_size - 1} "
        f"(data.vocab_size={vocab_size}); raise data.vocab_size or mend the file"
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
        _hash_blocks(hashed, path, spread(size, block=_HASH_BLOCK_BYTES, whole=whole))
    return hashed.hexdigest()


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
    """Starts of consecutive stretches, and their total: int64 [len(lengths) + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=starts[1:])
    return starts


def _overlaps(
    starts: npt.NDArray[np.int64], start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """(number, low, high) of each stretch that ``[start, stop)`` meets, relative to it."""
    first = int(np.searchsorted(starts, start, side="right")) - 1
    beyond = int(np.searchsorted(starts, stop, side="left"))
    for number in range(first, beyond):
        low, high = int(starts[number]), int(starts[number + 1])
        if high > low:
            yield number, max(start, low) - low, min(stop, high) - low


def _hash_blocks(hashed: Any, path: Path, blocks: Sequence[tuple[int, int]]) -> None:
    try:
        with path.open("rb") as handle:
            for start, stop in blocks:
                handle.seek(start)
                hashed.update(handle.read(stop - start))
    except OSError as error:
        raise unreadable(path, error) from error


def _check_length(num_tokens: int, seq_len: int) -> None:
    if seq_len < 1:
        raise DataError(f"data.seq_len={seq_len} is too small: at least 1 is needed")
    if num_tokens < seq_len + 1:
        raise DataError(
            f"data.seq_len={seq_len} needs {seq_len + 1} tokens for one sample, the corpus has "
            f"{num_tokens}; lower data.seq_len or give more data in data.path"
        )


def _as_sample(item: Any) -> Sample:
    if isinstance(item, Sample):
        return item
    ids = item["input_ids"] if isinstance(item, Mapping) else item
    return Sample(tokens=np.asarray(ids, dtype=np.int64), segments=None)
