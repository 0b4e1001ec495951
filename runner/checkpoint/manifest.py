"""The manifest of a checkpoint: one JSON object that names every byte of it.

Flat shards keyed by (tensor name, flat start, count), so that any engine and any world size can
read what another wrote. All input from disk is checked before it is used.

A list of every piece would grow with ranks times tensors: the manifest says in runs in which
files they lie (:mod:`runner.checkpoint.layout`), and each rank's file has an index beside it; a
rank reads the indexes that it needs (:mod:`runner.checkpoint.disk.index`). Elements are FP32 where
no other type is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from runner.checkpoint.layout import PieceRun, check_coverage
from runner.checkpoint.protocol import CheckpointMetadata
from runner.system.error import CorruptCheckpoint
from runner.system.parsing import parse_json, refuse_flagged, whole

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
