"""What is said never stops who says it: full pipes, closed ones, full disks, and what is lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from runner.system.output import AsyncWriter
from tests.programs import ended
from tests.waiting import until

# Outlets


def test_items_are_handed_on_in_order() -> None:
    taken: list[int] = []
    outlet = AsyncWriter("numbers", taken.append, most=1000)
    for number in range(500):
        outlet.put(number)
    assert outlet.drain(30)
    assert taken == list(range(500))
    assert outlet.loss is None and outlet.num_lost == 0


def test_what_raises_is_lost_and_told_once() -> None:
    taken: list[int] = []

    def take(number: int) -> None:
        if number % 2:
            raise OSError(errno.EPIPE, f"number {number}")
        taken.append(number)

    outlet = AsyncWriter("numbers", take, most=1000)
    for number in range(6):
        outlet.put(number)
    assert outlet.drain(30)
    assert taken == [0, 2, 4] and outlet.num_lost == 3
    assert outlet.loss.reason == f"BrokenPipeError: [Errno {errno.EPIPE}] number 1"
    assert outlet.loss.outlet == "numbers"


def test_who_never_returns_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.system.output.STALL_SECONDS", 0.2)
    gate = threading.Event()
    taken: list[str] = []

    def take(word: str) -> None:
        gate.wait()
        taken.append(word)

    outlet = AsyncWriter("words", take, most=10, weigh=len)
    for word in ("one", "two", "three", "four", "x"):
        outlet.put(word)
    assert not outlet.drain(0.05)
    assert outlet.num_lost == 2, "three is too much for ten letters, x would be the eleventh"
    loss = outlet.loss
    assert loss is not None and "too much is waiting" in loss.reason
    gate.set()
    assert outlet.drain(30)
    assert taken == ["one", "two", "four"]
    assert outlet.loss == loss


def test_a_stall_is_told_before_anything_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.system.output.STALL_SECONDS", 0.1)
    gate = threading.Event()
    outlet = AsyncWriter("words", lambda _: gate.wait() and None, most=10)
    outlet.put("a")
    until(lambda: outlet.loss is not None)
    assert outlet.num_lost == 0
    gate.set()


# Standard output and error of a process

SAY = "import sys, os, time; from runner.system import output; output.install()\n"
END = "\nfrom runner.health.leave import leave; leave(7)"


def begun(code: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SAY + code], **streams)


@contextlib.contextmanager
def full_pipe() -> Iterator[tuple[int, int, int]]:
    """Its ends and how many bytes are in it; nothing more can be written."""
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * size)
    try:
        yield reader, writer, size
    finally:
        os.close(reader)
        os.close(writer)


LOTS = "for n in range(20000): print('line', n); sys.stderr.write(f'error {n}\\n')\n"


def test_a_full_pipe_keeps_nobody_and_leaves_the_others_flags_alone() -> None:
    with full_pipe() as (_, writer, _):
        code = LOTS + "os.write(1, b'y')" + END
        process = begun(code, stdout=writer, stderr=subprocess.PIPE)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and b"BlockingIOError" in errors, "C++ code does not wait"
        assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
        assert begun(LOTS + END, stdout=writer, stderr=writer).wait(60) == 7
        assert begun(LOTS, stdout=writer, stderr=writer).wait(60) == 0, "by itself, too"


def test_a_slow_reader_gets_everything_in_order_and_learns_what_is_missing() -> None:
    with full_pipe() as (reader, writer, size):
        code = "for n in range(300): print('line', n); print('error', n, file=sys.stderr)\n"
        code += "sys.stdout.drain(None)\nprint('end')" + END
        process = begun(code, stdout=writer, stderr=writer)
        time.sleep(1)
        text = b""
        while b"end\n" not in text:
            text += os.read(reader, 100)
        assert process.wait(60) == 7
    expected = [word for n in range(300) for word in (f"line {n}", f"error {n}")]
    assert text[size:].decode().splitlines() == [*expected, "end"]


def test_what_did_not_fit_is_counted_where_it_is_missing() -> None:
    with full_pipe() as (reader, writer, size):
        code = (
            "sys.stdout._sink._most = 100\n"
            "print('a' * 40)\n"
            "for n in range(10): print('b' * 40)\n"
            "print('said', file=sys.stderr)\n"
            "sys.stdout.drain(None); print('end')"
        )
        process = begun(code + END, stdout=writer, stderr=subprocess.PIPE)
        assert process.stderr is not None and process.stderr.readline() == b"said\n"
        text = b""
        while b"end\n" not in text:
            text += os.read(reader, 4096)
        assert process.wait(60) == 7
        process.stderr.close()
    lines = text[size:].decode().splitlines()
    assert lines == ["a" * 40, "b" * 40, "[9 pieces of output are missing]", "end"]


def test_a_forked_process_speaks_on() -> None:
    code = (
        "print('before', end=' ')\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    print('child'); sys.stdout.flush(); os._exit(3)\n"
        "assert os.waitpid(pid, 0)[1] == 3 << 8\n"
        "print('parent')"
    )
    process = begun(code + END, stdout=subprocess.PIPE)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    assert sorted(text.decode().splitlines()) == ["before parent", "child"]


def test_a_process_without_streams_goes_on() -> None:
    words = [sys.executable, "-c", SAY + LOTS.replace("sys.stderr", "open(os.devnull,'w')") + END]
    shell = '"$@" >&- 2>&-'
    assert subprocess.run(["bash", "-c", shell, "-", *words], timeout=60).returncode == 7


def test_text_in_another_place_is_left_there(capsys: pytest.CaptureFixture[str]) -> None:
    from runner.system import output

    output.install()
    print("hello")
    assert capsys.readouterr().out == "hello\n"
    assert not output.losses()


def ended_with(words: Sequence[str], reader: str) -> str:
    pipeline = f'"$@" 2>&1 | {reader}'
    done = ended("bash", "-c", pipeline, "-", sys.executable, "-m", "runner", *words)
    return done.stdout


def test_a_command_that_prints_waits_for_its_reader() -> None:
    whole = ended_with(["--cfg", "job"], "cat")
    assert "watchdog:" in whole and "Traceback" not in whole
    assert ended_with(["--cfg", "job"], "(sleep 4; cat)") == whole


def test_the_second_thread_of_a_process_may_speak_while_the_first_is_stopped() -> None:
    """A handler says something in the midst of saying something."""
    code = (
        "import signal\n"
        "signal.signal(signal.SIGALRM, lambda *_: print('handled'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)\n"
        "limit = time.monotonic() + 2\n"
        "while time.monotonic() < limit: print('x' * 200)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)"
    )
    process = begun(code + END, stdout=subprocess.PIPE)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    assert set(text.decode().split()) >= {"handled", "x" * 200}


# The way out

LEAVE = "import os, sys, threading, time; from runner.health import leave\n"


@pytest.mark.parametrize(
    "held_up",
    [
        "leave.tell_exit = lambda *_: 1 / 0",
        "leave.tell_exit = lambda *_: sys.exit(5)",
        "leave._LEAVE_SECONDS = 0.5; leave.tell_exit = lambda *_: time.sleep(1000)",
        "leave.output.finish = lambda: 1 / 0",
        "threading.Thread(target=lambda: time.sleep(1000)).start()",
        "import multiprocessing, signal\n"
        "child = multiprocessing.Process(target=time.sleep, args=(20,), daemon=True)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); child.start()",
    ],
)
def test_the_way_out_cannot_be_missed(held_up: str) -> None:
    code = f"{LEAVE}{held_up}\nleave.leave(9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=15).returncode == 9


def test_a_library_that_holds_the_interpreter_up_is_no_way_to_stay() -> None:
    """No Python code can run any more in this process: not the timer's either."""
    code = (
        f"{LEAVE}import ctypes\n"
        "leave._BEHIND_SECONDS = 0.5\n"
        "leave.end_within(0.5, 9); ctypes.PyDLL(None).sleep(1000)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode in (1, 9)


def test_an_end_that_was_taken_back_does_not_come() -> None:
    code = f"{LEAVE}leave.end_within(0.3, 9)(); time.sleep(2); print('here')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"here\n")


# SIGHUP

HANGUP = (
    "import os, signal, sys; from runner.system.process import answer_hangup\n"
    "answer_hangup(lambda *_: os._exit(5), always={always})\n"
    "os.kill(os.getpid(), signal.SIGHUP); os._exit(0)"
)


@pytest.mark.parametrize(
    ("on_terminal", "is_ignored", "always", "code"),
    [
        (False, False, False, 0),
        (False, True, False, 0),
        (True, False, False, 5),
        (True, True, False, 0),
        (False, True, True, 5),
    ],
)
def test_what_the_end_of_a_terminal_means(
    on_terminal: bool, is_ignored: bool, always: bool, code: int
) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)

    master, slave = os.openpty()
    where = slave if on_terminal else subprocess.PIPE
    words = [sys.executable, "-c", HANGUP.format(always=always)]
    done = subprocess.run(words, stdout=where, preexec_fn=prepare, timeout=60)
    os.close(master)
    os.close(slave)
    assert done.returncode == code
