"""Writes the page during a run and at its end, without ever stopping or delaying the run.

During the run a separate process with low priority reads the files and makes the page. It ends with
the run. At the end a thread makes the page, and the run waits for it only some seconds.
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
_CHILD_SECONDS = 900.0  # a page that takes longer is abandoned
_TAIL = 500  # characters of the process's stderr
_POLL_SECONDS = 0.2


class PageWriter:
    """Keeps ``out/report.html`` up to date, on the first rank.

    Args:
        every_seconds: between pages during the run; 0: only at the end.
        check: raises if this process may no longer write here.

    Attributes:
        loss: the first failure; None if there was none.
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
        last = threading.Thread(target=self._guarded, args=(self._write,), daemon=True)
        last.start()
        last.join(seconds)
        if last.is_alive():
            self._note(f"it takes longer than {seconds:g} s")

    def _run(self) -> None:
        while not self._end.wait(self._every_seconds):
            self._guarded(self._write_beside)

    def _guarded(self, write: Callable[[], None]) -> None:
        """Call ``write``; an exception must not reach the run."""
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
        new_page = target.with_name(f"{NAME}.{os.getpid()}.new")
        command = [sys.executable, "-m", "runner", "report", str(self._run_dir.out)]
        command += ["-o", str(new_page), "--beside", str(os.getpid())]
        try:
            self._wait_for(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            )
            if not self._end.is_set():
                self._check()
                new_page.rename(target)
        finally:
            for leftover in (new_page, Path(f"{new_page}.tmp")):
                leftover.unlink(missing_ok=True)

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        """
        Raises:
            OSError: the process failed or took too long.
        """
        limit = time.monotonic() + _CHILD_SECONDS
        with process:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, stderr = process.communicate(timeout=_POLL_SECONDS)
                    break
                if self._end.is_set() or time.monotonic() > limit:
                    process.kill()
            if self._end.is_set():
                return
            if process.returncode:
                error_text = stderr.decode(errors="replace").strip()[-_TAIL:]
                raise OSError(f"the page's process exited with {process.returncode}: {error_text}")
