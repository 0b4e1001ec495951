"""The manifest of a checkpoint: one JSON object that names every byte of it.

Flat shards keyed by (tensor name, flat start, count), so that any engine and any world size can
read what another wrote. All input from disk is checked before it is used.

A list of every piece would grow with ranks times tensors: the manifest says in runs in which
files they lie, and each rank's file has an index beside it; a rank reads the indexes that it needs
(:mod:`runner.checkpoint.disk.shards`). Elements are FP32 where no other type is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from runner.checkpoint.protocol import CheckpointMetadata
from runner.system.error import CorruptCheckpoint
from runner.system.parsing import parse_json, refuse_flagged, whole

# Describes where the pieces of tensors lie, compactly, as arithmetic progressions over files.
#
# Shards are cut evenly. For a tensor on 16,384 ranks, rank ``i`` holds ``count`` elements from
# ``start + i * step`` on. A list of these pieces would have 16,384 entries, too many for a
# manifest. A :class:`PieceRun` is one entry; with replicas that each write a part it has two
# counters.

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PieceRun:
    """Pieces of one tensor, for ``i < num`` and ``j < repeats``: ``count`` elements from
    ``start + i * step + j * start_step`` on, in file ``file + i + j * file_step``.
    """

    file: int
    num: int
    start: int
    step: int
    count: int
    repeats: int
    file_step: int
    start_step: int

    def to_json(self) -> list[int]:
        return list(astuple(self))

    @classmethod
    def from_json(cls, values: Any, *, num_files: int) -> PieceRun:
        """
        Raises:
            ValueError: it is not a valid run over ``num_files`` files.
        """
        names = cls.__slots__
        if not isinstance(values, list) or len(values) != len(names):
            raise ValueError(f"run {str(values)[:80]}: {len(names)} numbers are needed")
        # Below 2 ** 50 every product of two of them that exceeds 64 bits is noticed.
        run = cls(*(whole(v, name, below=1 << 50) for v, name in zip(values, names, strict=True)))
        last = run.file + run.num - 1 + (run.repeats - 1) * run.file_step
        if run.num < 1 or run.repeats < 1 or run.count < 1 or last >= num_files:
            raise ValueError(f"run {values}: outside of the {num_files} files, or empty")
        if run.num * run.repeats > num_files:
            raise ValueError(f"run {values}: more pieces than the {num_files} files")
        return run

    def pieces(self) -> tuple[Numbers, Numbers]:
        """(starts, files): the flat start and the file number of each piece."""
        i = np.arange(self.num, dtype=np.int64)
        j = np.arange(self.repeats, dtype=np.int64)[:, None]
        starts = self.start + i * self.step + j * self.start_step
        files = self.file + i + j * self.file_step
        return starts.reshape(-1), files.reshape(-1)

    def intervals(self) -> list[tuple[int, int]]:
        """(start, count), with adjacent pieces merged."""
        count = self.count
        loops = sorted([(self.step, self.num), (self.start_step, self.repeats)])
        left = [(step, num) for step, num in loops if num > 1]
        while left and left[0][0] == count:
            count *= left.pop(0)[1]
        starts = [self.start]
        for step, num in left:
            starts = [start + at * step for start in starts for at in range(num)]
        return [(start, count) for start in starts]


def check_coverage(name: str, numel: int, intervals: Iterable[tuple[int, int]]) -> None:
    """
    Args:
        intervals: (start, count) of the pieces.

    Raises:
        ValueError: an element is missing or present twice.
    """
    at = 0
    for start, count in sorted(intervals):
        if start != at or count < 1:
            raise ValueError(f"{name}: elements from {at} on are missing or doubled")
        at += count
    if at != numel:
        raise ValueError(f"{name}: {at} of {numel} elements")


def compress(
    *, tensor: Numbers, start: Numbers, count: Numbers, file: Numbers
) -> dict[int, list[PieceRun]]:
    """Find the runs of each tensor with numpy, which blocks other threads only briefly.

    Args:
        tensor: number of each piece's tensor; beside its flat start, its count, and the number of
            its file.
    """
    if not len(tensor):
        return {}
    small = tensor.astype(np.uint16 if int(tensor.max()) < 1 << 16 else np.uint32)
    order = np.argsort(small, kind="stable")  # numpy sorts 16-bit numbers by radix
    tensor, start, count, file = (column[order] for column in (tensor, start, count, file))
    first = _begins((tensor, count), (file, start), need=(1, None))
    num, step = _lengths(first, start)
    tensor, start, count, file = (column[first] for column in (tensor, start, count, file))
    # Equal runs of the replicas come side by side.
    order = np.lexsort((start, file, count, step, num, tensor))
    tensor, start, count, file, num, step = (
        column[order] for column in (tensor, start, count, file, num, step)
    )
    first = _begins((tensor, count, num, step), (file, start), need=(None, None))
    repeats, start_step = _lengths(first, start)
    _, file_step = _lengths(first, file)
    numbers = [column[first] for column in (tensor, file, num, start, step, count)]
    numbers += [repeats, file_step, start_step]
    runs: dict[int, list[PieceRun]] = {}
    for number, *values in zip(*(column.tolist() for column in numbers), strict=True):
        runs.setdefault(number, []).append(PieceRun(*values))
    return runs


def _begins(
    equal: Sequence[Numbers], steady: Sequence[Numbers], need: Sequence[int | None]
) -> Numbers:
    """Rows at which a progression begins: INT64, rising.

    Within a progression ``equal`` columns are constant and ``steady`` columns grow evenly.

    Args:
        need: the step of each ``steady`` column; None: any positive step.
    """
    size = len(equal[0])
    links = np.ones(max(0, size - 1), dtype=bool)  # whether i + 1 may follow i
    for column in equal:
        links &= column[1:] == column[:-1]
    growth = [np.diff(column) for column in steady]
    for grown, by in zip(growth, need, strict=True):
        links &= (grown > 0) if by is None else (grown == by)
    begins = np.ones(size, dtype=bool)
    begins[1:] = ~links
    for grown in growth:  # the third row is as far from the second as that from the first
        begins[2:] |= links[:-1] & (grown[1:] != grown[:-1])
    return np.flatnonzero(begins).astype(np.int64)


def _lengths(first: Numbers, column: Numbers) -> tuple[Numbers, Numbers]:
    """Length and step of the progressions that begin at the rows ``first``."""
    num = np.diff(np.append(first, len(column)))
    second = np.minimum(first + 1, len(column) - 1)
    return num, np.where(num > 1, column[second] - column[first], 0)


FLOAT32: Final = "float32"
# Bytes of an element by torch's name of its type. Supervisors read manifests and import no torch.
ITEM_SIZES: Final[Mapping[str, int]] = {
    name: size
    for size, names in {
        8: ("float64", "int64", "uint64"),
        4: (FLOAT32, "int32", "uint32"),
        2: ("float16", "bfloat16", "int16", "uint16"),
        1: ("float8_e4m3fn", "float8_e5m2", "bool", "uint8", "int8"),
    }.items()
    for name in names
}
FORMAT = "holdfast-ring"
VERSION = 5
ITEM_BYTES = 4  # FP32, little endian
MOST_BYTES = 1 << 30  # of a manifest
_FILE_NAME = re.compile(r"rank-[0-9]{5,7}\.(?:bin|idx)")
_MOST_DIMENSIONS = 64
_COUNTS = ("serial", "step", "cursor", "world_size", "metrics_bytes", "journal_lines")
_TEXTS = ("config_digest", "data_fingerprint")
_WORDS = 500  # characters that an error quotes


def data_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def index_name(rank: int) -> str:
    return f"rank-{rank:05d}.idx"


def rank_of(name: str) -> int:
    """The rank in the name of a shard file or index."""
    return int(name.removeprefix("rank-").partition(".")[0])


def is_index(name: str) -> bool:
    return name.endswith(".idx")


def by_kind(names: Iterable[str]) -> list[str]:
    """Files in the order in which ranks divide them: data first, then indexes."""
    return sorted(names, key=lambda name: (is_index(name), name))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    num_bytes: int
    sha256: str

    @classmethod
    def from_json(cls, facts: Any) -> FileFacts:
        return cls(num_bytes=whole(facts["bytes"], "bytes"), sha256=str(facts["sha256"]))

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.num_bytes, "sha256": self.sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(CheckpointMetadata):
    """What a checkpoint holds; ``train_state`` is what the loop rolls back.

    ``update_counts`` are the optimizer's steps, by parameter.
    """

    serial: int
    world_size: int
    config_digest: str
    data_fingerprint: str
    update_counts: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    runs: Mapping[str, tuple[PieceRun, ...]]
    files: Mapping[str, FileFacts]
    dtypes: Mapping[str, str] = field(default_factory=dict)  # those not FP32

    def dtype(self, name: str) -> str:
        """Torch's name of a tensor's type."""
        return self.dtypes.get(name, FLOAT32)

    def numel(self, name: str) -> int:
        """Number of elements of a tensor; 0 if there is none of this name."""
        return math.prod(self.shapes[name]) if name in self.shapes else 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in (*_COUNTS, *_TEXTS)},
            "train_state": self.train_state,
            "update_counts": self.update_counts,
            "tensors": {
                name: {
                    "shape": list(shape),
                    **({"dtype": self.dtypes[name]} if name in self.dtypes else {}),
                    "runs": [run.to_json() for run in self.runs[name]],
                }
                for name, shape in self.shapes.items()
            },
            "files": {name: facts.to_json() for name, facts in self.files.items()},
        }


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """Parse and check a manifest; ``path`` is for the message.

    Raises:
        CorruptCheckpoint: not JSON, another format, or it does not add up.
    """
    try:
        manifest = _from_json(parse_json(data))
        _check(manifest)
    except Exception as error:  # damage may take any form; json and int() raise many kinds
        cause = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(f"{path}: {cause[:_WORDS]}") from None
    return manifest


def _from_json(tree: Any) -> Manifest:
    if (tree["format"], tree["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"format {tree['format']} version {tree['version']}, not {FORMAT} version {VERSION}; "
            "finish the run with the version of holdfast that began it"
        )
    refuse_flagged(tree)
    tensors = tree["tensors"]
    num_data = sum(not is_index(name) for name in tree["files"])
    return Manifest(
        **parse_fields(tree, counts=_COUNTS, texts=_TEXTS),
        shapes={n: tuple(whole(s, "shape") for s in t["shape"]) for n, t in tensors.items()},
        runs={
            name: tuple(PieceRun.from_json(run, num_files=num_data) for run in tensor["runs"])
            for name, tensor in tensors.items()
        },
        files={name: FileFacts.from_json(facts) for name, facts in tree["files"].items()},
        dtypes={n: _type(t["dtype"]) for n, t in tensors.items() if "dtype" in t},
    )


def parse_fields(tree: Any, *, counts: Iterable[str], texts: Iterable[str]) -> dict[str, Any]:
    """Check the fields of a manifest, or of a snapshot's header, that describe no bytes.

    Raises:
        ValueError, TypeError, KeyError: one is missing, or something else.
    """
    return {
        **{name: whole(tree[name], name) for name in counts},
        **{name: str(tree[name]) for name in texts},
        "train_state": dict(tree["train_state"]),
        "update_counts": {k: whole(v, "update count") for k, v in tree["update_counts"].items()},
    }


def _type(name: Any) -> str:
    if name not in ITEM_SIZES:
        raise ValueError(f"{str(name)[:80]!r} is no type of a tensor")
    return str(name)


def _check(manifest: Manifest) -> None:
    for name, facts in manifest.files.items():
        # The name is joined to a path: only our own pattern may pass.
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r}")
        if facts.num_bytes % ITEM_BYTES and not is_index(name) and not manifest.dtypes:
            raise ValueError(f"{name}: {facts.num_bytes} bytes are no whole number of elements")
    for name, shape in manifest.shapes.items():
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"{name}: {len(shape)} dimensions")
    for name, runs in manifest.runs.items():
        intervals = [interval for run in runs for interval in run.intervals()]
        check_coverage(name, manifest.numel(name), intervals)
    ranks = range(len(manifest.files) // 2)
    if manifest.files.keys() != {n(rank) for rank in ranks for n in (data_name, index_name)}:
        raise ValueError(f"files: not those of {len(ranks)} ranks, each with an index")
    # The files together must have the right size; the indexes assign their bytes.
    needed = sum(
        manifest.numel(name) * ITEM_SIZES[manifest.dtype(name)] for name in manifest.shapes
    )
    stored = sum(f.num_bytes for name, f in manifest.files.items() if not is_index(name))
    if needed != stored:
        raise ValueError(f"files: {stored} bytes for tensors of {needed}")
