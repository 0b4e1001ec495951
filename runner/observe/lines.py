"""A file of JSON lines that survives a crash: appended whole, a torn last line mended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from runner.files import sync_directory

_BLOCK_BYTES = 1 << 20


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file and their length in bytes.

    Reading ends at the first line that is torn or no JSON object: a crash can only tear the
    end, and what comes after a torn line was never acknowledged.
    """
    if not path.exists():
        return [], 0
    found: list[dict[str, Any]] = []
    length = 0
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                break
            found.append(line)
            length += len(raw)
    return found, length


class LineFile:
    """Appends JSON lines after ``length`` bytes; what lies behind is left out.

    The file is made anew and put in the old one's place: a process of an earlier incarnation
    that still has the old one open writes to a file that is no longer there.
    """

    def __init__(self, path: Path, *, length: int) -> None:
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as fresh:
            if path.exists():
                with path.open("rb") as old:
                    _copy(old, fresh, length)
            fresh.flush()
            os.fsync(fresh.fileno())
        temporary.rename(path)
        sync_directory(path.parent)
        self._file = path.open("ab")

    def append(self, line: dict[str, Any], *, durably: bool) -> None:
        """Add one line; ``durably`` returns only when it is on the disk."""
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if durably:
            os.fsync(self._file.fileno())

    def sync(self) -> int:
        """Make everything durable; returns the length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def _copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
    """The first ``length`` bytes."""
    while length > 0 and (block := source.read(min(length, _BLOCK_BYTES))):
        target.write(block)
        length -= len(block)
