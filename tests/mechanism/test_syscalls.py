"""P7 in earnest: killed at, and failed at, every file system call of a start, of saves, a proof,

a retirement, a rollback and journal lines, under strace; then the restart. Every n-th call always,
each one with ``--full``. What must hold stands in :func:`tests.crash_world.check`.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.crash_world import Promises, World, check
from tests.rows import full
from tests.syscalls import NAMES, READING, Inline, Outcome, Point, points, run, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

KILL, ERRORS = "signal=KILL", ("EIO", "ENOSPC", "EINTR", "EDQUOT", "ESTALE", "EROFS")
# Files that are closed by the garbage collector are closed now before the end, now after it.
MOST_UNREACHED = 3


def story(out: Path, note: Callable[[str, Any], None]) -> None:
    world = World(out, note)
    world.inline = Inline()
    world.open(1)
    for step in (
        lambda: world.train(2),
        world.save,
        lambda: world.train(2),
        world.discard,
        world.save,
        lambda: world.train(2),
        world.save,
        world.roll_back,
        lambda: world.train(1),
        world.save,
        lambda: world.train(3),
    ):
        step()
    world.ring.close(wait=True)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: a kill does not take the cache away."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    made = memory / f"holdfast-{os.getpid()}-{tmp_path.name}"
    made.mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)


@cache
def calls(names: str) -> tuple[Point, ...]:
    """What the story asks, undisturbed."""
    folder = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"holdfast-{os.getpid()}"
    folder.mkdir()
    try:
        story(folder / "warm", lambda kind, value: None)  # imports what is imported late
        outcome = disturbed(folder, None, names=names)
        assert outcome.error is None and not outcome.killed, outcome
        return tuple(points(outcome.trace))
    finally:
        shutil.rmtree(folder)


def disturbed(folder: Path, inject: str | None, *, names: str = NAMES, **named: Any) -> Outcome:
    return run(
        lambda note: story(folder / "run", note),
        inject=inject,
        names=names,
        log=folder / "strace.txt",
        **named,
    )


def restart(folder: Path, outcome: Outcome, *, ended_by_itself: bool, told: str) -> None:
    """Start again, hold it against what was promised, and go on."""
    promises = Promises().after(outcome.facts)
    world = World(folder / "run", lambda kind, value: None)
    try:
        found, resumed = world.open(2)
        check(world, found, resumed, promises, only_committed=ended_by_itself)
        world.train(2)
        world.save()
        world.train(2)
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}\n{outcome.error}") from error
    finally:
        world.close()
        shutil.rmtree(folder / "run")


def chosen(names: str, stride: int) -> list[Point]:
    all_of_them = [point for point in calls(names) if point != Point("read", 1)]  # our pipe's
    found = all_of_them[::stride]
    print(f"{len(found)} of {len(calls(names))} calls, each {stride}th: ", end="")
    print(dict(Counter(point.name for point in found)))
    return found


each = pytest.mark.parametrize("stride", [17, full(1)])
some = pytest.mark.parametrize("stride", [31, full(1)])


@each
@pytest.mark.timeout(1800)
def test_killed_at_a_call(folder: Path, stride: int) -> None:
    tried = chosen(f"{NAMES},{READING}", stride)
    unreached = 0
    for point in tried:
        told = f"killed at {point.name} {point.number}"
        inject = f"{point.name}:{KILL}:when={point.number}"
        outcome = disturbed(folder, inject, names=point.name)
        unreached += not outcome.killed
        restart(folder, outcome, ended_by_itself=False, told=told)
    assert unreached <= MOST_UNREACHED


@some
@pytest.mark.parametrize(
    "error",
    # Of those that say "no more of this" ENOSPC is tried always.
    [e if e in ERRORS[:3] else full(e) for e in ERRORS],
)
@pytest.mark.timeout(1800)
def test_failed_at_a_call(folder: Path, error: str, stride: int) -> None:
    ends: Counter[str] = Counter()
    tried = chosen(f"{NAMES},{READING}" if error in ("EIO", "EINTR", "ESTALE") else NAMES, stride)
    wrong, unreached = [], 0
    for point in tried:
        told = f"{error} at {point.name} {point.number}"
        inject = f"{point.name}:error={error}:when={point.number}"
        outcome = disturbed(folder, inject, names=point.name)
        unreached += "(INJECTED)" not in outcome.trace
        ends["ended" if outcome.error else "went on"] += 1
        if outcome.error is not None and not re.search(r"/\w+/\w+", outcome.error):
            wrong.append(f"{told}: no file named: {outcome.error}\n{outcome.trace[-300:]}")
        try:
            restart(folder, outcome, ended_by_itself=True, told=told)
        except AssertionError as found:
            wrong.append(str(found))
    print(dict(ends))
    assert not wrong, "\n".join(wrong)
    assert unreached <= MOST_UNREACHED


def limit_files(num_bytes: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return limit


@pytest.mark.parametrize("step", [301, full(7)])
@pytest.mark.timeout(1800)
def test_short_writes(folder: Path, step: int) -> None:
    """The kernel takes a part of what a write hands over, and nothing of the next one."""
    ends: Counter[str] = Counter()
    for num_bytes in range(0, 6000, step):
        told = f"no file may grow beyond {num_bytes} bytes"
        log = folder.parent / f"{folder.name}.log"
        outcome = run(
            lambda note: story(folder / "run", note),
            names="none",
            before=limit_files(num_bytes),
            log=log,
        )
        log.unlink()
        ends["ended" if outcome.error else "went on"] += 1
        if outcome.error is not None:
            assert re.search(r"/\w+/\w+", outcome.error), f"{told}: no file named: {outcome.error}"
        restart(folder, outcome, ended_by_itself=True, told=told)
    print(dict(ends))
    assert ends["ended"]
