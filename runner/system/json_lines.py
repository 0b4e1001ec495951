"""A file of JSON lines that survives a crash: whole lines are appended, a torn last one is cut."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from runner.system.error import ConfigError
from runner.system.files import naming, open_regular, read_bounded, replace_for_writing
from runner.system.parsing import json_text, parse_json

LINE_BYTES = 1 << 24  # far more than any line of ours
_TAIL_BYTES = 1 << 16  # some hundred lines
# A disk that refuses writes is tried again after this long.
_RETRY_SECONDS = 1.0
# Lines that may not be on the disk yet are held, at most this many bytes.
_UNSYNCED_BYTES = 1 << 20
_NO_FILE = (errno.EINVAL, errno.EACCES, errno.EPERM, errno.ELOOP)


def read_lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file, and where the last of them ends; see :func:`iter_lines`."""
    lines = list(_whole_lines(path, start))
    return [line for line, _ in lines], lines[-1][1] if lines else start


def iter_lines(path: Path, *, start: int = 0, stop: int | None = None) -> Iterator[dict[str, Any]]:
    """The whole lines between two positions in bytes, each the begin of a line, one at a time.

    Reading ends at the first line that is torn or not a JSON object: a crash can only tear the
    end, and what comes after a torn line was never acknowledged.

    Raises:
        ConfigError: it is not a plain file, or may not be read.
    """
    for line, end in _whole_lines(path, start):
        if stop is not None and end > stop:
            return
        yield line


def _whole_lines(path: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Each line with the position in bytes at which it ends."""
    end = start
    with naming(path), _open(path) as file:
        file.seek(start)
        while raw := file.readline(LINE_BYTES):
            line = _parsed(raw)
            if line is None:
                return
            end += len(raw)
            yield line, end


def lines_after(path: Path, length: int) -> int:
    """How many whole lines follow the first one after byte ``length``."""
    with naming(path), _open(path) as file:
        file.seek(length)
        file.readline()
        return sum(_parsed(raw) is not None for raw in iter(lambda: file.readline(LINE_BYTES), b""))


def last_line(path: Path) -> dict[str, Any] | None:
    """The last line that :func:`iter_lines` would yield, read from the end; None without any.

    Damaged lines before that one are not noticed.

    Raises:
        ConfigError: as :func:`iter_lines`.
    """
    lines = last_lines(path)
    return lines[-1] if lines else None


def last_lines(path: Path) -> list[dict[str, Any]]:
    """Some of the last lines, as :func:`last_line`; none only if there is none."""
    size, behind = path.stat().st_size if path.exists() else 0, _TAIL_BYTES
    while not (lines := tail(path, behind)[0]) and behind < size:
        behind *= 4
    return lines


def tail(path: Path, num_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines in the last ``num_bytes``, and where the last of them ends.

    Raises:
        ConfigError: as :func:`iter_lines`.
    """
    with naming(path), _open(path) as file:
        start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
        if start:
            file.seek(start - 1)  # a line may begin right there
            file.readline(LINE_BYTES)
            start = file.tell()
    return read_lines(path, start)


def step_of(line: dict[str, Any]) -> int:
    """A metrics line's step; 0 where it has none."""
    return count_of(line, "step")


def count_of(line: dict[str, Any], name: str) -> int:
    """A whole number of a line; 0 where it has none."""
    value = line.get(name)
    return value if type(value) is int and 0 <= value < 1 << 63 else 0


def _open(path: Path) -> BinaryIO:
    """A file to read; nothing is in one that does not exist."""
    try:
        return open_regular(path, follow=True)
    except (FileNotFoundError, NotADirectoryError):
        return io.BytesIO()
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); move it away") from None
        raise


def _parsed(raw: bytes) -> dict[str, Any] | None:
    return parse_line(raw) if raw.endswith(b"\n") else None


def read_object(path: Path, limit: int, *, follow: bool = False) -> dict[str, Any]:
    """The JSON object in a file of at most ``limit`` bytes; empty where none can be read."""
    try:
        return parse_line(read_bounded(path, limit, follow=follow)) or {}
    except OSError:
        return {}


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The object of one line; None if it is damaged."""
    try:
        line = parse_json(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLines:
    """Lines that wait in memory: how many, since when, and the system's error."""

    num_lines: int
    num_bytes: int
    seconds: float
    error: str


class LineFile:
    """Appends JSON lines after the first ``length`` bytes; the rest is dropped.

    Opening it is :func:`runner.system.files.replace_for_writing`: a process of an earlier
    incarnation that still has the old file open writes to an unlinked one.

    A disk that refuses a line (it is full, or away) is no error here: the line and those after it
    are kept, in order, and tried again with the next ones. :attr:`kept` shows it, and the
    owner decides how long that may last. The file holds whole lines only. Any
    thread may call: a crash is journalled by another thread than the training thread.

    Args:
        check: raises when this process may not write here any more.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        length: int,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self._check, self._clock = path, check, clock
        self._waiting: deque[bytes] = deque()
        self._unsynced: deque[bytes] = deque()  # written, but lost if the disk fails now
        self._waiting_bytes = self._unsynced_bytes = 0
        self._trouble: tuple[float, str] | None = None
        self._next_try = 0.0
        self._lock = threading.Lock()
        self._is_torn = self._is_distrusted = False
        self._open(length)

    def _open(self, length: int) -> None:
        replace_for_writing(self.path, length=length, check=self._check)
        with naming(self.path):
            self._file = self.path.open("ab", buffering=0)
            self._whole = self._durable = os.fstat(self._file.fileno()).st_size

    def append(self, line: Mapping[str, Any], *, durably: bool) -> None:
        """Append one line; ``durably`` returns only when it is on the disk, or kept."""
        data = json_text(line).encode() + b"\n"
        with self._lock:
            self._waiting.append(data)
            self._waiting_bytes += len(data)
            if self._trouble is None or self._clock() >= self._next_try:
                self._try(durably=durably)

    @property
    def kept(self) -> KeptLines | None:
        """The lines that wait in memory; None when all are in the file."""
        trouble = self._trouble
        if trouble is None:
            return None
        return KeptLines(
            num_lines=len(self._waiting) + (len(self._unsynced) if self._is_distrusted else 0),
            num_bytes=self._waiting_bytes + self._unsynced_bytes,
            seconds=self._clock() - trouble[0],
            error=trouble[1],
        )

    def retry(self) -> None:
        """Try to write the kept lines, if the last attempt is long enough ago."""
        if self._trouble is None or self._clock() < self._next_try:
            return
        with self._lock:
            self._try(durably=True)

    def num_bytes(self) -> int:
        """Length in bytes, with kept lines; a crash of the machine may leave less."""
        return self._whole + self._waiting_bytes

    def sync(self) -> int:
        """Sync as far as the disk allows; returns the length as :attr:`num_bytes`."""
        with self._lock:
            if not self._file.closed:
                self._try(durably=True)
            return self.num_bytes()

    def close(self) -> None:
        """Close after a last attempt. Lines still kept are lost; :attr:`kept` shows them."""
        with self._lock:
            if self._file.closed:
                return
            self._try(durably=True)
            with contextlib.suppress(OSError):
                self._file.close()

    def _try(self, *, durably: bool) -> None:
        try:
            with naming(self.path):
                self._write(durably=durably)
        except OSError as error:
            self._is_distrusted |= error.errno == errno.ESTALE  # the descriptor is lost for ever
            now = self._clock()
            since = now if self._trouble is None else self._trouble[0]
            self._trouble = since, str(error)
            self._next_try = now + _RETRY_SECONDS
        else:
            self._trouble = None

    def _write(self, *, durably: bool) -> None:
        if self._is_distrusted:
            self._begin_anew()
        while self._waiting:
            data = self._waiting[0]
            self._write_whole(data)
            self._waiting.popleft()
            self._waiting_bytes -= len(data)
            self._unsynced.append(data)
            self._unsynced_bytes += len(data)
        # Also after errors, which may have left the file in a bad state.
        if durably or self._trouble is not None or self._unsynced_bytes > _UNSYNCED_BYTES:
            self._sync()

    def _write_whole(self, data: bytes) -> None:
        """Write the whole line or nothing."""
        if self._is_torn:
            self._file.truncate(self._whole)
            self._is_torn = False
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) :]
            self._file.flush()
        except OSError:
            self._is_torn = True
            with contextlib.suppress(OSError):
                self._file.truncate(self._whole)
                self._is_torn = False
            raise
        self._whole += len(data)

    def _sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError:
            # The kernel may have dropped what was not on the disk, and will not say so again.
            self._is_distrusted = True
            raise
        self._durable = self._whole
        self._unsynced.clear()
        self._unsynced_bytes = 0

    def _begin_anew(self) -> None:
        """Begin a fresh file with what is known to be on the disk; write the rest again."""
        old = self._file
        self._open(self._durable)
        with contextlib.suppress(OSError):
            old.close()
        self._waiting.extendleft(reversed(self._unsynced))
        self._waiting_bytes += self._unsynced_bytes
        self._unsynced.clear()
        self._unsynced_bytes = 0
        self._is_distrusted = self._is_torn = False


# Tracks lines that wait in memory while their files cannot be written, and limits the time.
#
# Rank 0 writes the files, so it alone has lines to keep; the step's agreement tells the others.

_MOST_BYTES = 64 << 20  # some hundred thousand lines


@dataclass(eq=False)
class Backlog:
    """The files of one run; empty on ranks that write none.

    Args:
        patience_seconds: how long lines are kept before the run is asked to stop.
        ask_to_stop: takes the reason.
        from_first: collective; rank 0's JSON value, on every rank.
        say: prints one line for a person.
    """

    patience_seconds: float
    ask_to_stop: Callable[[str], None]
    from_first: Callable[[str], str]
    say: Callable[[str], None]
    _files: list[LineFile] = field(default_factory=list)
    _has_asked: bool = False
    _message: str = ""

    def add(self, file: LineFile | None) -> None:
        """Track this file as well."""
        if file is not None:
            self._files.append(file)

    def look(self) -> bool:
        """Whether this rank keeps lines in memory. Called once a step."""
        for file in self._files:
            file.retry()
        waiting = [kept for _, kept in self._kept()]
        if not waiting:
            return False
        self._message = "; ".join(kept.error for kept in waiting)
        seconds = max(kept.seconds for kept in waiting)
        is_full = sum(kept.num_bytes for kept in waiting) > _MOST_BYTES
        if (seconds > self.patience_seconds or is_full) and not self._has_asked:
            self._has_asked = True
            self.ask_to_stop(
                f"lines are kept in memory for {seconds:.0f} s "
                f"(track.unwritten_seconds={self.patience_seconds:g}): {self._message}"
            )
        return True

    def message(self) -> str:
        """The system's last error on rank 0. Collective."""
        return self.from_first(self._message)

    def standing(self) -> str:
        """That error if rank 0 keeps lines now; else empty. Collective."""
        return self.from_first(self._message if self.look() else "")

    def require_written(self) -> None:
        """Check that all lines are written: a checkpoint must not be published without them.

        Raises:
            OSError: some are kept in memory only.
        """
        for file, one in self._kept():
            raise OSError(
                f"{one.num_lines} lines of {file.path} are kept in memory only ({one.error})"
            )

    def finish(self) -> None:
        """Try once more, and report what is lost."""
        for file in self._files:
            file.sync()
        for file, one in self._kept():
            self.say(f"warning: {one.num_lines} lines of {file.path} are lost: {one.error}")

    def _kept(self) -> list[tuple[LineFile, KeptLines]]:
        return [(file, kept) for file in self._files if (kept := file.kept) is not None]
