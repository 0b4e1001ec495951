"""P3 to P5 with samples that draw at random, by torch, NumPy and Python's random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drills.compare import assert_follows, assert_same_end
from tests.run import finish, metrics_step, skip_override, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")
# 300 images: four epochs.
AUGMENTED = (
    "model._target_=tests.guests.Seeing",
    "data._target_=tests.guests.Augmented",
    "data.held_out=0.1",
    "steps=40",
    "schedule.total=40",
)
OWN = ("accuracy", "recall/second", "eval_accuracy", "eval_mean_loss")
BAD = "faults=[poison@samples=520-610,kill@step=27,rank=1]"


@pytest.mark.twin
def test_poisoned_and_killed_is_as_told_whatever_process_reads(tmp_path: Path) -> None:
    sick = finish(tmp_path / "sick", *AUGMENTED, "data.workers=2", BAD, restarts=1)
    assert sick.journal("rollback") and sick.summary["restarts"] == 1, sick.tail
    skip = skip_override(sick.summary["skipped"])
    told = finish(tmp_path / "told", *AUGMENTED, "data.workers=0", skip)
    assert_same_end(sick, told)
    # The model's own metrics, of each attempt; told and killed alike.
    own = [
        [{name: line.get(name) for name in OWN} for line in run.metrics() if applied(line)]
        for run in (sick, told)
    ]
    assert own[0][-20:] == own[1][-20:]
    for line in filter(applied, sick.metrics()):
        assert line["mean_loss"] == line["loss"] and 0 <= line["accuracy"] <= 1
        if line["eval_loss"] is not None:
            assert line["eval_mean_loss"] == line["eval_loss"]
    assert own[0][-1]["eval_accuracy"] is not None


def applied(line: dict[str, Any]) -> bool:
    return line["action"] == "apply"


@pytest.mark.full
def test_other_ranks_read_the_same_samples(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", *AUGMENTED)
    elastic = tmp_path / "elastic"
    killed = start(elastic, *AUGMENTED, "data.workers=1")
    killed.until(lambda out: metrics_step(out) >= 12)
    killed.kill()
    finish(elastic, *AUGMENTED, "steps=25", ranks=1)
    run = finish(elastic, *AUGMENTED, "data.workers=2", ranks=3)
    # Batches that were drawn anew differ by hundredths.
    assert_follows(run, whole, within=1e-4)
