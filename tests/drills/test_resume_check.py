"""A resume that is not the same run is told, with the step; one that is, is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import train

ROOT = Path(__file__).parents[2]
SMALL = ("steps=24", "model.dim=32", "model.heads=2", "batch.global_size=8", "data.seq_len=32")
# Slow before it dies, so that the checkpoint of step 10 is on disk by then.
KILLED = ("faults=[slow@step=11-17,seconds=0.2,kill@step=17,rank=0]", "checkpoint.memory_every=0")


def test_wrong_moments_are_told_at_the_second_step(tmp_path: Path) -> None:
    script = ROOT / "tests" / "forgetful_script.py"
    run = train(tmp_path / "run", *SMALL, *KILLED, ranks=1, restarts=1, program=script)
    (line,) = run.journal("resume")
    assert line["step"] == 12 and "moments" in line["reason"], line
    assert line["detail"]["exactly"]


@pytest.mark.full
def test_other_ranks_are_near_enough(tmp_path: Path) -> None:
    dead = train(tmp_path / "run", *SMALL, *KILLED, ranks=2)
    assert dead.code != 0
    run = train(tmp_path / "run", *SMALL, *KILLED, ranks=1)
    assert run.code == 0 and not run.journal("resume"), run.tail
