"""guard.sync=false on real ranks: the run, the journal and the metrics of guard.sync=true."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_run
from tests.drills.conftest import POISON
from tests.drills.test_preempt import stopped
from tests.rows import full
from tests.run import Result, finish, read_lines, train

LATE, AT_ONCE = "guard.sync=false", "guard.sync=true"
# A NaN on each rank, one high step, and a range long enough to force a rollback.
TROUBLE = (
    "faults=[nan_grad@step=12,rank=0,nan_loss@step=16,rank=1,nan_loss@step=17,rank=0,"
    "spike@samples=900-903,scale=900,poison@samples=1200-1290]"
)
SHIFT = (
    "faults=[spike@samples=1134-999999,scale=1.6]",
    "guard.window=10",
    "guard.loss_sigmas=4",
    "guard.level_steps=6",
    "guard.drift_nats=50",
)
CUT = ("faults=[poison@samples=700-1200]", "guard.max_rollbacks=3", "guard.cooldown_steps=12")
# What tells when, not what; the digest of settings that differ by guard.sync, paths in out.
WHEN = ("time", "cost_seconds")
WHEN_DETAIL = ("metrics_bytes", "settings", "command", "debug", "lost", "start_seconds")


def journal(run: Result) -> list[dict[str, Any]]:
    lines = [{k: v for k, v in line.items() if k not in WHEN} for line in run.journal()]
    for line in lines:
        line["detail"] = {k: v for k, v in line["detail"].items() if k not in WHEN_DETAIL}
    return lines


def assert_alike(late: Result, at_once: Result) -> None:
    assert journal(late) == journal(at_once), late.tail
    assert_same_run(late, at_once)


def test_a_clean_run(tmp_path: Path, clean: Result) -> None:
    late = finish(tmp_path / "late", LATE)
    assert_alike(late, clean)
    lines = read_lines(late.out / "metrics.jsonl")
    # Each second of the training thread is told of one step: of its launch or of its reading.
    first_two = lines[0]["seconds"] + lines[1]["seconds"]
    wall = lines[-1]["time"] - lines[0]["time"] + first_two
    assert sum(line["seconds"] for line in lines) <= wall + 0.01


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        full(2, [TROUBLE]),
        full(2, ["parallel=ddp", TROUBLE, "eval.every=7"]),
        full(4, ["parallel=hsdp", "parallel.shard_size=2", TROUBLE]),
        full(2, ["parallel=zero1", TROUBLE]),
        full(2, ["parallel=zero2", TROUBLE]),
        full(2, ["parallel=zero3", TROUBLE]),
        full(2, SHIFT),
        full(2, CUT),
        full(2, [TROUBLE, "data.workers=2", "batch.micro_size=4"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list | tuple) else None,
)
def test_trouble(tmp_path: Path, ranks: int, settings: list[str]) -> None:
    # Saved in the foreground: which checkpoint is proven in time must not be the disk's choice.
    told = [*settings, "checkpoint.background=false"]
    late = finish(tmp_path / "late", LATE, *told, ranks=ranks)
    at_once = finish(tmp_path / "at-once", AT_ONCE, *told, ranks=ranks)
    assert late.journal("rollback"), late.tail
    assert_alike(late, at_once)
    assert_every_sample_once(late)


@pytest.mark.twin
def test_stopped_and_killed(tmp_path: Path, clean: Result) -> None:
    out = tmp_path / "run"
    asked = stopped(out, LATE, number=signal.SIGUSR1, rank=1)
    assert asked.summary["status"] == "preempted" and asked.summary["exit_code"] == 75, asked.tail
    assert f"saved at step {asked.summary['steps']}" in asked.summary["reason"]
    assert "rank 1: SIGUSR1" in asked.summary["reason"]
    assert "the same command resumes it" in asked.text
    kill = "faults=[kill@step=50,rank=1]"
    assert train(out, LATE, kill).code != 0
    again = finish(out, LATE, kill)
    assert_same_run(again, clean)
    assert_every_sample_once(again)


@pytest.mark.twin
@pytest.mark.full
def test_it_may_change_from_start_to_start(tmp_path: Path, poisoned: Result) -> None:
    kill = POISON.replace("]", ",kill@step=30,rank=0]")
    assert train(tmp_path / "run", LATE, kill, "checkpoint.keep=9").code != 0
    again = finish(tmp_path / "run", AT_ONCE, kill, "checkpoint.keep=9")
    assert again.digest == poisoned.digest, again.tail


@pytest.mark.full
def test_a_halt(tmp_path: Path) -> None:
    ends = [
        train(
            tmp_path / name,
            mode,
            "faults=[nan_grad@step=20,rank=1]",
            "guard.persist=1",
            "guard.max_rollbacks=0",
        )
        for name, mode in (("late", LATE), ("at-once", AT_ONCE))
    ]
    assert [end.summary["status"] for end in ends] == ["halted", "halted"], ends[0].tail
    assert ends[0].digest == ends[1].digest and ends[0].metrics() == ends[1].metrics()
    assert journal(ends[0]) == journal(ends[1])


@pytest.mark.full
def test_ranks_that_stand_apart_are_found_one_step_later(tmp_path: Path) -> None:
    # In the foreground: these steps are quicker than a checkpoint's writing.
    words = (LATE, "checkpoint.background=false", "faults=[mismatch@step=25,rank=1]")
    ended = train(tmp_path / "run", *words)
    assert ended.code != 0 and "ranks drifted apart: step: " in ended.text, ended.tail
    steps = [int(f.name.split("-")[-1]) for f in (tmp_path / "run" / "ring").glob("*-step-*")]
    assert max(steps) == 20, "nothing of the step or after it is saved"
