"""Ends the processes of a test session, however the session ends: also by SIGKILL or a time-out.

Every process that a test starts inherits a mark in its environment. This one waits for the end of
the session's pipe, and then kills whatever still has the mark. ``python -S -E reaper.py MARK DIR``
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

MARK = "HOLDFAST_TEST_SESSION"
_LIMIT_SECONDS = 10.0


def marked(mark: str, name: str = MARK) -> set[int]:
    """Processes, other than this one, that have inherited ``mark`` and have not ended."""
    wanted = f"{name}={mark}".encode()
    pids = set()
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.add(int(folder.name))
        except OSError:  # it has just ended, or is another user's
            continue
    return pids - {os.getpid()}


def end_marked(mark: str, *, spare: frozenset[int] = frozenset()) -> set[int]:
    """Send SIGKILL until no process is left, also those that are started meanwhile.

    Returns:
        those that were still alive at the first look.
    """
    first = remaining = marked(mark) - spare
    limit = time.monotonic() + _LIMIT_SECONDS
    while remaining and time.monotonic() < limit:
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
        remaining = marked(mark) - spare
    return first


def main() -> None:
    """Wait for the session's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the session
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_marked(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()
