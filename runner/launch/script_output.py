"""Copies a script's output, and finds progress and fatal errors in it."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from runner.system.output import Sink

# "step 12", "iter: 12", "global_step=12", "12/500 [" as progress bars have it.
PROGRESS = r"(?i)\b(?:global_)?(?:step|iter|iteration)s?\b\D{0,3}(\d+)|\b(\d+)/\d+ \["
_MOST_LINES = 5000
_MOST_LINE = 1 << 14
_RANK = re.compile(r"^\[(?:rank)?(\d+)\]:\s?")
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d+), in (\S+)')
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
_FAILED = re.compile(
    r"rank\s+: (\d+) \(local_rank: \d+\)[^\n]*\n[^\n]*exitcode\s+: (-?\d+) \(pid: \d+\)"
)
_TRACEBACK = "Traceback (most recent call last):"


class Said:
    """Reads a pipe in a thread and copies it to standard output.

    Args:
        descriptor: the pipe's reading end; closed when the pipe ends.
        progress: a pattern whose first matching group is the step.
    """

    def __init__(self, descriptor: int, progress: str) -> None:
        self.step = -1  # the highest seen so far
        self.heard = time.monotonic()
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.num_lines = 0
        self._progress = re.compile(progress)
        self._descriptor = descriptor
        self._sink = Sink(1, "standard output")
        self._rest = b""
        self._thread = threading.Thread(target=self._read, name="said", daemon=True)
        self._thread.start()

    def finish(self, seconds: float = 2.0) -> None:
        """Read what is still in the pipe."""
        self._thread.join(seconds)
        self._sink.drain(seconds)

    def since(self, number: int) -> list[str]:
        """The lines from ``number`` on."""
        have = list(self.lines)
        return have[max(0, len(have) - (self.num_lines - number)) :]

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 1 << 16)
            except OSError:
                break
            if not data:
                break
            self.heard = time.monotonic()
            self._sink.put(data)
            self._take(data)
        self._take(b"\n")
        os.close(self._descriptor)

    def _take(self, data: bytes) -> None:
        # A progress bar goes back to the line's beginning.
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _MOST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for raw in lines:
            line = raw[:_MOST_LINE].decode(errors="replace")
            if not line.strip():
                continue
            self.lines.append(line)
            self.num_lines += 1
            for match in self._progress.finditer(line):
                number = next((group for group in match.groups() if group), "")
                if number.isdecimal() and len(number) < 16:
                    self.step = max(self.step, int(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """An exception that was printed; ``rank`` is None where nothing says whose it is.

    ``frames`` are (file, line, function), outermost first.
    """

    rank: int | None
    kind: str
    message: str
    frames: tuple[tuple[str, int, str], ...]

    @property
    def is_launchers(self) -> bool:
        """Whether it is torchrun's own exception, which says only that a rank failed."""
        return self.kind.endswith("ChildFailedError")


def tracebacks(lines: Sequence[str]) -> list[Printed]:
    """The exceptions in these lines, in order."""
    printed: list[Printed] = []
    open_: dict[int | None, list[tuple[str, int, str]]] = {}
    for line in lines:
        mark = _RANK.match(line)
        rank = int(mark[1]) if mark else None
        text = line[mark.end() :] if mark else line
        if _TRACEBACK in text:
            open_[rank] = []
        elif rank in open_:
            frame = _FRAME.match(text)
            if frame:
                open_[rank].append((frame[1], int(frame[2]), frame[3]))
            elif text[:1].strip() and (error := _ERROR.match(text)):
                frames = tuple(open_.pop(rank))
                message = error[2] or ""
                printed.append(Printed(rank=rank, kind=error[1], message=message, frames=frames))
    return printed


def failures(lines: Sequence[str]) -> list[tuple[int, int]]:
    """(rank, exit code) of torchrun's own summary; the first observed failure comes first."""
    text = "\n".join(lines)
    rest, _, root = text.rpartition("Root Cause (first observed failure)")
    codes = [(int(rank), int(code)) for rank, code in _FAILED.findall(root)]
    codes += [(int(rank), int(code)) for rank, code in _FAILED.findall(rest)]
    return list(dict.fromkeys(codes))
