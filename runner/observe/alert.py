"""``track.command``: runs the user's command for each incident. Nothing waits for it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.observe.console import is_calm, level_of
from runner.system.output import Loss, Outlet
from runner.system.parsing import json_text
from runner.system.process import host_name

OUTLET = "track.command"
_COMMAND_SECONDS = 30.0
_MOST_WAITING = 200
_TAIL = 300  # characters of the command's output
# How long a process that ends waits for its last commands: to begin, and to end.
_BEGIN_SECONDS, _END_SECONDS = 2.0, 5.0
_POLL_SECONDS = 0.01
# The process that journals these may be gone a moment later.
_LAST = frozenset({"crash", "halt", "preempted", "failed"})


class CommandAlerts:
    """Runs a shell command for each incident, one after the other, in a thread of its own.

    The journal line is on its standard input, one JSON object with ``out``, ``host``, ``level`` and
    ``text`` (a sentence) beside the line's own fields. It runs in a session of its own, so it
    outlives a process that ends, and is killed after 30 seconds. Its output is dropped.

    Args:
        out: the run's directory.
    """

    def __init__(self, command: str, out: Path) -> None:
        self._command = command
        self._out = str(out.absolute())
        self._num_told = self._num_begun = 0
        self._outlet: Outlet[bytes] = Outlet(OUTLET, self._deliver, most=_MOST_WAITING)

    @property
    def loss(self) -> Loss | None:
        """The first error: a command that failed, took too long, or was dropped."""
        return self._outlet.loss

    def tell(self, line: Mapping[str, Any]) -> None:
        """Take one journal line. Waits only for the last lines of a process about to end."""
        kind = str(line["kind"])
        is_own = kind == "output_lost" and line["detail"].get("output") == OUTLET
        if is_calm(line) or is_own:
            return
        text = f"{self._out}: step {line['step']} {kind}: {line['reason']} -> {line['decision']}"
        context = {
            "out": self._out,
            "host": host_name(),
            "level": logging.getLevelName(level_of(line)).lower(),
            "text": text,
        }
        if self._outlet.put(json_text(context | dict(line)).encode() + b"\n"):
            self._num_told += 1
        if kind in _LAST:
            self._wait_until_begun()

    def close(self) -> None:
        """Wait some seconds for the last commands."""
        self._outlet.drain(_END_SECONDS)

    def _wait_until_begun(self) -> None:
        limit = time.monotonic() + _BEGIN_SECONDS
        while self._num_begun < self._num_told and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)

    def _deliver(self, data: bytes) -> None:
        """
        Raises:
            OSError: the command failed, or took too long.
        """
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            self._num_begun += 1
        try:
            _, stderr = process.communicate(data, timeout=_COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise OSError(f"it took longer than {_COMMAND_SECONDS:g} s") from None
        if process.returncode:
            message = stderr.decode(errors="replace").strip()[-_TAIL:]
            raise OSError(f"it ended with {process.returncode}: {message}")
