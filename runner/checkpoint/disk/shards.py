"""Writing one rank's shards, verifying files, reading any range back.

Knows a shard as (name, shape, flat start, 1-D tensor); nothing of engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from runner.checkpoint.disk.directory import Entry, unreadable
from runner.checkpoint.disk.index import (
    MOST_INDEX_BYTES,
    element_sizes,
    numbers,
    parse_index,
    write_index,
)
from runner.checkpoint.manifest import (
    ITEM_SIZES,
    MOST_BYTES,
    FileFacts,
    Piece,
    as_bytes,
    data_name,
    dtype_of,
    from_bytes,
    index_name,
    is_finite,
    is_index,
    parse_piece,
    rank_of,
)
from runner.system.error import CorruptCheckpoint
from runner.system.files import blocks, naming, open_regular, read_bounded, write_json
from runner.system.parsing import whole

_WRITE_BYTES = 1 << 22
_MOST_OPEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of one rank's part of one tensor, 1-D on the CPU, of whatever type."""

    name: str
    start: int
    values: torch.Tensor


def own_share(
    pieces: Iterable[tuple[str, int, torch.Tensor]], replica: tuple[int, int]
) -> list[Snapshot]:
    """The part of (name, flat start, 1-D values) pieces that this rank writes, as views.

    Replicas hold the same bytes, so each of them writes a part.

    Args:
        replica: (number of this replica, number of replicas).
    """
    index, count = replica
    parts = []
    for name, start, values in pieces:
        size = -(-len(values) // count)
        first = min(len(values), index * size)
        part = values[first : first + size]
        if part.numel():
            parts.append(Snapshot(name=name, start=start + first, values=part))
    return parts


class Pace:
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
    pace: Pace | None = None,
    *,
    numbers: Mapping[str, int] | None = None,
) -> None:
    """Write and sync this rank's shards, and then their list: a JSON note or an index.

    Args:
        numbers: each tensor's number by name, for an index; None: write a note.

    Raises:
        OSError: disk full, read-only, gone. The file is not to be trusted then, whatever a
            later fsync says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    pieces: list[tuple[str, int, int, int]] = []
    offset = 0
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
            pieces.append((snapshot.name, snapshot.start, snapshot.values.numel(), offset))
            offset += len(data)
        file.flush()
        os.fsync(file.fileno())
    if numbers is not None:
        facts = FileFacts(num_bytes=offset, sha256=digest.hexdigest())
        write_index(folder, rank, facts, [(numbers[p[0]], p[1], p[2]) for p in pieces])
        return
    note = {"bytes": offset, "sha256": digest.hexdigest(), "pieces": pieces}
    write_json(folder / f"rank-{rank:05d}.json", note)


def collect_pieces(
    folder: Path, world_size: int
) -> tuple[dict[str, tuple[Piece, ...]], dict[str, FileFacts]]:
    """Merge the notes of all ranks and remove them.

    Raises:
        CorruptCheckpoint: a note is missing or invalid.
    """
    pieces: dict[str, list[Piece]] = {}
    files: dict[str, FileFacts] = {}
    for rank in range(world_size):
        path, name = folder / f"rank-{rank:05d}.json", data_name(rank)
        try:
            note = json.loads(read_bounded(path, MOST_BYTES))
            files[name] = FileFacts(
                num_bytes=whole(note["bytes"], "bytes"), sha256=str(note["sha256"])
            )
            for tensor, start, count, offset in note["pieces"]:
                piece = parse_piece([start, count, name, offset])
                pieces.setdefault(str(tensor), []).append(piece)
        except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise CorruptCheckpoint(f"{path}: {type(error).__name__}: {error}") from None
    for rank in range(world_size):
        (folder / f"rank-{rank:05d}.json").unlink()
    return {name: tuple(of_tensor) for name, of_tensor in pieces.items()}, files


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
    manifest = entry.manifest
    needed: set[str] = set()
    for name, start, count in ranges:
        stop = start + count
        for run in (manifest.runs or {}).get(name, ()):
            starts, files = run.pieces()
            hits = files[(starts < stop) & (starts + run.count > start)].tolist()
            needed |= {kind(file) for file in hits for kind in (data_name, index_name)}
        needed |= {
            piece.file
            for piece in manifest.pieces.get(name, ())
            if max(start, piece.start) < min(stop, piece.start + piece.count)
        }
    return needed


class Indexes:
    """The indexes of a checkpoint of many ranks, each read and verified once."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        names = list(entry.manifest.shapes)
        self._numbers = numbers(names)
        self._sizes = element_sizes(names, entry.manifest.dtypes)
        self._read: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}

    def pieces(self, name: str, start: int, stop: int) -> list[Piece]:
        """Those that overlap ``[start, stop)``.

        Raises:
            CorruptCheckpoint: an index is damaged, or is not what the manifest says.
        """
        pieces = []
        for run in (self._entry.manifest.runs or {}).get(name, ()):
            starts, files = run.pieces()
            hits = (starts < stop) & (starts + run.count > start)
            for at, file in zip(starts[hits].tolist(), files[hits].tolist(), strict=True):
                count, offset = self._of(file).get((self._numbers[name], at), (0, 0))
                if count != run.count:
                    raise CorruptCheckpoint(
                        f"{self._entry.folder / index_name(file)}: has not the elements of "
                        f"{name!r} from {at} on"
                    )
                pieces.append(Piece(start=at, count=count, file=data_name(file), offset=offset))
        return pieces

    def _of(self, file: int) -> dict[tuple[int, int], tuple[int, int]]:
        if file not in self._read:
            path = self._entry.folder / index_name(file)
            try:
                data = read_bounded(path, MOST_INDEX_BYTES)
            except OSError as error:
                raise unreadable(path, error) from None
            index = parse_index(data, path, num_tensors=len(self._numbers), sizes=self._sizes)
            files = self._entry.manifest.files
            if hashlib.sha256(data).hexdigest() != files[index_name(file)].sha256:
                raise CorruptCheckpoint(f"{path}: digest differs from the manifest's")
            if index.facts != files[data_name(file)]:
                raise CorruptCheckpoint(f"{path}: is of another file than the manifest's")
            self._read[file] = index.places()
        return self._read[file]

    def types(self, file: int) -> list[tuple[int, int, str]]:
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
        sound = _finiteness(entry, name) if finite and not is_index(name) else None
        with _open(entry, name) as file:
            _check_size(file, path, facts)
            for block in blocks(file):
                digest.update(block)
                moved(len(block))
                if sound is not None and not sound(block):
                    raise CorruptCheckpoint(f"{path}: holds NaN or Inf")
            if digest.hexdigest() != facts.sha256:
                raise CorruptCheckpoint(
                    f"{path}: digest differs from the manifest's: damaged on disk"
                )
            _check_unchanged(file, path, (seen or {}).get(name))


def _finiteness(entry: Entry, name: str) -> Callable[[bytes], bool]:
    """A function that takes a rank's file block by block: whether all numbers are finite."""
    manifest = entry.manifest
    if not manifest.dtypes:
        return lambda block: bool(np.isfinite(np.frombuffer(block, dtype="<f4")).all())
    if manifest.is_indexed:
        spans = Indexes(entry).types(rank_of(name))
    else:
        pieces = ((n, piece) for n, of_one in manifest.pieces.items() for piece in of_one)
        spans = sorted((p.offset, p.count, manifest.dtype(n)) for n, p in pieces if p.file == name)
    return _TypedBlocks(spans).are_finite


class _TypedBlocks:
    """Reads a file whose elements are of several types, block by block.

    Args:
        spans: (offset, count, type) of each piece, in the order of their bytes.
    """

    def __init__(self, spans: Sequence[tuple[int, int, str]]) -> None:
        self._spans = deque(spans)
        self._kept = b""  # the end of the last block: an element may lie across two blocks
        self._at = 0  # position of its first byte

    def are_finite(self, block: bytes) -> bool:
        """Whether the elements that end in this block are finite."""
        data, end = self._kept + block, self._at + len(self._kept) + len(block)
        while self._spans:
            offset, count, dtype = self._spans[0]
            if offset >= end:
                break
            size = ITEM_SIZES[dtype]
            num_elements = min(count, (end - offset) // size)
            first = offset - self._at
            values = from_bytes(data[first : first + num_elements * size], dtype_of(dtype))
            if not is_finite(values):
                return False
            if num_elements < count:
                self._spans[0] = (offset + num_elements * size, count - num_elements, dtype)
                break
            self._spans.popleft()
        kept = self._spans[0][0] if self._spans else end
        self._kept, self._at = (data[kept - self._at :], kept) if kept < end else (b"", end)
        return True


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
        stored: Sequence[Piece] = manifest.pieces.get(name, ())
        if manifest.runs is not None:
            stored = self._indexes.pieces(name, start, start + count)
        result = torch.empty(count, dtype=dtype_of(manifest.dtype(name)))
        for piece in stored:
            first, stop = max(start, piece.start), min(start + count, piece.start + piece.count)
            if first < stop:
                self._piece(piece, first, result[first - start : stop - start])
        return result

    def _piece(self, piece: Piece, first: int, into: torch.Tensor) -> None:
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
