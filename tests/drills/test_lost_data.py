"""Bytes that were written and not synced are gone with the machine: a real run on such a disk."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_run
from tests.run import Result, finish, metrics_step, start

SEED = 3
LAZY_FS = Path(__file__).parents[1] / "lazy_fs.py"


def why_not() -> str | None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse, or not permitted: tests/mechanism/test_crash_model.py stands in"
    if importlib.util.find_spec("fuse") is None or shutil.which("fusermount") is None:
        return "needs FUSE: apt-get install libfuse2 fuse; pip install fusepy"
    return None


def trouble_of(backing: Path) -> Path:
    return backing.with_name("trouble")


@contextlib.contextmanager
def forgetful(backing: Path, place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``backing`` seen at ``place``; kill the process, and what was not synced is gone.

    A file ``trouble`` beside ``backing`` makes it ill: see :class:`tests.lazy_fs.Ill`.
    """
    backing.mkdir(exist_ok=True)
    place.mkdir(exist_ok=True)
    words = [sys.executable, str(LAZY_FS), str(backing), str(place), str(trouble_of(backing))]
    process = subprocess.Popen(words)
    limit = time.monotonic() + 30
    while not os.path.ismount(place):
        if process.poll() is not None or time.monotonic() > limit:
            process.kill()
            pytest.skip("FUSE cannot mount here")
        time.sleep(0.05)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        subprocess.run(["fusermount", "-u", "-z", str(place)], check=True)


def reached(step: int) -> Callable[[Path], bool]:
    def look(out: Path) -> bool:
        # A rename is no single change to those who look on through FUSE.
        with contextlib.suppress(FileNotFoundError):
            return metrics_step(out) >= step
        return False

    return look


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.timeout(1800)
def test_the_machine_goes_down(tmp_path: Path, clean_alone: Result) -> None:
    """Three times, each time at another step; every time the disk forgets."""
    dice = random.Random(SEED)
    backing, place = tmp_path / "backing", tmp_path / "disk"
    for number in range(3):
        step = 12 + 15 * number + dice.randrange(10)
        with forgetful(backing, place) as disk:
            started = start(place / "run", "faults=[slow@step=10-60,seconds=0.05]", ranks=0)
            started.until(reached(step), timeout=300)
            disk.kill()  # nothing is flushed
            started.kill()
            started.wait()
        print(f"seed {SEED}: the machine went down after step {step}")
    assert (backing / "run" / "ring").is_dir()
    shutil.copytree(backing / "run", tmp_path / "run")
    again = finish(tmp_path / "run", ranks=0)
    assert again.summary["restarts"] == 3
    assert_same_run(again, clean_alone)
    assert_every_sample_once(again)
