"""A run whose processes were forked is the run that is started anew."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from runner.system.process import parent
from tests.drills.compare import assert_same_run
from tests.run import TINY, finish, metrics_step, start
from tests.warm import suits

FAULTS = "faults=[nan_grad@step=7,rank=1,kill@step=14,rank=0]"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.full
def test_it_ends_the_same_killed_and_restarted(tmp_path: Path) -> None:
    told = (FAULTS, "steps=20", "data.workers=1")
    forked = finish(tmp_path / "forked", *told, restarts=1)
    anew = finish(tmp_path / "anew", *told, restarts=1, cold=True)
    assert len(forked.journal("crash")) == 1, forked.tail
    assert_same_run(forked, anew)


def test_its_processes_are_what_they_would_be(tmp_path: Path) -> None:
    out = tmp_path / "run"
    started = start(out, "faults=[slow@step=3-60,seconds=0.5]", env={"A_WORD": "of mine"})
    started.until(lambda out: metrics_step(out) >= 2)
    ranks = started.ranks()
    assert sorted(ranks) == [0, 1] and parent(started.process.pid) == os.getpid()
    for rank, pid in ranks.items():
        assert parent(pid) == started.process.pid and os.getsid(pid) == pid
        shown = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert b"A_WORD=of mine" in shown and f"RANK={rank}".encode() in shown
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        assert words[:5] == [sys.executable, "-u", "-m", "runner", f"out={out}"]
        assert TINY[0] in words
    started.kill()
    assert started.wait().code == -9


@pytest.mark.parametrize(
    ("arguments", "env", "suited"),
    [
        ([*TORCHRUN, "--standalone"], {}, True),
        ([sys.executable, "-u", "-m", "runner", "out=x"], {}, True),
        ([sys.executable, "program.py", "out=x"], {"PYTHONFAULTHANDLER": "1"}, True),
        ([sys.executable, "-c", "pass"], {}, False),
        ([sys.executable, "-m", "pytest"], {}, False),
        (["/usr/bin/python3", "-m", "runner"], {}, False),
        # What is read only when an interpreter or a library begins.
        ([*TORCHRUN], {"LD_PRELOAD": "x.so"}, False),
        ([*TORCHRUN], {"PYTHONPATH": "elsewhere"}, False),
        ([*TORCHRUN], {"OMP_NUM_THREADS": "7"}, False),
    ],
)
def test_what_is_begun_anew(arguments: list[str], env: Mapping[str, str], suited: bool) -> None:
    assert suits(arguments, os.environ | env) is suited
