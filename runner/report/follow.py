"""Reads a file of JSON lines from where the last look ended. A torn last line waits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.system.files import open_regular

_BLOCK_BYTES = 1 << 22
_LINE_BYTES = 1 << 24  # no line of ours comes near


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


class Follower:
    """One file of JSON lines that another process appends to, cuts or replaces.

    Attributes:
        num_damaged: whole lines that are no JSON object.
        offset: bytes of whole lines that were read.
        size: of the file at the last look, in bytes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.begin_anew()

    def begin_anew(self) -> None:
        """Read from the file's begin."""
        self.offset = 0
        self.size = 0
        self.num_damaged = 0
        self._file_id: tuple[int, int] | None = None

    def was_replaced(self) -> bool:
        """Whether what was read is no longer a part of the file: a restart cuts it."""
        try:
            found = os.stat(self._path)
        except OSError:
            return self._file_id is not None
        same = self._file_id in (None, (found.st_dev, found.st_ino))
        return not same or found.st_size < self.offset

    def lines(self) -> Iterator[dict[str, Any]]:
        """The whole lines behind what was read, one at a time; none where there is no file.

        Raises:
            OSError: it is no plain file, or cannot be read.
        """
        try:
            file = open_regular(self._path, follow=True)
        except FileNotFoundError:
            return
        with file:
            found = os.fstat(file.fileno())
            self._file_id = (found.st_dev, found.st_ino)
            self.size = found.st_size
            file.seek(self.offset)
            begun = b""
            while block := file.read(_BLOCK_BYTES):
                whole, newline, begun = (begun + block).rpartition(b"\n")
                for raw in whole.split(b"\n") if newline else ():
                    self.offset += len(raw) + 1
                    line = _parsed(raw)
                    if line is None:
                        self.num_damaged += bool(raw.strip())
                    else:
                        yield line
                if len(begun) > _LINE_BYTES:
                    raise OSError(f"{self._path}: has a line of more than {_LINE_BYTES} bytes")


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = _DECODER.decode(raw.decode())
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
