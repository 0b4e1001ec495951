"""Real runs on disks that are full, read-only, gone or slow, and killed at a system call."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_run
from tests.run import Result, Started, finish, journalled, metrics_step, start, train
from tests.syscalls import why_not

SLOWED = "faults=[slow@step=10-60,seconds=0.05]"
SEED = 20261121
# What a rank asks of the run directory while it trains, by how often it does.
CALLS = {"write": 60, "openat": 40, "fsync": 12, "rename": 8, "close": 40, "mkdir": 2, "unlink": 4}

strace = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "holdfast", str(place)]
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    if (done := subprocess.run(words, capture_output=True, text=True)).returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def unchangeable(folder: Path) -> Iterator[None]:
    """Read-only for root too, whom modes do not stop."""
    if os.geteuid() != 0 or shutil.which("chattr") is None:
        pytest.skip("chattr +i needs root and e2fsprogs")
    done = subprocess.run(["chattr", "+i", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this file system knows no chattr +i: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


@pytest.mark.parametrize(
    "size", ["1600k", *(pytest.param(f"{k}k", marks=pytest.mark.full) for k in (300, 700, 2200))]
)
def test_a_full_disk(tmp_path: Path, clean: Result, size: str) -> None:
    """It runs as long as it can, ends in words, and goes on once there is room."""
    with small_disk(tmp_path / "disk", size) as disk:
        out = disk / "run"
        ended = train(out)
        assert ended.code != 0, ended.tail
        assert "No space left on device" in ended.text and str(out) in ended.text, ended.tail
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
        again = finish(out)
        assert_same_run(again, clean)
        assert_every_sample_once(again)


def test_a_ring_that_cannot_be_written_for_a_while(tmp_path: Path, clean: Result) -> None:
    out = tmp_path / "run"
    started = start(out, SLOWED)
    started.until(lambda out: bool(list((out / "ring").glob("*/CLEAN"))))
    with unchangeable(out / "ring"):
        started.until(lambda out: journalled(out, "save_failed") >= 1)
    ended = started.wait()
    assert ended.code == 0, ended.tail
    failed = ended.journal("save_failed")
    assert all(str(out / "ring") in line["reason"] for line in failed), failed
    assert ended.digest == clean.digest and ended.metrics() == clean.metrics()


def test_a_directory_that_cannot_be_written_at_all(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with unchangeable(out):
        refused = train(out, ranks=0)
        assert refused.code == 2 and f"out={out}: cannot be written" in refused.text, refused.tail
    assert not list(out.iterdir())


def test_a_directory_removed_under_a_run(tmp_path: Path, clean: Result) -> None:
    """The run cannot be kept, and says so; no half of it comes back to be taken for a whole."""
    out = tmp_path / "run"
    started = start(out, SLOWED)
    started.until(lambda out: metrics_step(out) >= 15)
    out.rename(tmp_path / "aside")
    shutil.rmtree(tmp_path / "aside")
    ended = started.wait()
    assert ended.code != 0 and f"{out}: was removed or replaced" in ended.text, ended.tail
    shutil.rmtree(out, ignore_errors=True)  # what it still wrote in its last seconds
    again = finish(out)
    assert_same_run(again, clean)


@strace
@pytest.mark.full
def test_a_slow_disk(tmp_path: Path, clean: Result) -> None:
    """Every fsync and rename takes a fifth of a second longer: slower, and nothing else."""
    out = tmp_path / "run"
    started = start(out, SLOWED)
    started.until(lambda out: metrics_step(out) >= 12)
    with tracing(started, "fsync,rename:delay_enter=200000", names="fsync,rename"):
        ended = started.wait()
    assert ended.code == 0, ended.tail
    assert_same_run(ended, clean)


@contextlib.contextmanager
def tracing(
    started: Started, inject: str, *, names: str, rank: int | None = None
) -> Iterator[None]:
    """strace on all ranks, or one, from now on."""
    chosen = [pid for number, pid in started.ranks().items() if rank in (None, number)]
    assert chosen
    words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={names}"]
    words += ["-e", f"inject={inject}"]
    tracer = subprocess.Popen([*words, *(f"-p{pid}" for pid in chosen)])
    try:
        yield
    finally:
        tracer.terminate()
        tracer.wait()


@strace
@pytest.mark.parametrize("num", [1, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.timeout(3600)
def test_killed_at_a_call(tmp_path: Path, clean: Result, num: int) -> None:
    """A rank of a real run dies in a system call; the same command goes on. Calls are counted in

    each thread from a moment in the middle of the run on.
    """
    dice = random.Random(SEED)
    seconds = []
    for number in range(num):
        name = dice.choices(list(CALLS), list(CALLS.values()))[0]
        when, rank = dice.randrange(1, CALLS[name] + 1), dice.randrange(2)
        told = f"seed {SEED}, {number}: rank {rank} killed at {name} {when}"
        out = tmp_path / str(number)
        started = start(out, SLOWED)
        started.until(lambda out: metrics_step(out) >= 12)
        with tracing(started, f"{name}:signal=KILL:when={when}", names=name, rank=rank):
            killed = started.wait()
        began = time.monotonic()
        if killed.code != 0:
            killed = finish(out, SLOWED)
            seconds.append(time.monotonic() - began)
        print(f"{told}: {'killed' if killed.summary['restarts'] else 'came to its end before'}")
        assert_same_run(killed, clean)
        assert_every_sample_once(killed)
        shutil.rmtree(out)
    print(f"{len(seconds)} of {num} were killed")
    assert len(seconds) >= num / 2
