"""Has the page written during a run and at its end, without ever stopping or delaying the run.

A separate process reads the files and makes the page: during the run one with low priority, which
ends with the run; at the end one that the run waits for only some seconds.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

from runner.system.output import Loss
from runner.system.process import in_thread, run_beside

NAME = OUTLET = "report.html"
_LONGEST_SECONDS = 900.0  # a page that takes longer is abandoned
_GRACE_SECONDS = 1.0  # to end a process


class PageWriter:
    """Keeps ``out/report.html`` up to date, on the first rank.

    Args:
        every_seconds: between pages during the run; 0: only at the end.
        check: raises if this process may no longer write here.

    Attributes:
        loss: the first failure; None if there was none.
    """

    def __init__(
        self, out: Path, *, every_seconds: float, check: Callable[[], None] = lambda: None
    ) -> None:
        self.loss: Loss | None = None
        self._out = out
        self._every_seconds = every_seconds
        self._check = check
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write pages from now on, until :meth:`finish`."""
        if self._every_seconds > 0:
            self._thread = threading.Thread(target=self._run, name=OUTLET, daemon=True)
            self._thread.start()

    def finish(self, seconds: float) -> None:
        """Write the last page and wait at most this long for it; 0: write none."""
        self._end.set()
        if seconds <= 0:
            return
        if self._thread is not None:
            self._thread.join(seconds)  # it has to end its process

        # A thread: the file system may hang, and the run must end all the same.
        last = in_thread(lambda: self._write(seconds, "0", lambda: False), OUTLET)
        if not wait([last], seconds + _GRACE_SECONDS).done:
            self._note(f"it takes longer than {seconds:g} s")

    def _run(self) -> None:
        while not self._end.wait(self._every_seconds):
            self._write(_LONGEST_SECONDS, "10", self._end.is_set)

    def _note(self, reason: str) -> None:
        if self.loss is None:
            self.loss = Loss(outlet=OUTLET, reason=reason[:1000], time=time.time())

    def _write(self, seconds: float, nice: str, is_over: Callable[[], bool]) -> None:
        """Have a process write the page under another name, then rename it."""
        target = self._out / NAME
        new_page = target.with_name(f"{NAME}.{os.getpid()}.new")
        command = ["report", str(self._out), "-o", str(new_page), "--nice", nice]
        try:
            if run_beside(command, seconds=seconds, is_over=is_over) is not None:
                self._check()
                new_page.rename(target)
        except Exception as error:  # it must not reach the run
            self._note(f"{type(error).__name__}: {error}")
        for leftover in (new_page, Path(f"{new_page}.tmp")):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
