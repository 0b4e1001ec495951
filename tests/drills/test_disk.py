"""Real runs on disks that are full, read-only, gone or slow, and killed at a system call."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.distributed.env import EXIT_DIR
from runner.launch import process_tree
from runner.launch.attempt import BegunRanks
from runner.launch.process_tree import MARK
from tests.drills.compare import assert_every_sample_once, assert_same_end, assert_same_run
from tests.drills.test_lost_data import forgetful, reached, trouble_of
from tests.drills.test_lost_data import why_not as why_no_fuse
from tests.drills.test_supervise import assert_healed, launch, ranks
from tests.rows import full
from tests.run import Result, Started, finish, journalled, metrics_step, start, train
from tests.syscalls import why_not
from tests.waiting import until

SLOWED = "faults=[slow@step=10-60,seconds=0.1]"
SEED = 20261121
ROOT = Path(__file__).parents[2] / "runner"
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


def fill(disk: Path) -> Path:
    """Leave no room on a disk; returns the file that has it."""
    with (disk / "fill").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return disk / "fill"


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


@pytest.mark.parametrize("size", ["900k", *(full(f"{k}k") for k in (200, 400, 1000))])
def test_a_full_disk(tmp_path: Path, clean: Result, size: str) -> None:
    """It runs as long as it can, ends in words, and goes on once there is room."""
    with small_disk(tmp_path / "disk", size) as disk:
        out = disk / "run"
        ended = train(out)
        assert ended.code != 0, ended.tail
        assert "No space left on device" in ended.text and str(out) in ended.text, ended.tail
        # No crash: no rank says where in the code it was.
        assert 'File "' + str(ROOT) not in ended.text, ended.tail
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
        again = finish(out)
        assert_same_run(again, clean)
        assert_every_sample_once(again)


# Tells the test when lines are kept in memory: with the disk full the run's files cannot.
KEEPS = """
from pathlib import Path
from runner.__main__ import run
from runner.system.json_lines import Backlog

look = Backlog.look

def told(self):
    kept = look(self)
    if kept:
        Path({mark!r}).touch()
    return kept

Backlog.look = told
run()
"""


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Without a free byte throughout: the run gives room back when it drops an old checkpoint."""
    filler, is_over = disk / "filler", threading.Event()

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            while not is_over.wait(0.002):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * 4096) and not is_over.is_set():
                        pass

    filling = threading.Thread(target=fill)
    filling.start()
    try:
        yield
    finally:
        is_over.set()
        filling.join()
        filler.unlink()


def keeping(tmp_path: Path) -> tuple[Path, Path]:
    """A program, and the file by which it tells that lines are kept."""
    program, mark = tmp_path / "program.py", tmp_path / "kept"
    program.write_text(KEEPS.format(mark=str(mark)))
    return program, mark


SLOWLY = "faults=[slow@step=14-60,seconds=0.05]"


@pytest.mark.parametrize("ranks", [2, full(0)])
def test_a_disk_that_is_full_for_a_while(
    tmp_path: Path, clean: Result, clean_alone: Result, ranks: int
) -> None:
    """Metrics, journal and ring lie on it; steps go on, and in the end nothing is missing."""
    program, mark = keeping(tmp_path)
    with small_disk(tmp_path / "disk", "16m") as disk:
        started = start(disk / "run", SLOWLY, ranks=ranks, program=program)
        started.until(lambda out: metrics_step(out) >= 14)
        with filled(disk):
            started.until(lambda _: mark.exists())
            held = metrics_step(disk / "run")
            time.sleep(1.5)
            assert metrics_step(disk / "run") == held and started.process.poll() is None
        ended = started.wait()
        assert ended.code == 0, ended.tail
        assert_same_run(ended, clean if ranks else clean_alone)
        kept, written = ended.journal("unwritten")
        assert "No space left on device" in kept["reason"] and str(disk) in kept["reason"]
        assert "keep lines in memory for up to 300 s" in kept["decision"]
        assert written["decision"] == "go on" and written["step"] > kept["step"]
        assert [line["seq"] for line in ended.journal()] == list(range(len(ended.journal())))
        assert "unwritten" in ended.text


@pytest.mark.parametrize("ranks", [0, full(2)])
def test_a_disk_that_stays_full(
    tmp_path: Path, clean: Result, clean_alone: Result, ranks: int
) -> None:
    program, mark = keeping(tmp_path)
    with small_disk(tmp_path / "disk", "16m") as disk:
        out = disk / "run"
        started = start(out, SLOWLY, "track.unwritten_seconds=1", ranks=ranks, program=program)
        started.until(lambda out: metrics_step(out) >= 14)
        with filled(disk):
            ended = started.wait()
            assert mark.exists() and "track.unwritten_seconds=1" in ended.text, ended.tail
            assert "No space left on device" in ended.text and str(out) in ended.text
            codes = re.findall(r"exitcode *: (\d+)", ended.text) if ranks else [str(ended.code)]
            assert set(codes) == {"75"}, ended.tail
            assert 'File "' + str(ROOT) not in ended.text, ended.tail
        again = finish(out, ranks=ranks, program=program)
        assert_same_run(again, clean if ranks else clean_alone)
        assert_every_sample_once(again)


@pytest.mark.twin
@pytest.mark.full
def test_a_start_on_a_full_disk(tmp_path: Path, clean: Result) -> None:
    """In words, on both ranks alike; nothing of what lies there is harmed."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        out = disk / "run"
        train(out, "faults=[kill@step=30,rank=0]")
        with filled(disk):
            refused = train(out)
            assert refused.code != 0 and "No space left on device" in refused.text, refused.tail
            assert 'File "' + str(ROOT) not in refused.text, refused.tail
        assert_same_end(finish(out), clean)


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


def test_a_directory_removed_under_a_run(tmp_path: Path) -> None:
    """The run cannot be kept, and says so; no half of it comes back to be taken for a whole."""
    out = tmp_path / "run"
    started = start(out, SLOWED)
    started.until(lambda out: metrics_step(out) >= 15)
    out.rename(tmp_path / "aside")
    shutil.rmtree(tmp_path / "aside")
    ended = started.wait()
    assert ended.code != 0 and f"{out}: was removed or replaced" in ended.text, ended.tail
    shutil.rmtree(out, ignore_errors=True)  # what it still wrote in its last seconds
    again = finish(out, "steps=10")
    assert again.journal("start")[-1]["step"] == 0 and len(again.metrics()) == 10, again.tail


fuse = pytest.mark.skipif(why_no_fuse() is not None, reason=str(why_no_fuse()))


@fuse
@pytest.mark.parametrize("rank", [None, full(1)])
def test_storage_that_is_stale_for_a_while(tmp_path: Path, clean: Result, rank: int | None) -> None:
    """NFS that says ESTALE to everything, on all nodes or one; the run goes on, says so, and has
    lost nothing. On all, what was open stays stale: metrics and journal are opened again.
    """
    backing = tmp_path / "backing"
    with forgetful(backing, tmp_path / "disk"):
        started = start(tmp_path / "disk" / "run", "faults=[slow@step=14-60,seconds=0.2]")
        started.until(reached(14))
        pid = "" if rank is None else started.ranks()[rank]
        trouble_of(backing).write_text(f"ESTALE * {pid}")
        time.sleep(4.0)
        trouble_of(backing).unlink()
        ended = started.wait()
        assert ended.code == 0, ended.tail
        assert ended.digest == clean.digest and ended.metrics() == clean.metrics()
        kinds = {"save_failed", "unwritten"} if rank is None else {"save_failed"}
        for kind in kinds:
            assert "Stale file handle" in ended.journal(kind)[0]["reason"], ended.tail
        assert_every_sample_once(ended)


@fuse
@pytest.mark.twin
@pytest.mark.parametrize("asked", [False, full(True)])
def test_a_rank_that_dies_while_the_storage_is_stale(
    tmp_path: Path, clean: Result, asked: bool
) -> None:
    """Its supervisor cannot read what ended it, and waits; or is asked to stop meanwhile, and
    started again."""
    backing, slow = tmp_path / "backing", "faults=[slow@step=14-60,seconds=0.1]"
    with forgetful(backing, tmp_path / "disk"):
        started = launch(tmp_path / "disk" / "run", slow)
        started.until(reached(14))
        trouble_of(backing).write_text("ESTALE *")
        os.kill(ranks(started)[0], signal.SIGKILL)
        until(lambda: not ranks(started), "the end of the attempt")
        time.sleep(3.0)
        if asked:
            started.process.terminate()
            stopped = started.wait()
            assert stopped.code == 75, stopped.tail
            assert "launcher: asked to stop, and [Errno 116]" in stopped.text, stopped.tail
            started = launch(tmp_path / "disk" / "run", slow)  # which begins before it answers
            time.sleep(6.0)
        trouble_of(backing).unlink()
        ended = assert_healed(started, clean, [0] if asked else [1, 0])
        for text in (stopped.text, ended.text) if asked else (ended.text,):
            assert "no attempt before it answers again" in text, ended.tail


@pytest.mark.twin
def test_a_rank_that_dies_while_the_disk_is_full(tmp_path: Path, clean: Result) -> None:
    """Its supervisor cannot note the attempt, and no other one could begin; it waits."""
    with small_disk(tmp_path / "disk", "16m") as disk:
        started = launch(disk / "run", SLOWLY)
        started.until(reached(14))
        with filled(disk):
            os.kill(ranks(started)[0], signal.SIGKILL)
            until(lambda: not ranks(started), "the end of the attempt")
            time.sleep(3.0)
            assert started.process.poll() is None, started.wait().tail
        ended = assert_healed(started, clean, [1, 0])
        assert "No space left on device" in ended.text
        assert "no attempt before it answers again" in ended.text, ended.tail


@fuse
def test_a_quota_reached_while_a_checkpoint_is_written(tmp_path: Path, clean: Result) -> None:
    """No room is left behind in it, and the older checkpoints stay."""
    backing, out = tmp_path / "backing", tmp_path / "disk" / "run"
    with forgetful(backing, tmp_path / "disk"):
        started = start(out, SLOWLY)
        started.until(lambda out: bool(list((out / "ring").glob("*/CLEAN"))))
        trouble_of(backing).write_text("EDQUOT */ring/*/*")
        started.until(lambda out: journalled(out, "save_failed") >= 1)
        assert list((out / "ring").glob("*/CLEAN")) and not list((out / "ring").glob("writing-*/*"))
        trouble_of(backing).unlink()
        ended = started.wait()
        assert ended.code == 0, ended.tail
        assert ended.digest == clean.digest and ended.metrics() == clean.metrics()
        failed = ended.journal("save_failed")
        assert all("Disk quota exceeded" in line["reason"] for line in failed), failed
        assert "Disk quota exceeded" in ended.text
        assert_every_sample_once(ended)


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
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_killed_at_a_call(tmp_path: Path, clean: Result) -> None:
    """A rank of a real run dies in a system call; the same command goes on. Calls are counted in

    each thread from a moment in the middle of the run on.
    """
    dice, num = random.Random(SEED), 40
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


def test_a_rank_that_cannot_say_that_it_has_begun_is_not_ended_for_it(tmp_path: Path) -> None:
    """The disk for temporary files is full when it is started again."""
    code = "import os, time; from runner.distributed.env import tell_begun; "
    code += "tell_begun(os.environ, 0, {'process': 1}); time.sleep(60)"
    with small_disk(tmp_path / "exits", "64k") as disk:
        fill(disk)
        own = {EXIT_DIR: str(disk), MARK: tmp_path.name, "RANK": "0"}
        with subprocess.Popen([sys.executable, "-c", code], env=os.environ | own) as rank:
            begun = BegunRanks(disk, tmp_path.name, 0.0)
            until(lambda: process_tree.ranks(tmp_path.name) and list(disk.glob(".*")))
            assert not begun.late() and not begun.late()
            rank.kill()


def test_a_node_of_a_job_reports_its_end_when_there_is_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the storage that the job's nodes share, which was full at its end."""
    out = tmp_path / "run"
    with small_disk(tmp_path / "exits", "64k") as disk:
        monkeypatch.setenv("HOLDFAST_EXIT_DIR", str(disk))
        filled = fill(disk)
        started = launch(out, "steps=3")
        started.until(lambda _: bool(list(disk.glob(".writing.*"))))
        filled.unlink()
        run = started.wait()
        assert run.code == 0, run.tail
        assert (disk / os.uname().nodename).read_text() == "0\n"
