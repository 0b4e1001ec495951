"""The header of a snapshot in a slot: written after the data, removed before it.

A process can end between any two of its writes; a slot without a header holds nothing. The
first line is the SHA-256 of the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.checkpoint.memory.shared_buffer import open_own
from runner.system.error import CorruptCheckpoint
from runner.system.parsing import json_text, refuse_flagged, whole

FORMAT = "holdfast-snapshot"
VERSION = 2  # version 1 had ``sha256`` in place of ``digest``
_MOST_BYTES = 1 << 27
_WORDS = 300
_TEXTS = ("layout", "config_digest", "data_fingerprint", "digest")
_NUMBERS = (
    "incarnation", "serial", "step", "cursor", "rank", "world_size", "metrics_bytes",
    "journal_lines", "num_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """What a slot holds. ``layout`` is a digest of the places of all tensors' elements in it.

    ``digest`` is :meth:`runner.checkpoint.memory.shared_buffer.SharedBuffer.digest`.
    """

    incarnation: int
    serial: int
    step: int
    cursor: int
    rank: int
    world_size: int
    layout: str
    config_digest: str
    data_fingerprint: str
    metrics_bytes: int
    journal_lines: int
    train_state: Mapping[str, Any]
    update_counts: Mapping[str, int]
    num_bytes: int
    digest: str

    def is_told(self, metrics_bytes: int, journal_lines: int) -> bool:
        """Whether files of these lengths contain all lines written before the snapshot."""
        return self.metrics_bytes <= metrics_bytes and self.journal_lines <= journal_lines

    def to_bytes(self) -> bytes:
        """The header as bytes, after their digest."""
        tree = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json_text(tree).encode()
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def write_header(path: Path, data: bytes) -> None:
    """Write a header atomically for other processes; a power cut loses the memory too."""
    temporary = path.with_suffix(".tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
    temporary.rename(path)


def read_header(path: Path) -> tuple[SnapshotHeader, bytes]:
    """Read a header; returns it and its bytes.

    Raises:
        CorruptCheckpoint: it is damaged, or not a header of ours.
        FileNotFoundError: there is none.
    """
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        return parse_header(data), data
    except FileNotFoundError:
        raise
    except Exception as error:  # damage may take any form
        cause = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(f"{path}: {cause[:_WORDS]}") from None


def parse_header(data: bytes) -> SnapshotHeader:
    """
    Raises:
        ValueError, TypeError, KeyError: it is not what :meth:`SnapshotHeader.to_bytes` returns.
    """
    promised, _, text = data.partition(b"\n")
    if len(data) > _MOST_BYTES or promised != hashlib.sha256(text).hexdigest().encode():
        raise ValueError("its digest differs from what is written")
    tree: Any = json.loads(text)
    json.dumps(tree, allow_nan=False)  # NaN, Infinity or 1e999 could not be written again
    if tree["version"] == 1:
        tree |= {"version": VERSION, "digest": "sha256:" + str(tree["sha256"])}
    if (tree["format"], tree["version"]) != (FORMAT, VERSION):
        raise ValueError(f"is of format {tree['format']} {tree['version']}")
    refuse_flagged(tree)
    simple: dict[str, Any] = {name: whole(tree[name], name) for name in _NUMBERS}
    simple |= {name: str(tree[name]) for name in _TEXTS}
    return SnapshotHeader(
        **simple,
        train_state=dict(tree["train_state"]),
        update_counts={k: whole(v, "update count") for k, v in tree["update_counts"].items()},
    )
