"""A device's memory does not hold a micro-batch: smaller ones are taken, the run is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.system.json_lines import read_lines
from tests.drills.compare import assert_every_sample_once
from tests.drills.test_supervise import launch
from tests.oom_script import BAD, FULL_AT
from tests.rows import full
from tests.run import finish
from tests.script_run import ends_of

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SHORT = ("steps=24", "schedule.total=24", "batch.micro_size=8")


@pytest.mark.twin
@pytest.mark.parametrize(
    ("engine", "precision", "rounding"), [("fsdp", "fp32", 1e-4), full("zero2", "bf16", 0.01)]
)
def test_micro_batches_are_halved_until_they_fit(
    tmp_path: Path, engine: str, precision: str, rounding: float
) -> None:
    told = (*SHORT, f"parallel={engine}", f"compute.precision={precision}")
    whole = finish(tmp_path / "whole", *told)
    run = launch(tmp_path / "run", *told, "faults=[oom@step=12,rank=1,rows=2]").wait()
    assert run.code == 0, run.tail
    attempts, _ = read_lines(run.out / "attempts.jsonl")
    assert [(one["code"], one["cause"]) for one in attempts] == [
        (1, "memory"),
        (1, "memory"),
        (0, None),
    ]
    halved = run.journal("micro_size")
    assert [line["detail"]["size"] for line in halved] == [4, 2]
    assert all(line["ranks"] == [1] and "CUDA out of memory" in line["reason"] for line in halved)
    assert run.summary["skipped"] == [] and run.summary["discarded_steps"] == 0
    assert_every_sample_once(run)
    for mine, theirs in zip(run.metrics(), whole.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=rounding), mine
        assert (mine["cursor"], mine["lr"]) == (theirs["cursor"], theirs["lr"])
    # Whoever starts it again is told; the settings are the user's.
    again = finish(run.out, *told, "steps=26")
    assert "micro-batches of 2 sequences, not 8" in again.text, again.tail
    assert "micro_size: 8" in (run.out / "config.yaml").read_text()


@pytest.mark.parametrize("choice", ["skip", full("halve")])
def test_a_users_loop_goes_on_by_its_choice(tmp_path: Path, choice: str) -> None:
    """Poisoned, out of memory, stopped in an evaluation, killed: the plain loop, bit for bit."""
    for end in ends_of("oom_script.py", tmp_path, str(tmp_path), choice, restarts=5):
        assert end["run"] == end["plain"]
        full = [[FULL_AT, FULL_AT + 1]] if choice == "skip" else []
        assert end["skipped"] == [[BAD, BAD + 1], *full]
    lines, _ = read_lines(tmp_path / "run" / "journal.jsonl")
    [stopped] = [line["reason"] for line in lines if line["kind"] == "preempted"]
    assert stopped.startswith("asked to stop (rank 1: SIGTERM); saved at step ")
    told = [line for line in lines if line["kind"] == "out_of_memory"]
    assert all(line["ranks"] == [1] and "CUDA out of memory" in line["reason"] for line in told)
    decided = [line["decision"] for line in told]
    step = FULL_AT  # a batch before it was skipped, and steps count from 1
    halved = [f"compute batches in {parts} parts from step {step} on" for parts in (2, 4)]
    assert decided == (halved if choice == "halve" else ["skip 1 batch"])
