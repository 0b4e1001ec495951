"""Every rank killed at every point of a step, in groups of 2, 3 and 4: one end.

Of two ranks in both ways: with collectives that break, and with none that does, as over NCCL.
Of more in one way or the other, in turn.
"""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest

from runner.fault.spec import POINTS
from tests.drills.compare import assert_every_sample_once, assert_same_end, assert_same_run
from tests.rows import full_but
from tests.run import Result, finish, nothing_breaks

SEED = 7
SETTINGS = ("steps=30", "schedule.total=60", "checkpoint.every=8", "checkpoint.keep=9")
# Read at step 22 and after: enough bad steps to force a rollback.
POISON = "poison@samples=700-790"
ALWAYS = {(3, 2, "save", True)}
MATRIX = [
    (world, rank, point, breaks)
    for world in (2, 3, 4)
    for rank in range(world)
    for place, point in enumerate(POINTS)
    for breaks in (True, False)
    if world == 2 or breaks == ((rank + place) % 2 == 1)
]
_in_peace: dict[tuple[int, bool], Result] = {}


def in_peace(runs: Path, world: int, poisoned: bool) -> Result:
    key = (world, poisoned)
    if key not in _in_peace:
        faults = [f"faults=[{POISON}]"] if poisoned else []
        out = runs / f"matrix-{world}-{poisoned}"
        _in_peace[key] = finish(out, *SETTINGS, *faults, ranks=world)
    return _in_peace[key]


@pytest.mark.parametrize(("world", "rank", "point", "breaks"), full_but(ALWAYS, MATRIX))
def test_killed(
    tmp_path: Path, runs: Path, world: int, rank: int, point: str, breaks: bool
) -> None:
    dice = random.Random(f"{SEED} {world} {rank} {point}")
    step = {"save": 8 * dice.randrange(1, 4), "rollback": 22}.get(point, dice.randrange(2, 30))
    poisoned = point == "rollback"
    print(f"seed {SEED}: rank {rank} of {world} killed at {point} of step {step}")
    expected = in_peace(runs, world, poisoned)
    place = f"step={step},rank={rank},at={point}"
    faults = ",".join([f"kill@{place}", *([POISON] if poisoned else [])])
    began = time.monotonic()
    with contextlib.nullcontext() if breaks else nothing_breaks():
        run = finish(tmp_path / "run", *SETTINGS, f"faults=[{faults}]", ranks=world, restarts=1)
    assert run.summary["restarts"] == 1, run.tail
    (crash,) = run.journal("crash")
    assert crash["ranks"] == [rank], crash
    again = [line["time"] for line in run.journal("start")][1]
    print(f"all in {time.monotonic() - began:.1f} s; again {again - crash['time']:.1f} s after")
    (assert_same_end if poisoned else assert_same_run)(run, expected)
    assert_every_sample_once(run)
