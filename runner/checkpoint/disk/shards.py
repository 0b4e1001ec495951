"""Writing one rank's shards, verifying files, reading any range back.

Knows a shard as (name, shape, flat start, 1-D tensor); nothing of engines. A rank has two files;
:mod:`.directory` has the folder.

    rank-00000.bin   the bytes: pieces of tensors, one after another
    rank-00000.idx   which elements of which tensors they are

Index, little endian: a header (``HFINDEX1``, number of pieces, bytes and SHA-256 of the first
file), then columns: tensor number (u32), flat start (u64), count (u64). A tensor's number is its
place among the sorted names of the manifest. Where a piece begins follows from the counts and the
sizes of elements, which the manifest has. The manifest has the digest of each index, and says which
file holds a piece (:mod:`runner.checkpoint.manifest`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from runner.checkpoint.disk.directory import Entry, unreadable
from runner.checkpoint.elements import as_bytes, dtype_of, from_bytes, is_finite
from runner.checkpoint.manifest import (
    FLOAT32,
    ITEM_BYTES,
    ITEM_SIZES,
    FileFacts,
    Manifest,
    Numbers,
    PieceRun,
    compress,
    data_name,
    index_name,
    is_index,
    rank_of,
)
from runner.system.error import CorruptCheckpoint
from runner.system.files import naming, open_regular, read_bounded, write_durably

_MAGIC = b"HFINDEX1"
_HEADER = struct.Struct("<8sQQ32s")
_PIECE_BYTES = 4 + 8 + 8
MOST_INDEX_BYTES = 1 << 28
_READERS = 8  # readers of small files: a shared disk answers slowly, but several at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """What one rank's file holds, in the order of its bytes."""

    facts: FileFacts
    tensor: Numbers
    start: Numbers
    count: Numbers
    num_bytes: Numbers

    def places(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(tensor number, start) to (count, offset in the file)."""
        offsets = np.cumsum(self.num_bytes) - self.num_bytes
        columns = (self.tensor, self.start, self.count, offsets)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return {(tensor, start): (count, offset) for tensor, start, count, offset in rows}


def write_index(
    folder: Path, rank: int, facts: FileFacts, pieces: Sequence[tuple[int, int, int]] | Numbers
) -> None:
    """Write and sync a rank's index.

    Args:
        facts: size and digest of the rank's shard file.
        pieces: (tensor number, start, count), as a list or as rows.

    Raises:
        OSError: see :func:`~runner.checkpoint.disk.shards.write_rank_file`.
    """
    header = _HEADER.pack(_MAGIC, len(pieces), facts.num_bytes, bytes.fromhex(facts.sha256))
    table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
    data = [header, *(table[:, at].astype(kind).tobytes() for at, kind in _COLUMNS)]
    write_durably(folder / index_name(rank), b"".join(data))


def _facts(data: bytes, path: Path) -> tuple[FileFacts, int]:
    """Size and digest of the shard file that an index belongs to, and how many pieces it lists.

    Raises:
        CorruptCheckpoint: the data is not an index.
    """
    size = (len(data) - _HEADER.size) // _PIECE_BYTES
    if size < 0 or len(data) != _HEADER.size + size * _PIECE_BYTES:
        raise CorruptCheckpoint(f"{path}: {len(data)} bytes are no index")
    magic, num, num_bytes, sha256 = _HEADER.unpack_from(data)
    if magic != _MAGIC or num != size:
        raise CorruptCheckpoint(f"{path}: is no index, or one of another version")
    return FileFacts(num_bytes=num_bytes, sha256=sha256.hex()), num


_COLUMNS = ((0, "<u4"), (1, "<u8"), (2, "<u8"))


def parse_index(data: bytes, path: Path, sizes: Numbers) -> RankIndex:
    """
    Args:
        sizes: see :func:`element_sizes`.

    Raises:
        CorruptCheckpoint: the data is not an index, or its sizes do not add up.
    """
    facts, size = _facts(data, path)
    columns: list[Numbers] = []
    at = _HEADER.size
    for _, kind in _COLUMNS:
        column = np.frombuffer(data, dtype=kind, count=size, offset=at)
        if size and int(column.max()) >= 1 << 50:
            raise CorruptCheckpoint(f"{path}: {int(column.max())} is no number of elements")
        columns.append(column.astype(np.int64))
        at += column.nbytes
    tensor, start, count = columns
    # Added as floats first: the numbers of a damaged file may exceed 64 bits.
    is_sane = not size or (int(tensor.max()) < len(sizes) and int(count.min()) > 0)
    is_sane = is_sane and float(count.sum(dtype=np.float64)) < 1 << 60
    num_bytes = count * sizes[tensor] if is_sane else count
    if not is_sane or int(num_bytes.sum()) != facts.num_bytes:
        raise CorruptCheckpoint(f"{path}: its pieces do not add up to {facts.num_bytes} bytes")
    return RankIndex(facts=facts, tensor=tensor, start=start, count=count, num_bytes=num_bytes)


def element_sizes(names: Sequence[str], dtypes: Mapping[str, str]) -> Numbers:
    """Bytes of an element of each tensor, by the tensor's number."""
    sizes = [ITEM_SIZES[dtypes.get(name, FLOAT32)] for name in sorted(names)]
    return np.array(sizes, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceLayout:
    """The places of all tensors' pieces, and the indexes from which they were computed."""

    runs: Mapping[str, tuple[PieceRun, ...]]
    digests: tuple[bytes, ...]


def collect_indexes(
    folder: Path,
    names: Sequence[str],
    world_size: int,
    *,
    known: PieceLayout | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> tuple[PieceLayout, dict[str, FileFacts]]:
    """Combine all ranks' indexes into one layout; also returns the facts of all files.

    Args:
        names: names of all tensors.
        dtypes: types of the tensors that are not FP32, by name.
        known: the layout of the previous save; returned again if no index has changed.

    Raises:
        CorruptCheckpoint: an index is missing or invalid.
    """
    paths = [folder / index_name(rank) for rank in range(world_size)]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="indexes") as readers:
        stored = list(readers.map(_read, paths))
    files: dict[str, FileFacts] = {}
    for rank, (path, data) in enumerate(zip(paths, stored, strict=True)):
        files[data_name(rank)], _ = _facts(data, path)
        files[path.name] = FileFacts(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    # Of the columns, not of the shard's bytes, which change with each save.
    digests = tuple(hashlib.sha256(memoryview(data)[_HEADER.size :]).digest() for data in stored)
    if known is not None and known.digests == digests:
        return known, files
    sizes, ordered = element_sizes(names, dtypes or {}), sorted(names)
    indexes = [parse_index(data, path, sizes) for path, data in zip(paths, stored, strict=True)]
    runs = compress(
        tensor=np.concatenate([index.tensor for index in indexes]),
        start=np.concatenate([index.start for index in indexes]),
        count=np.concatenate([index.count for index in indexes]),
        file=np.repeat(np.arange(world_size), [len(index.tensor) for index in indexes]),
    )
    return PieceLayout(
        runs={name: tuple(runs.get(at, ())) for at, name in enumerate(ordered)}, digests=digests
    ), files


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, MOST_INDEX_BYTES)
    except OSError as error:
        raise CorruptCheckpoint(f"{path}: {error}") from None


def numbers(names: Sequence[str]) -> Mapping[str, int]:
    """Each tensor's number in the indexes."""
    return {name: at for at, name in enumerate(sorted(names))}


_WRITE_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 22  # read at once; whole elements of every type
_MOST_OPEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of one rank's part of one tensor, 1-D on the CPU, of whatever type."""

    name: str
    start: int
    values: torch.Tensor


def own_share(
    pieces: Iterable[tuple[str, int, torch.Tensor]], replica: tuple[int, int]
) -> Iterator[Snapshot]:
    """The part of (name, flat start, 1-D values) pieces that this rank writes, as views.

    Lazily: a piece may lie in memory that the next one is given. Replicas hold the same bytes, so
    each of them writes a part.

    Args:
        replica: (number of this replica, number of replicas).
    """
    index, count = replica
    for name, start, values in pieces:
        size = -(-len(values) // count)
        first = min(len(values), index * size)
        part = values[first : first + size]
        if part.numel():
            yield Snapshot(name=name, start=start + first, values=part)


class RateLimit:
    """Limits a background writer to ``bytes_per_second`` (0: no limit).

    While ``hurry`` is set, somebody waits for the writer, and the limit is off.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.hurry = threading.Event()
        self._rate = bytes_per_second
        self._due = time.monotonic()

    @property
    def is_limited(self) -> bool:
        return self._rate > 0 and not self.hurry.is_set()

    def wrote(self, num_bytes: int) -> None:
        """Wait so that ``num_bytes`` more bytes keep to the limit."""
        if self._rate > 0:
            self._due = max(self._due, time.monotonic()) + num_bytes / self._rate
            if self.hurry.wait(max(0.0, self._due - time.monotonic())):
                self._due = time.monotonic()


def write_rank_file(
    folder: Path,
    rank: int,
    snapshots: Iterable[Snapshot],
    numbers: Mapping[str, int],
    pace: RateLimit | None = None,
) -> None:
    """Write and sync this rank's shards, and then their index.

    Args:
        numbers: each tensor's number by name.

    Raises:
        OSError: disk full, read-only, gone. The file is not to be trusted then, whatever a
            later fsync says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    pieces: list[tuple[int, int, int]] = []
    num_bytes = 0
    path = folder / data_name(rank)
    with naming(path), path.open("xb") as file:
        for snapshot in snapshots:
            data = as_bytes(snapshot.values)
            for at in range(0, len(data), _WRITE_BYTES):
                block = data[at : at + _WRITE_BYTES]
                file.write(block)
                digest.update(block)
                if pace is not None and pace.is_limited:
                    # Synced piece by piece: the system would write it all in one burst.
                    file.flush()
                    os.fdatasync(file.fileno())
                    pace.wrote(len(block))
            pieces.append((numbers[snapshot.name], snapshot.start, snapshot.values.numel()))
            num_bytes += len(data)
        file.flush()
        os.fsync(file.fileno())
    write_index(folder, rank, FileFacts(num_bytes=num_bytes, sha256=digest.hexdigest()), pieces)


# Size and times of last change. Nobody without the clock in hand can set back the last of them;
# the inode is left out, as some network file systems number anew.
Stamp = tuple[int, int, int]


def stamps(entry: Entry, names: Iterable[str]) -> dict[str, Stamp]:
    """Sizes and times of files, which show whether a file changes while it is verified and read.

    Call it before any rank begins to verify. If the stamps are unchanged after a later read, the
    verified digest holds for the bytes of that read, too.

    Raises:
        CorruptCheckpoint: a file is missing, or is a link.
    """
    by_file = {}
    for name in names:
        with _open(entry, name) as file:
            by_file[name] = _stamp(file)
    return by_file


def files_needed(entry: Entry, ranges: Iterable[tuple[str, int, int]]) -> set[str]:
    """Names of the files that hold any of these (tensor, start, count), and of their indexes."""
    needed: set[str] = set()
    for name, start, count in ranges:
        for file, _, _ in _overlapping(entry.manifest, name, start, start + count):
            needed |= {data_name(file), index_name(file)}
    return needed


def _overlapping(
    manifest: Manifest, name: str, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """(file, flat start, count) of a tensor's pieces that overlap, from its runs."""
    for run in manifest.runs.get(name, ()):
        starts, files = run.pieces()
        hits = (starts < stop) & (starts + run.count > start)
        yield from zip(files[hits].tolist(), starts[hits].tolist(), repeat(run.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """``count`` elements from ``start`` on of one flattened tensor, at ``offset`` bytes."""

    start: int
    count: int
    file: str
    offset: int


class Indexes:
    """The indexes of a checkpoint, each read and verified once."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        names = list(entry.manifest.shapes)
        self._numbers = numbers(names)
        self._sizes = element_sizes(names, entry.manifest.dtypes)
        self._read: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}

    def pieces(self, name: str, start: int, stop: int) -> list[StoredPiece]:
        """Those that overlap ``[start, stop)``.

        Raises:
            CorruptCheckpoint: an index is damaged, or is not what the manifest says.
        """
        pieces = []
        for file, at, count in _overlapping(self._entry.manifest, name, start, stop):
            found, offset = self._of(file).get((self._numbers[name], at), (0, 0))
            if found != count:
                raise CorruptCheckpoint(
                    f"{self._entry.folder / index_name(file)}: has not the elements of {name!r} "
                    f"from {at} on"
                )
            pieces.append(StoredPiece(start=at, count=count, file=data_name(file), offset=offset))
        return pieces

    def _of(self, file: int) -> dict[tuple[int, int], tuple[int, int]]:
        if file not in self._read:
            path = self._entry.folder / index_name(file)
            try:
                data = read_bounded(path, MOST_INDEX_BYTES)
            except OSError as error:
                raise unreadable(path, error) from None
            index = parse_index(data, path, self._sizes)
            files = self._entry.manifest.files
            if hashlib.sha256(data).hexdigest() != files[index_name(file)].sha256:
                raise CorruptCheckpoint(f"{path}: digest differs from the manifest's")
            if index.facts != files[data_name(file)]:
                raise CorruptCheckpoint(f"{path}: is of another file than the manifest's")
            self._read[file] = index.places()
        return self._read[file]

    def types(self, file: int) -> list[Span]:
        """(offset, count, type) of each piece in a rank's file, in the order of its bytes.

        Raises:
            CorruptCheckpoint: see :meth:`pieces`.
        """
        manifest = self._entry.manifest
        names = sorted(manifest.shapes)
        places = ((at, n, names[tensor]) for (tensor, _), (n, at) in self._of(file).items())
        return sorted((at, count, manifest.dtype(name)) for at, count, name in places)


def _stamp(file: BinaryIO) -> Stamp:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextlib.contextmanager
def _open(entry: Entry, name: str) -> Iterator[io.BufferedReader]:
    """Open a file of a checkpoint; errors of the system until it is closed become our own."""
    try:
        with open_regular(entry.folder / name) as file:
            assert isinstance(file, io.BufferedReader)
            yield file
    except OSError as error:
        raise unreadable(entry.folder / name, error) from None


def verify_files(
    entry: Entry,
    names: Iterable[str],
    *,
    finite: bool,
    seen: Mapping[str, Stamp] | None = None,
    moved: Callable[[int], None] = lambda count: None,
) -> None:
    """Read every byte of these files of a checkpoint and compare digests.

    Args:
        finite: also refuse NaN and Inf.
        seen: see :func:`stamps`.
        moved: called with the number of bytes after each read.

    Raises:
        CorruptCheckpoint: a file is damaged; the message names it and the fault.
    """
    for name in names:
        path, facts = entry.folder / name, entry.manifest.files[name]
        digest = hashlib.sha256()
        spans = _spans(entry, name) if finite and not is_index(name) else []
        with _open(entry, name) as file:
            _check_size(file, path, facts)
            for block, dtype in _typed_blocks(file, spans):
                digest.update(block)
                moved(len(block))
                if not _are_finite(block, dtype):
                    raise CorruptCheckpoint(f"{path}: holds NaN or Inf")
            if digest.hexdigest() != facts.sha256:
                raise CorruptCheckpoint(
                    f"{path}: digest differs from the manifest's: damaged on disk"
                )
            _check_unchanged(file, path, (seen or {}).get(name))


# (offset, number of elements, type) of a part of a file.
Span = tuple[int, int, str]
_BYTES = "uint8"


def _spans(entry: Entry, name: str) -> list[Span]:
    """Where which elements lie in a rank's file, in the order of its bytes."""
    manifest = entry.manifest
    if not manifest.dtypes:
        return [(0, manifest.files[name].num_bytes // ITEM_BYTES, FLOAT32)]
    return Indexes(entry).types(rank_of(name))


def _typed_blocks(file: BinaryIO, spans: Sequence[Span]) -> Iterator[tuple[bytes, str]]:
    """The whole file in blocks of elements of one type; bytes of no span are ``uint8``."""
    # A digest of cached pages would prove nothing about the disk.
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    at = 0
    for offset, count, dtype in (*spans, (sys.maxsize, 0, _BYTES)):
        for stop, kind in ((offset, _BYTES), (offset + count * ITEM_SIZES[dtype], dtype)):
            while at < stop and (block := file.read(min(stop - at, _BLOCK_BYTES))):
                at += len(block)
                yield block, kind


def _are_finite(block: bytes, dtype: str) -> bool:
    if dtype == FLOAT32:  # nearly always; numpy needs no copy
        return bool(np.isfinite(np.frombuffer(block, dtype="<f4")).all())
    return dtype == _BYTES or is_finite(from_bytes(block, dtype_of(dtype)))


def _check_size(file: BinaryIO, path: Path, facts: FileFacts) -> None:
    size = os.fstat(file.fileno()).st_size
    if size != facts.num_bytes:
        raise CorruptCheckpoint(f"{path}: {size} bytes, {facts.num_bytes} were written")


def _check_unchanged(file: BinaryIO, path: Path, stamp: Stamp | None) -> None:
    if stamp is not None and _stamp(file) != stamp:
        raise CorruptCheckpoint(f"{path}: was changed while it was verified and read")


class ShardReader:
    """Reads ranges of a checkpoint's tensors; keeps a few files open.

    Args:
        seen: see :func:`stamps`; a file that has changed since is refused.
    """

    def __init__(self, entry: Entry, *, seen: Mapping[str, Stamp] | None = None) -> None:
        self._entry = entry
        self._seen = seen or {}
        self._indexes = Indexes(entry)
        self._files: dict[str, BinaryIO] = {}  # the most recently used file is the last one

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            self._close(next(iter(self._files)))

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements ``[start, start + count)`` of a flattened tensor, 1-D on the CPU.

        Raises:
            CorruptCheckpoint: the tensor is not there or a file is too short.
        """
        manifest = self._entry.manifest
        if start < 0 or start + count > manifest.numel(name):
            raise CorruptCheckpoint(
                f"{self._entry.folder}: has no elements {start}-{start + count} of {name!r}"
            )
        result = torch.empty(count, dtype=dtype_of(manifest.dtype(name)))
        for piece in self._indexes.pieces(name, start, start + count):
            first, stop = max(start, piece.start), min(start + count, piece.start + piece.count)
            self._piece(piece, first, result[first - start : stop - start])
        return result

    def _piece(self, piece: StoredPiece, first: int, into: torch.Tensor) -> None:
        path = self._entry.folder / piece.file
        offset = piece.offset + (first - piece.start) * into.itemsize
        data = as_bytes(into)
        # Not numpy's fromfile: it takes an error of the disk for the file's end.
        try:
            file = self._file(piece.file)
            file.seek(offset)
            if file.readinto(data) != data.nbytes:  # type: ignore[attr-defined]
                raise CorruptCheckpoint(f"{path}: truncated")
            # After the read: what came before it is told as well.
            _check_unchanged(file, path, self._seen.get(piece.file))
        except OSError as error:
            raise unreadable(path, error) from None

    def _file(self, name: str) -> BinaryIO:
        file = self._files.pop(name, None)
        if file is None:
            if len(self._files) == _MOST_OPEN:
                self._close(next(iter(self._files)))
            file = open_regular(self._entry.folder / name)
        self._files[name] = file
        return file

    def _close(self, name: str) -> None:
        try:
            self._files.pop(name).close()
        except OSError as error:  # a network's file system may tell a failed read so late
            raise unreadable(self._entry.folder / name, error) from None
