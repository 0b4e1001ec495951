"""One rank's index: a binary file that lists what the rank's shard file holds.

    rank-00000.bin   the bytes
    rank-00000.idx   which elements of which tensors they are

Little endian: a header (``HFINDEX1``, number of pieces, bytes and SHA-256 of the file), then
columns: tensor number (u32), flat start (u64), count (u64). A tensor's number is its place among
the sorted names of the manifest. Pieces lie one after another: where one begins follows from the
counts and the sizes of elements, which the manifest has. The manifest has the digest of each
index, and says which file holds a piece (:mod:`.layout`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runner.checkpoint.layout import Numbers, PieceRun, compress
from runner.checkpoint.manifest import (
    FLOAT32,
    ITEM_SIZES,
    FileFacts,
    data_name,
    index_name,
)
from runner.system.error import CorruptCheckpoint
from runner.system.files import read_bounded, write_durably

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
