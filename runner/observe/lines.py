"""A file of JSON lines that survives a crash: appended whole, a torn last line mended."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from runner.error import ConfigError
from runner.files import naming, open_regular, replace_for_writing
from runner.strict import parse_json

_LINE_BYTES = 1 << 24  # no line of ours comes near
_TAIL_BYTES = 1 << 16  # some hundred lines
_NO_FILE = (errno.EINVAL, errno.EACCES, errno.EPERM, errno.ELOOP)


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

    Raises:
        ConfigError: it is no plain file, or may not be read.
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
    with naming(path), _open(path) as file:
        file.seek(start)
        while raw := file.readline(_LINE_BYTES):
            line = _parsed(raw)
            if line is None:
                return
            end += len(raw)
            yield line, end


def lines_after(path: Path, length: int) -> int:
    """How many whole lines there are behind the first one from byte ``length`` on."""
    if not path.exists():
        return 0
    with naming(path), _open(path) as file:
        file.seek(length)
        file.readline()
        return sum(
            _parsed(raw) is not None for raw in iter(lambda: file.readline(_LINE_BYTES), b"")
        )


def last_line(path: Path) -> dict[str, Any] | None:
    """The last line that :func:`iter_lines` gives, read from the end; None without any.

    A line that is damaged further back than the first whole one it comes to is not noticed.

    Raises:
        ConfigError: as :func:`iter_lines`.
    """
    if not path.exists():
        return None
    size = path.stat().st_size
    behind = _TAIL_BYTES
    while True:
        last = deque(_whole_lines(path, _line_after(path, size - behind)), maxlen=1)
        if last:
            return last[0][0]
        if behind >= size:
            return None
        behind *= 4


def _line_after(path: Path, position: int) -> int:
    """Where the first line begins that does not begin before ``position``."""
    if position <= 0:
        return 0
    with naming(path), _open(path) as file:
        file.seek(position - 1)  # a line may begin right at the position
        file.readline(_LINE_BYTES)
        return file.tell()


def step_of(line: dict[str, Any]) -> int:
    """A metrics line's step; 0 where it has none."""
    step = line.get("step")
    return step if type(step) is int and 0 <= step < 1 << 63 else 0


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path, follow=True)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); move it away") from None
        raise


def _parsed(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        line = parse_json(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


class LineFile:
    """Appends JSON lines after ``length`` bytes; what lies behind is left out.

    Opening it is :func:`runner.files.replace_for_writing`: a process of an earlier incarnation
    that still has the old file open writes to one that is no longer there.

    Args:
        check: raises when this process may not write here any more.
    """

    def __init__(
        self, path: Path, *, length: int, check: Callable[[], None] = lambda: None
    ) -> None:
        replace_for_writing(path, length=length, check=check)
        self._path = path
        with naming(path):
            self._file = path.open("ab")

    def append(self, line: dict[str, Any], *, durably: bool) -> None:
        """Add one line; ``durably`` returns only when it is on the disk."""
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        with naming(self._path):
            self._file.write(data)
            self._file.flush()
            if durably:
                os.fsync(self._file.fileno())

    def num_bytes(self) -> int:
        """Length in bytes; a crash of the machine may leave less."""
        return self._file.tell()

    def sync(self) -> int:
        """Make everything durable; returns the length in bytes."""
        with naming(self._path):
            os.fsync(self._file.fileno())
            return self._file.tell()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()
