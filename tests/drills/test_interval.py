"""``checkpoint.every=auto``: when checkpoints are made follows the clock, the result does not."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from tests.drills.compare import assert_every_sample_once, assert_same_end
from tests.drills.conftest import POISON
from tests.run import Result, journalled, start, train

# Begins with 6 steps; failures are expected so seldom that it goes up to the bound at once.
AUTO = (
    "checkpoint.every=auto",
    "checkpoint.clean_after=3",
    "checkpoint.auto_most=15",
    "checkpoint.keep=99",
)


def saved_steps(out: Path) -> list[int]:
    return sorted(
        json.loads(path.read_text())["step"] for path in (out / "ring").glob("*/manifest.json")
    )


def test_by_cost_it_ends_as_by_count(poisoned: Result, runs: Path) -> None:
    """Discards, a rollback, a kill, and a restart that begins with the journalled interval."""
    out = runs / "auto"
    started = start(out, *AUTO, POISON)
    started.until(lambda out: journalled(out, "rollback") > 0)
    started.kill()
    started.wait()
    run = train(out, *AUTO, POISON)
    assert run.code == 0, run.tail
    assert_same_end(run, poisoned)
    assert_every_sample_once(run)
    assert run.summary["rollbacks"] == 1 and run.summary["restarts"] == 1, run.tail
    changes = run.journal("interval")
    assert [line["detail"]["interval_steps"] for line in changes] == [15], run.tail
    assert changes[0]["decision"] == "a checkpoint every 15 steps"
    assert "a save costs" in changes[0]["reason"] and "before: 6" in changes[0]["reason"]
    steps = saved_steps(out)
    assert steps[:3] == [0, 6, 12] and steps[-1] == 60
    resumed = run.journal("start")[-1]["step"]
    after = [step for step in steps if step >= resumed]
    gaps = [later - step for step, later in pairwise(after)]
    assert gaps[:-1] and set(gaps[:-1]) == {15} and gaps[-1] <= 15, steps  # the last at the end
