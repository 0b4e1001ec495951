"""Writes the page beside a run that goes on, and at its end; nothing here can stop or delay one.

While the run goes on a process of its own reads the files and makes the page, with low priority. It
dies with the run. At the end the page is made in a thread that is waited for some seconds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from runner.run_dir.paths import RunDir
from runner.system.files import write_durably
from runner.system.output import Loss

NAME = "report.html"
OUTLET = "report.html"
_CHILD_SECONDS = 900.0  # a page that takes longer is given up
_TAIL = 500  # characters of what the process said
_POLL_SECONDS = 0.2


class PageWriter:
    """Keeps ``out/report.html`` up to date, on the first rank.

    Args:
        every_seconds: between pages while the run goes on; 0: only at the end.
        check: raises when this process may not write here any more.

    Attributes:
        loss: the first thing that went wrong; None when nothing did.
    """

    def __init__(
        self, run_dir: RunDir, *, every_seconds: float, check: Callable[[], None] = lambda: None
    ) -> None:
        self.loss: Loss | None = None
        self._run_dir = run_dir
        self._every_seconds = every_seconds
        self._check = check
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """From now on, until :meth:`finish`."""
        if self._every_seconds > 0:
            self._thread = threading.Thread(target=self._run, name=OUTLET, daemon=True)
            self._thread.start()

    def finish(self, seconds: float) -> None:
        """Write the last page, waiting no longer than this for it; 0: none."""
        self._end.set()
        if seconds <= 0:
            return
        if self._thread is not None:
            self._thread.join(seconds)  # it has a process to end
        last = threading.Thread(target=self._guarded, args=(self._write,), daemon=True)
        last.start()
        last.join(seconds)
        if last.is_alive():
            self._note(f"it takes longer than {seconds:g} s")

    def _run(self) -> None:
        while not self._end.wait(self._every_seconds):
            self._guarded(self._write_beside)

    def _guarded(self, write: Callable[[], None]) -> None:
        """Whatever goes wrong in there is no trouble of the run's."""
        try:
            write()
        except Exception as error:
            self._note(f"{type(error).__name__}: {error}")

    def _note(self, reason: str) -> None:
        if self.loss is None:
            self.loss = Loss(outlet=OUTLET, reason=reason[:1000], time=time.time())

    def _write(self) -> None:
        from runner.report.page import page, read_runs

        text = page(read_runs([self._run_dir.out]))
        self._check()
        write_durably(self._run_dir.out / NAME, text.encode())

    def _write_beside(self) -> None:
        target = self._run_dir.out / NAME
        made = target.with_name(f"{NAME}.{os.getpid()}.new")
        words = [sys.executable, "-m", "runner", "report", str(self._run_dir.out)]
        words += ["-o", str(made), "--beside", str(os.getpid())]
        try:
            self._wait_for(
                subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
            if not self._end.is_set():
                self._check()
                made.rename(target)
        finally:
            for left in (made, Path(f"{made}.tmp")):
                left.unlink(missing_ok=True)

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        """
        Raises:
            OSError: it failed, or took too long.
        """
        limit = time.monotonic() + _CHILD_SECONDS
        with process:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, said = process.communicate(timeout=_POLL_SECONDS)
                    break
                if self._end.is_set() or time.monotonic() > limit:
                    process.kill()
            if self._end.is_set():
                return
            if process.returncode:
                words = said.decode(errors="replace").strip()[-_TAIL:]
                raise OSError(f"the process that makes it ended with {process.returncode}: {words}")
