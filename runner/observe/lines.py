"""A file of JSON lines that survives a crash: appended whole, a torn last line mended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from runner.files import sync_directory

_BLOCK_BYTES = 1 << 20


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file and their length in bytes; see :func:`iter_lines`."""
    found: list[dict[str, Any]] = []
    length = 0
    for line, end in _whole_lines(path, 0):
        found.append(line)
        length = end
    return found, length


def iter_lines(path: Path, *, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """The whole lines between two positions in bytes, each the begin of a line, one at a time.

    Reading ends at the first line that is torn or no JSON object: a crash can only tear the
    end, and what comes after a torn line was never acknowledged.
    """
    for line, end in _whole_lines(path, start):
        if stop is not None and end > stop:
            return
        yield line


def _whole_lines(path: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Each line with the position in bytes at which it ends."""
    if not path.exists():
        return
    end = start
    with path.open("rb") as file:
        file.seek(start)
        for raw in file:
            try:
                line = json.loads(raw) if raw.endswith(b"\n") else None
            except (ValueError, RecursionError):
                line = None
            if not isinstance(line, dict):
                return
            end += len(raw)
            yield line, end


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
