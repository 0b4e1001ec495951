"""Writing one rank's shards, verifying files, reading any range back.

Knows a shard as (name, shape, flat start, 1-D FP32 tensor); nothing of engines.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from runner.checkpoint.manifest import ITEM_BYTES, FileFacts, Piece
from runner.checkpoint.store import Entry, read_rank_facts
from runner.error import CorruptCheckpoint
from runner.files import blocks, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of one rank's part of one tensor, FP32 1-D on the CPU."""

    name: str
    start: int
    values: torch.Tensor


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def write_rank_file(folder: Path, rank: int, snapshots: Sequence[Snapshot]) -> None:
    """Write and sync this rank's shards and, last, a JSON note of what they are.

    Raises:
        OSError: disk full, read-only, gone. The file is not to be trusted then, whatever a
            later fsync says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    pieces: list[list[object]] = []
    offset = 0
    with (folder / file_name(rank)).open("xb") as file:
        for snapshot in snapshots:
            data = _bytes(snapshot.values)
            file.write(data)
            digest.update(data)
            pieces.append([snapshot.name, snapshot.start, snapshot.values.numel(), offset])
            offset += len(data)
        file.flush()
        os.fsync(file.fileno())
    note = {"bytes": offset, "sha256": digest.hexdigest(), "pieces": pieces}
    write_json(folder / f"rank-{rank:05d}.json", note)


def _bytes(values: torch.Tensor) -> memoryview:
    array = values.contiguous().numpy()
    assert array.dtype == np.float32
    return array.astype("<f4", copy=False).data.cast("B")


def collect_pieces(
    folder: Path, world_size: int
) -> tuple[dict[str, tuple[Piece, ...]], dict[str, FileFacts]]:
    """Merge the notes of all ranks and remove them.

    Raises:
        CorruptCheckpoint: a note is missing.
    """
    pieces: dict[str, list[Piece]] = {}
    files: dict[str, FileFacts] = {}
    for rank in range(world_size):
        note = read_rank_facts(folder / f"rank-{rank:05d}.json")
        name = file_name(rank)
        files[name] = FileFacts(num_bytes=int(note["bytes"]), sha256=str(note["sha256"]))  # type: ignore[call-overload]
        for tensor, start, count, offset in note["pieces"]:  # type: ignore[attr-defined]
            piece = Piece(start=start, count=count, file=name, offset=offset)
            pieces.setdefault(tensor, []).append(piece)
    for rank in range(world_size):
        (folder / f"rank-{rank:05d}.json").unlink()
    return {name: tuple(found) for name, found in pieces.items()}, files


def verify_files(entry: Entry, names: Iterable[str], *, finite: bool) -> None:
    """Read every byte of these files of a checkpoint and compare digests.

    Args:
        finite: also refuse NaN and Inf.

    Raises:
        CorruptCheckpoint: naming file and fault.
    """
    for name in names:
        path, facts = entry.folder / name, entry.manifest.files[name]
        digest = hashlib.sha256()
        try:
            size = path.stat().st_size
            if size != facts.num_bytes:
                raise CorruptCheckpoint(f"{path}: {size} bytes, {facts.num_bytes} were written")
            for block in blocks(path):
                digest.update(block)
                if finite and not np.isfinite(np.frombuffer(block, dtype="<f4")).all():
                    raise CorruptCheckpoint(f"{path}: holds NaN or Inf")
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: {error}") from None
        if digest.hexdigest() != facts.sha256:
            raise CorruptCheckpoint(f"{path}: digest differs from the manifest's: damaged on disk")


def read_range(entry: Entry, name: str, start: int, count: int) -> torch.Tensor:
    """Elements ``[start, start + count)`` of a flattened tensor, FP32 1-D on the CPU.

    Raises:
        CorruptCheckpoint: the tensor is not there or a file is too short.
    """
    found = torch.empty(count, dtype=torch.float32)
    for piece in entry.manifest.pieces.get(name, ()):
        first, stop = max(start, piece.start), min(start + count, piece.start + piece.count)
        if first < stop:
            found[first - start : stop - start] = _read_piece(entry, piece, first, stop)
    return found


def _read_piece(entry: Entry, piece: Piece, first: int, stop: int) -> torch.Tensor:
    offset = piece.offset + (first - piece.start) * ITEM_BYTES
    array = np.fromfile(entry.folder / piece.file, dtype="<f4", count=stop - first, offset=offset)
    if len(array) != stop - first:
        raise CorruptCheckpoint(f"{entry.folder / piece.file}: truncated")
    return torch.from_numpy(array.astype(np.float32, copy=False))
