"""P11: whatever becomes of the output, steps go on, or nothing of the run is left.

Each fault of the output by each way of starting; ranks and loading processes in turn.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from runner.system.error import EXIT_PREEMPTED
from runner.system.process import parent
from tests import warm
from tests.rows import full
from tests.run import TINY, Result, Started, command, left_behind, metrics_step

pytestmark = pytest.mark.usefixtures("leaves_nothing")

# The promise is 15 s; a machine that does other work beside may take a little longer.
LIMIT_SECONDS = 30.0
STEPS = 60  # as many as the runs that it is compared with
SETTINGS = (*TINY, f"steps={STEPS}", "track.every=1", "faults=[slow@step=4-60,seconds=0.06]")


def launched(out: Path, ranks: int, overrides: Sequence[str], *, restarts: int = 0) -> list[str]:
    """``scripts/train.sh``, without its setup."""
    words = ["launch", "--restarts", str(restarts), "--nproc", str(ranks), f"out={out}"]
    return [sys.executable, "-m", "runner", *words, *SETTINGS, *overrides]


def by_torchrun(out: Path, ranks: int, overrides: Sequence[str]) -> list[str]:
    return command(out, *SETTINGS, *overrides, ranks=ranks)


def alone(out: Path, ranks: int, overrides: Sequence[str]) -> list[str]:
    assert ranks == 1
    return command(out, *SETTINGS, *overrides, ranks=0)


def supervised(out: Path, ranks: int, overrides: Sequence[str]) -> list[str]:
    words = [sys.executable, "-m", "runner", "supervise", "--restarts", "0", "--"]
    return [*words, *by_torchrun(out, ranks, overrides)]


WAYS: dict[str, Callable[[Path, int, Sequence[str]], list[str]]] = {
    "launch": launched,
    "torchrun": by_torchrun,
    "alone": alone,
    "supervise": supervised,
}


class Output:
    """Where a run's output goes, and the end that a test holds."""

    def __init__(self, theirs: int, ours: int | None, *, is_terminal: bool = False) -> None:
        self.theirs = theirs
        self._ours = ours
        self.is_terminal = is_terminal

    def fill(self) -> None:
        """So that nothing more can be written until somebody reads."""
        own = os.open(f"/proc/self/fd/{self.theirs}", os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(own, b"x" * 512)
        os.close(own)

    def close(self) -> None:
        """Nobody reads any more."""
        if self._ours is not None:
            os.close(self._ours)
            self._ours = None

    def read_all(self) -> str:
        """What was written, to the end."""
        assert self._ours is not None
        data = b""
        with contextlib.suppress(OSError):  # a terminal that nobody has open any more
            while part := os.read(self._ours, 1 << 16):
                data += part
        return data.decode(errors="replace")


@contextlib.contextmanager
def pipe() -> Iterator[Output]:
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    yield from _closed_at_the_end(Output(theirs, ours))


@contextlib.contextmanager
def terminal() -> Iterator[Output]:
    ours, theirs = pty.openpty()
    yield from _closed_at_the_end(Output(theirs, ours, is_terminal=True))


@contextlib.contextmanager
def full_disk() -> Iterator[Output]:
    yield from _closed_at_the_end(Output(os.open("/dev/full", os.O_WRONLY), None))


def _closed_at_the_end(output: Output) -> Iterator[Output]:
    try:
        yield output
    finally:
        output.close()
        with contextlib.suppress(OSError):
            os.close(output.theirs)


def begin(words: Sequence[str], out: Path, output: Output, *, cold: bool = True) -> Started:
    """In a session of its own, on the terminal if the output is one.

    ``cold``: with new interpreters, as a person starts it.
    """
    if not cold:
        popen = warm.TerminalPopen if output.is_terminal else warm.WarmPopen
        process = popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=output.theirs,
            stderr=output.theirs,
            text=True,
        )
        os.close(output.theirs)
        return Started(out=out, process=process)

    def prepare() -> None:
        # A session that nohup or a script's "&" began has these ignored, and hands that on.
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if output.is_terminal:
            fcntl.ioctl(1, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        list(words),
        stdin=subprocess.DEVNULL,
        stdout=output.theirs,
        stderr=output.theirs,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=prepare,
    )
    os.close(output.theirs)
    return Started(out=out, process=process)


@dataclass(frozen=True)
class Fault:
    """What becomes of the output, once the run is at its fifth step."""

    opened: Callable[[], Any]
    strike: Callable[[Started, Output], None]
    ends: int | None = None  # with this exit code; None: steps go on to the last
    error: int | None = None  # what the journal names
    fills: bool = False


def close_it(_: Started, output: Output) -> None:
    output.close()


def let_be(_: Started, output: Output) -> None:
    pass


def kill_launcher(started: Started, output: Output) -> None:
    output.close()
    os.kill(started.process.pid, signal.SIGKILL)


FAULTS = {
    "reader gone": Fault(pipe, close_it, error=errno.EPIPE),
    "reader asleep": Fault(pipe, let_be, fills=True),
    "launcher killed": Fault(pipe, kill_launcher, ends=-signal.SIGKILL),
    "terminal closed": Fault(terminal, close_it, ends=EXIT_PREEMPTED),
    "disk full": Fault(full_disk, let_be, error=errno.ENOSPC),
}
# Always, and but for the last from a process that has everything imported; the others are behind
# --full.
TELLING = {
    ("reader gone", "launch", 2, 2),
    ("reader asleep", "torchrun", 2, 0),
    ("launcher killed", "launch", 2, 2),
    ("terminal closed", "alone", 1, 2),
    ("disk full", "alone", 1, 0),
}


def rows() -> Iterator[Any]:
    told = {row[:2]: row for row in TELLING}
    in_turn = cycle([(1, 0), (2, 0), (1, 2), (2, 2)])
    for pair in product(FAULTS, WAYS):
        if pair in told:
            yield pytest.param(*told[pair])
        elif pair != ("launcher killed", "alone"):
            ranks, workers = next(in_turn)
            yield full(*pair, 1 if pair[1] == "alone" else ranks, workers)


@pytest.mark.parametrize(("name", "way", "ranks", "workers"), rows())
def test_no_output_stops_a_run(
    name: str, way: str, ranks: int, workers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fault, out, row = FAULTS[name], tmp_path / "run", (name, way, ranks, workers)
    settings = [f"data.workers={workers}"]
    if fault.fills:  # longer than STALL_SECONDS on any machine: sooner nothing counts as lost
        settings.append(f"faults=[slow@step=1-{STEPS},rank=0,seconds=0.12]")
    words = WAYS[way](out, ranks, settings)
    with fault.opened() as output:
        if fault.fills:
            output.fill()
        is_warm = row in TELLING and fault.opened is not full_disk
        started = begin(words, out, output, cold=not is_warm)
        try:
            started.until(lambda out: metrics_step(out) >= 5, timeout=150)
            assert started.process.poll() is None, "it ended before anything was done to it"
            fault.strike(started, output)
            if fault.ends is None:
                run = assert_goes_on(started, fault, output if way == "torchrun" else None)
                if row in TELLING:
                    peaceful = "clean" if ranks == 2 else "clean_alone"
                    assert run.digest == request.getfixturevalue(peaceful).digest
            else:
                assert_is_gone(started, way, fault)
        finally:
            started.kill()
            started.process.wait()


def assert_goes_on(started: Started, fault: Fault, torchruns: Output | None) -> Result:
    """To the last step; and the journal has one line about the output.

    ``torchruns``: the output of a torchrun that is not ours, which may block as it ends: Triton
    writes what it takes for leaks (torch 2.15).
    """
    seen, limit = metrics_step(started.out), time.monotonic() + LIMIT_SECONDS
    while metrics_step(started.out) < min(STEPS, seen + 10):
        assert time.monotonic() < limit, f"no step after {metrics_step(started.out)}"
        time.sleep(0.05)
    while torchruns and started.workers():
        assert time.monotonic() < limit, f"left: {started.workers()}"
        time.sleep(0.05)
    if torchruns:
        torchruns.close()
    assert started.process.wait(120) == 0
    run = Result(out=started.out, code=0, text="")
    assert (run.summary["status"], run.summary["steps"]) == ("done", STEPS)
    (lost,) = run.journal("output_lost")
    assert "standard output and error" in lost["reason"]
    if fault.error is not None:
        assert f"[Errno {fault.error}]" in lost["reason"]
    return run


def assert_is_gone(started: Started, way: str, fault: Fault) -> None:
    """All of it, soon; asked to stop, it has saved."""
    began = time.monotonic()
    code = started.process.wait(LIMIT_SECONDS)
    # torchrun ends with 1 whatever its workers said, or of the signal.
    assert code == fault.ends or (way == "torchrun" and code not in (0, 3)), code
    while started.pids():
        assert time.monotonic() < began + LIMIT_SECONDS, f"left: {started.pids()}"
        time.sleep(0.05)
    print(f"gone after {time.monotonic() - began:.1f} s")
    if fault.ends == EXIT_PREEMPTED:
        summary = Result(out=started.out, code=code, text="").summary
        assert (summary["status"], summary["exit_code"]) == ("preempted", EXIT_PREEMPTED)
        assert "saved at step" in summary["reason"]


# What else a run is told, or has to say


@pytest.mark.full
def test_a_run_that_says_nothing_on_a_terminal_outlives_it(tmp_path: Path, clean: Result) -> None:
    """SIGHUP to the launcher, its output in a file: on without a terminal, as under nohup."""
    out = tmp_path / "run"
    log = tmp_path / "log"
    with log.open("wb") as file:
        output = Output(os.dup(file.fileno()), None)
        started = begin(launched(out, 2, ["data.workers=2"]), out, output)
    try:
        started.until(lambda out: metrics_step(out) >= 5, timeout=150)
        os.kill(started.process.pid, signal.SIGHUP)
        for pid in loaders(started):  # nor do they, should a scheduler tell everybody
            os.kill(pid, signal.SIGHUP)
        assert started.process.wait(120) == 0, log.read_text()[-3000:]
    finally:
        started.kill()
        started.process.wait()
    run = Result(out=out, code=0, text=log.read_text())
    assert run.digest == clean.digest
    assert f"step {STEPS}/{STEPS}" in run.text and not run.journal("output_lost")


def loaders(started: Started) -> list[int]:
    """Loading processes: children of ranks, and named like them."""
    pids = started.pids()
    grandparents = {pid: parent(parent(pid) or 0) for pid in pids}
    found = [pid for pid in pids if parent(grandparents[pid] or 0) == started.process.pid]
    assert len(found) == 4
    return found


@pytest.mark.twin
@pytest.mark.full
def test_a_crash_is_healed_while_the_reader_sleeps(tmp_path: Path, clean: Result) -> None:
    """The launcher has much to say about it, and nobody reads."""
    out = tmp_path / "run"
    with pipe() as output:
        output.fill()
        overrides = ["data.workers=2", "faults=[kill@step=8,rank=1]"]
        started = begin(launched(out, 2, overrides, restarts=1), out, output)
        try:
            assert started.process.wait(200) == 0
            assert not left_behind(out)
        finally:
            started.kill()
            started.process.wait()
    run = Result(out=out, code=0, text="")
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [1] and "SIGKILL" in crash["reason"]
    assert run.digest == clean.digest
