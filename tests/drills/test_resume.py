"""P4: killed at any instant and started again, a run ends as if it had never been interrupted."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_end, assert_same_run
from tests.drills.conftest import POISON
from tests.rows import full
from tests.run import Result, finish, journalled, metrics_step, start, train

SEED = 20240517


# So that it is under way still when a busy machine comes to the kill.
SLOWED = "faults=[slow@step=2-60,seconds=0.1]"
NAN_TWICE = "nan_grad@step=25,rank=1,nan_loss@step=45,rank=0"


@pytest.fixture(scope="module")
def discarding(runs: Path) -> Result:
    return finish(runs / "discarding", f"faults=[{NAN_TWICE}]")


@pytest.mark.twin
@pytest.mark.full
def test_killed_one_step_after_a_discard(tmp_path: Path, discarding: Result) -> None:
    """The discards are known from the journal then; they are not computed again."""
    faults = f"faults=[{NAN_TWICE},kill@step=26,rank=1,kill@step=46,rank=0]"
    for _ in range(2):
        killed = train(tmp_path / "run", faults)
        assert killed.code != 0 and "SIGKILL" in killed.text, killed.tail
    again = finish(tmp_path / "run", faults)
    assert len(again.journal("discard")) == 2, again.tail
    assert_same_run(again, discarding)
    assert episodes(again) == episodes(discarding), "killed in the middle of each"
    assert len(episodes(again)) == 2


def episodes(run: Result) -> list[list[object]]:
    """What was said of trouble that ended, without times."""
    keys = ("step", "decision", "reason", "samples", "detail")
    return [[line[key] for key in keys] for line in run.journal("episode")]


@pytest.mark.twin
@pytest.mark.full
def test_a_discard_that_is_older_than_the_checkpoint_before_it(
    tmp_path: Path, discarding: Result
) -> None:
    """Checkpoint 20 is lost, so the second command saves it again, knowing the discard at 25."""
    out = tmp_path / "run"
    train(out, f"faults=[{NAN_TWICE},kill@step=26,rank=0]")
    for folder in (out / "ring").glob("*-step-00000020"):
        shutil.rmtree(folder)
    train(out, f"faults=[{NAN_TWICE},kill@step=25,rank=0]", "checkpoint.background=false")
    assert list((out / "ring").glob("*-step-00000020/COMMITTED"))
    again = finish(out, f"faults=[{NAN_TWICE}]")
    assert again.journal("start")[-1]["step"] == 20, again.tail
    assert_same_run(again, discarding)


@pytest.mark.parametrize("num_kills", [5, full(20)])
def test_random_kills_of_the_whole_group(tmp_path: Path, clean: Result, num_kills: int) -> None:
    """At random steps, at a random instant within them; some while still starting."""
    dice = random.Random(SEED)
    out = tmp_path / "run"
    done_before = 0
    for number in range(num_kills):
        at_step = 1 + number * 59 // num_kills + dice.randrange(max(1, 59 // num_kills))
        delay = dice.random() * 0.08
        while_starting = number % 5 == 4
        print(f"kill {number}: at step {at_step} + {delay:.3f} s, starting: {while_starting}")
        started = start(out, SLOWED)
        if while_starting:
            started.until(has_journalled("start", number + 1))
        else:
            started.until(has_reached(at_step))
        time.sleep(delay)
        assert started.process.poll() is None, "it ended before the kill: " + started.wait().tail
        started.kill()
        killed = started.wait()
        assert killed.code == -9, killed.tail
        done_before = max(done_before, metrics_step(out))
    again = finish(out)
    print(f"seed {SEED}: {num_kills} kills up to step {done_before}")
    assert again.summary["restarts"] == num_kills
    assert_same_run(again, clean)
    assert_every_sample_once(again)


# Goes no further once the journal has so many lines of a kind.
STOPS = """
import os, time
from runner.__main__ import run
from runner.observe.journal import Journal

kind, count = os.environ["STOPS_AT"].split()
add = Journal.add

def stopping(self, incident):
    add(self, incident)
    if sum(line.kind == kind for line in self.history.incidents) >= int(count):
        time.sleep(1000)

Journal.add = stopping
run()
"""


IN_TROUBLE = [("discard", 1), ("discard", 2), ("rollback", 1), ("discard", 3)]


@pytest.mark.full
def test_killed_in_the_middle_of_trouble(tmp_path: Path, poisoned: Result) -> None:
    """After the first discard, after the second, after the rollback, and in the replay."""
    run = (POISON, "checkpoint.keep=9")
    out, program = tmp_path / "run", tmp_path / "stops.py"
    program.write_text(STOPS)
    for kind, count in IN_TROUBLE:
        started = start(out, *run, program=program, env={"STOPS_AT": f"{kind} {count}"})
        started.until(has_journalled(kind, count))
        assert started.process.poll() is None, started.wait().tail
        started.kill()
        assert started.wait().code == -9
        assert journalled(out, kind) == count
    again = finish(out, *run)
    assert again.summary["restarts"] == len(IN_TROUBLE)
    assert len(again.journal("rollback")) == 1, again.tail
    assert again.summary["skipped"] == poisoned.summary["skipped"]
    assert again.summary["discarded_steps"] == poisoned.summary["discarded_steps"]
    assert_same_end(again, poisoned)
    assert_every_sample_once(again)


def has_journalled(kind: str, count: int) -> Callable[[Path], bool]:
    return lambda out: journalled(out, kind) >= count


def has_reached(step: int) -> Callable[[Path], bool]:
    return lambda out: metrics_step(out) >= step
