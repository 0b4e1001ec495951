"""The clock of the machine is set back or forward by a year: nothing but the times differ."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_run
from tests.run import Result, finish, train

YEAR = 366 * 24 * 3600
# ``jump``: at this call of the clock it is set, in the middle of the run.
PROGRAM = """
import sys, time

OFFSET, JUMP = {offset}, {jump}
calls, real, real_ns = [0], time.time, time.time_ns


def set_by():
    calls[0] += 1
    return OFFSET if calls[0] > JUMP else 0


time.time = lambda: real() + set_by()
time.time_ns = lambda: real_ns() + set_by() * 10**9

from runner.__main__ import run

run()  # as a rank ends: gloo's threads outlive a finalized interpreter
"""


def program(folder: Path, offset: int, jump: int = 0) -> Path:
    path = folder / f"clock{offset}-{jump}.py"
    path.write_text(PROGRAM.format(offset=offset, jump=jump))
    return path


@pytest.mark.twin
@pytest.mark.full
def test_a_restart_a_year_before_and_a_year_after(tmp_path: Path, clean: Result) -> None:
    """Killed twice; each life has another year. Journal, ring, claims and metrics go on."""
    out = tmp_path / "run"
    kills = "faults=[kill@step=18,rank=1,kill@step=38,rank=0]"
    for offset in (YEAR, -YEAR):
        assert train(out, kills, program=program(tmp_path, offset), cold=True).code != 0
    ended = finish(out, kills)
    assert_same_run(ended, clean)
    assert_every_sample_once(ended)
    times = [line["time"] for line in ended.journal("start")]
    assert times[0] > times[2] + YEAR / 2 > times[1] + YEAR, "the clock was not set"
    assert ended.summary["restarts"] == 2
    spent = ended.summary["time"]
    assert all(seconds >= 0 for seconds in spent.values()), spent
    assert 0 <= ended.summary["goodput"] <= 1


@pytest.mark.full
@pytest.mark.parametrize("offset", [YEAR, -YEAR])
def test_set_while_it_runs(tmp_path: Path, clean: Result, offset: int) -> None:
    """Nothing that waits, watches or stops goes by that clock."""
    run = finish(
        tmp_path / "run",
        "watchdog.floor_seconds=20",
        program=program(tmp_path, offset, jump=60),
        cold=True,
    )
    assert_same_run(run, clean)
    assert not run.journal("crash") and run.summary["restarts"] == 0
    assert 0 <= run.summary["goodput"] <= 1


@pytest.mark.full
def test_a_time_limit_is_counted_from_the_start(tmp_path: Path, clean: Result) -> None:
    """The scheduler's end of the job is an hour away; a clock that jumps does not bring it."""
    run = train(
        tmp_path / "run",
        "preempt.margin_seconds=10",
        program=program(tmp_path, YEAR, jump=60),
        cold=True,
        env={"HOLDFAST_END_TIME": str(int(time.time()) + 3600)},
    )
    assert run.code == 0, run.tail
    assert_same_run(run, clean)
