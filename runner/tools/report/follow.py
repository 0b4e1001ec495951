"""Reads a file of JSON lines as it grows; an incomplete last line is read later."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.system.files import open_regular
from runner.system.json_lines import LINE_BYTES, parse_line


class Follower:
    """One file of JSON lines that another process appends to, truncates or replaces.

    Attributes:
        num_damaged: complete lines that are not a JSON object.
        offset: bytes of complete lines read so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.restart()

    def restart(self) -> None:
        """Read from the start of the file again."""
        self.offset = 0
        self.num_damaged = 0
        self._file_id: tuple[int, int] | None = None

    def was_replaced(self) -> bool:
        """Whether the file was replaced or truncated since; a restart truncates it."""
        try:
            status = os.stat(self.path)
        except OSError:
            return self._file_id is not None
        is_same_file = self._file_id in (None, (status.st_dev, status.st_ino))
        return not is_same_file or status.st_size < self.offset

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the complete lines that are new; none if the file does not exist.

        Raises:
            OSError: it is not a regular file, or cannot be read.
        """
        try:
            file = open_regular(self.path, follow=True)
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            self._file_id = (status.st_dev, status.st_ino)
            file.seek(self.offset)
            while (raw := file.readline(LINE_BYTES + 1)).endswith(b"\n"):
                self.offset += len(raw)
                line = parse_line(raw)
                if line is not None:
                    yield line
                else:
                    self.num_damaged += bool(raw.strip())
            if len(raw) > LINE_BYTES:
                raise OSError(f"{self.path}: has a line of more than {LINE_BYTES} bytes")


def number(value: Any) -> float:
    """A finite number; NaN for anything else."""
    if type(value) is not float and type(value) is not int:
        return math.nan
    try:
        converted = float(value)
    except OverflowError:
        return math.nan
    return converted if math.isfinite(converted) else math.nan


def whole(value: Any) -> int:
    """A count; 0 for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 53 else 0
