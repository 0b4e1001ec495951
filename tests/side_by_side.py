"""Runs all tests in sessions side by side: ``python -m tests.side_by_side [pytest arguments]``.

A test file is run by the session that comes to it first (``--share``, tests/conftest.py), so that
every session has something to do until nothing is left. Half of a drill is waiting, so there is a
session more than a small machine has cores.

One or two drills that fail are run once more, alone, when all else is over: what failed beside
other work and passes by itself is told as FLAKY, with the text of its failure above. Other tests
are never repeated, nor are drills where more than two fail.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SESSIONS = 3
REPEATED = 2  # failed drills, at most
LIMIT_SECONDS = 3300.0  # of all sessions together, but with --full; a hang shall say where it is
DRILLS = ("tests/drills/", "tests/swarm/")
PASSED, FAILED, NO_TESTS = 0, 1, 5  # of pytest's exit codes


def main(arguments: Sequence[str]) -> int:
    """Returns pytest's exit code: of all sessions, or of the repetition."""
    share = Path(tempfile.mkdtemp(prefix="holdfast-tests-"))
    try:
        codes = run_sessions(arguments, share)
        # In the order they ran in: tests of one file may share what an earlier one left.
        recorded = (line for path in sorted(share.glob("failed-*")) for line in _lines(path))
        failed = list(dict.fromkeys(recorded))
    finally:
        shutil.rmtree(share, ignore_errors=True)
    worst = [code for code in codes if code not in (PASSED, NO_TESTS)]
    if not worst:
        return PASSED
    if set(worst) != {FAILED} or not may_be_repeated(failed):
        _say("failed", failed)
        return worst[0]
    return repeat(failed, arguments)


def may_be_repeated(failed: Sequence[str]) -> bool:
    """Whether the failures are few, and only drills."""
    return 0 < len(failed) <= REPEATED and all(name.startswith(DRILLS) for name in failed)


def run_sessions(arguments: Sequence[str], share: Path, sessions: int = SESSIONS) -> list[int]:
    """The first one's output is shown as it comes, that of each other one after it."""
    began: list[tuple[subprocess.Popen[bytes], Path | None]] = []
    with _ended_with_this_process(began):
        for number in range(sessions):
            log = share / f"log-{number}" if number else None
            with contextlib.ExitStack() as files:
                out = None if log is None else files.enter_context(log.open("wb"))
                # One word each: no path to collect. How many tests come nobody knows beforehand.
                options = [f"--share={share}", "--override-ini=console_output_style=classic"]
                command = _pytest([*options, *arguments])
                process = subprocess.Popen(command, stdout=out, stderr=out)
            began.append((process, log))
        limit = threading.Timer(LIMIT_SECONDS, _end, args=([process for process, _ in began],))
        limit.daemon = True
        if "--full" not in arguments:
            limit.start()
        for number, (process, log) in enumerate(began):
            if log is not None:
                print(f"session {number + 1} of {sessions}, side by side with those above:")
                _follow(process, log)
        codes = [process.wait() for process, _ in began]
        limit.cancel()
        return codes


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Those that go on: the stacks of all their threads, and the end."""
    for process in processes:
        if process.poll() is None:
            print(f"error: a session did not end within {LIMIT_SECONDS:g} s: ended", flush=True)
            process.send_signal(signal.SIGUSR2)  # faulthandler's, tests/conftest.py
            time.sleep(2.0)
            process.kill()


def repeat(failed: Sequence[str], arguments: Sequence[str]) -> int:
    """Each of the failed drills once more, in a session alone."""
    _say("failed; run once more, alone", failed)
    code = subprocess.run(_pytest([*arguments, *failed]), check=False).returncode
    if code != PASSED:
        _say("failed, and not all passed when run again", failed)
        return code
    _say("failed once, passed when run again: FLAKY, see above", failed)
    return PASSED


def _pytest(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def _follow(process: subprocess.Popen[bytes], log: Path) -> None:
    with log.open("rb") as file:
        while True:
            is_over = process.poll() is not None  # before the last look
            sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
            if is_over:
                return
            time.sleep(0.2)


def _say(label: str, names: Sequence[str]) -> None:
    for name in names:
        print(f"{name}: {label}", flush=True)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@contextlib.contextmanager
def _ended_with_this_process(
    began: Sequence[tuple[subprocess.Popen[bytes], Path | None]],
) -> Iterator[None]:
    """End the sessions, also if this process gets a signal to stop."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    try:
        yield
    finally:
        for process, _ in began:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGTERM)
        for process, _ in began:
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
