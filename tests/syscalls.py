"""Runs a function in a process under strace, which is killed at one system call, or sees it fail.

The process is forked from this one, which has everything imported, and waits until strace is
attached; so ``when=N`` counts the calls of the work alone. It has one thread.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.programs import ended

# What a run asks of the file system; close and fsync are where late errors come out.
NAMES = (
    "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,"
    "rmdir,close,ftruncate,fallocate,link,linkat"
)
READING = "read,getdents64,newfstatat,fstat,lseek,fadvise64"
_TOLD_BYTES = 1 << 20


@dataclass(frozen=True)
class Point:
    """The ``number``-th call of ``name`` from the start of the work on."""

    name: str
    number: int


@dataclass(frozen=True)
class Outcome:
    """``killed`` by the signal; else ``error`` is its exception, None if it finished.

    ``facts`` are those that it noted in time.
    """

    killed: bool
    error: str | None
    facts: list[tuple[str, Any]]
    trace: str


class SharedFacts:
    """Facts in memory shared with the child: noting one takes no system call."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _TOLD_BYTES)
        self._end = 8

    def note(self, kind: str, value: Any) -> None:
        data = json.dumps([kind, value]).encode() + b"\n"
        self._memory[self._end : self._end + len(data)] = data
        self._end += len(data)
        self._memory[:8] = self._end.to_bytes(8, "little")  # last: a torn fact is none

    def read(self) -> list[tuple[str, Any]]:
        end = int.from_bytes(self._memory[:8], "little") or 8
        lines = self._memory[8:end].splitlines()
        return [(kind, value) for kind, value in map(json.loads, lines)]


class Inline:
    """An executor without a thread: it runs submitted work at once."""

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: Any) -> None:
        pass


@cache
def why_not() -> str | None:
    """Why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (bash scripts/test.sh installs it as root on Debian)"
    done = ended("strace", "-e", "trace=none", "-e", "inject=getppid:retval=7:when=1", "true")
    return None if done.returncode == 0 else f"ptrace is not permitted: {done.stderr.strip()[:200]}"


def run(
    work: Callable[[Callable[[str, Any], None]], None],
    *,
    inject: str | None = None,
    names: str = NAMES,
    before: Callable[[], None] = lambda: None,
    log: Path,
) -> Outcome:
    """Run ``work(note)`` in a child under strace, with the injection ``inject``.

    Args:
        before: called in the child before strace counts.
        log: where strace writes; what it says is in the outcome.
    """
    facts_memory = SharedFacts()
    ready, go = os.pipe()
    waits, is_waiting = os.pipe()
    child = os.fork()
    if child == 0:
        _work(work, facts_memory, (ready, go, is_waiting), before)
    os.close(ready)
    os.close(is_waiting)
    # Not attached before: the child's own calls until then would be counted, and made to fail.
    os.read(waits, 1)
    os.close(waits)
    command = ["strace", "-y", "-s", "0", "-o", str(log), "-p", str(child), "-e", f"trace={names}"]
    command += ["-e", f"inject={inject}"] if inject else []
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    first_line = tracer.stderr.readline()
    assert "attached" in first_line, first_line + tracer.stderr.read()
    os.write(go, b"x")
    os.close(go)
    _, status = os.waitpid(child, 0)
    tracer.communicate()
    facts = facts_memory.read()
    errors = [value for kind, value in facts if kind == "error"]
    return Outcome(
        killed=os.WIFSIGNALED(status),
        error=errors[0] if errors else None,
        facts=[fact for fact in facts if fact[0] != "error"],
        trace=log.read_text(errors="replace"),
    )


def _work(
    work: Callable[[Callable[[str, Any], None]], None],
    facts_memory: SharedFacts,
    pipes: tuple[int, int, int],
    before: Callable[[], None],
) -> None:
    ready, go, is_waiting = pipes
    try:
        os.close(go)
        before()
        os.write(is_waiting, b"x")  # stays open: its end would be a call that is counted
        os.read(ready, 1)
        work(facts_memory.note)
    except BaseException as error:
        message = "".join(traceback.format_exception_only(error))
        facts_memory.note("error", message)
    finally:
        os._exit(0)


_CALL = re.compile(r"^(\w+)\(", re.MULTILINE)


def points(trace: str) -> list[Point]:
    """Every call of a trace, in order."""
    counts: Counter[str] = Counter()
    calls = []
    for name in _CALL.findall(trace):
        counts[name] += 1
        calls.append(Point(name, counts[name]))
    return calls
