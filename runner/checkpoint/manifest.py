"""The manifest of a checkpoint: one JSON object that names every byte of it.

Flat FP32 shards keyed by (tensor name, flat start, count), so that any engine and any world
size can read what another wrote. Whatever is read from disk is checked before it is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.error import CorruptCheckpoint

FORMAT = "holdfast-ring"
VERSION = 1
ITEM_BYTES = 4  # FP32, little endian
_FILE_NAME = re.compile(r"rank-\d{5}\.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``count`` elements from ``start`` on of one flattened tensor, at ``offset`` bytes."""

    start: int
    count: int
    file: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``train_state`` is what the loop rolls back; ``update_counts`` the optimizer's steps."""

    serial: int
    step: int
    cursor: int
    world_size: int
    config_digest: str
    data_fingerprint: str
    metrics_bytes: int
    journal_lines: int
    train_state: Mapping[str, Any]
    update_counts: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, tuple[Piece, ...]]
    files: Mapping[str, FileFacts]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "serial": self.serial,
            "step": self.step,
            "cursor": self.cursor,
            "world_size": self.world_size,
            "config_digest": self.config_digest,
            "data_fingerprint": self.data_fingerprint,
            "metrics_bytes": self.metrics_bytes,
            "journal_lines": self.journal_lines,
            "train_state": self.train_state,
            "update_counts": self.update_counts,
            "tensors": {
                name: {
                    "shape": list(shape),
                    "pieces": [[p.start, p.count, p.file, p.offset] for p in self.pieces[name]],
                }
                for name, shape in self.shapes.items()
            },
            "files": {
                name: {"bytes": facts.num_bytes, "sha256": facts.sha256}
                for name, facts in self.files.items()
            },
        }


def read_manifest(path: Path) -> Manifest:
    """Parse and check a manifest.

    Raises:
        CorruptCheckpoint: not JSON, another format, or it does not add up.
    """
    try:
        tree = json.loads(path.read_bytes())
        made = _from_json(tree)
        _check(made)
    except Exception as error:  # damage may take any form; json and int() raise many kinds
        raise CorruptCheckpoint(f"{path}: {type(error).__name__}: {error}") from None
    return made


def _from_json(tree: Any) -> Manifest:
    if tree["format"] != FORMAT or tree["version"] != VERSION:
        raise ValueError(f"format {tree['format']} version {tree['version']}; need {FORMAT} 1")
    tensors = tree["tensors"]
    return Manifest(
        serial=int(tree["serial"]),
        step=int(tree["step"]),
        cursor=int(tree["cursor"]),
        world_size=int(tree["world_size"]),
        config_digest=str(tree["config_digest"]),
        data_fingerprint=str(tree["data_fingerprint"]),
        metrics_bytes=int(tree["metrics_bytes"]),
        journal_lines=int(tree["journal_lines"]),
        train_state=dict(tree["train_state"]),
        update_counts={str(k): int(v) for k, v in tree["update_counts"].items()},
        shapes={str(n): tuple(int(s) for s in t["shape"]) for n, t in tensors.items()},
        pieces={str(n): tuple(_piece(p) for p in t["pieces"]) for n, t in tensors.items()},
        files={
            str(name): FileFacts(num_bytes=int(facts["bytes"]), sha256=str(facts["sha256"]))
            for name, facts in tree["files"].items()
        },
    )


def _piece(values: Any) -> Piece:
    start, count, file, offset = values
    return Piece(start=int(start), count=int(count), file=str(file), offset=int(offset))


def _check(manifest: Manifest) -> None:
    for name in manifest.files:
        # The name is joined to a path: nothing but our own pattern may pass.
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r}")
    for name, pieces in manifest.pieces.items():
        shape = manifest.shapes[name]
        if min(shape, default=0) < 0:
            raise ValueError(f"{name}: negative shape {list(shape)}")
        _check_coverage(name, math.prod(shape), pieces)
        for piece in pieces:
            end = piece.offset + piece.count * ITEM_BYTES
            if piece.offset < 0 or end > manifest.files[piece.file].num_bytes:
                raise ValueError(f"{name}: piece outside {piece.file}")


def _check_coverage(name: str, numel: int, pieces: tuple[Piece, ...]) -> None:
    at = 0
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if piece.start != at or piece.count < 1:
            raise ValueError(f"{name}: elements from {at} on are missing or doubled")
        at += piece.count
    if at != numel:
        raise ValueError(f"{name}: {at} of {numel} elements")
