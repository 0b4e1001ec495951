"""The checkpoint with the best held-out loss is saved, stays, and survives restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.policy.retention.records import Record, State
from runner.train.save_schedule import BestCheckpoint, held_out_losses
from tests.run import Result, train

# A rate that first learns and then destroys.
SETTINGS = (
    "steps=48", "model.dim=32", "model.heads=2", "batch.global_size=8", "data.seq_len=32",
    "eval.every=6", "eval.samples=8", "checkpoint.every=16", "checkpoint.keep=1",
    "checkpoint.clean_after=2", "checkpoint.memory_every=0", "checkpoint.keep_best=true",
    "optim.lr=40", "schedule.warmup=400", "guard.enabled=false",
)  # fmt: skip


def best_step(run: Result) -> int:
    losses = {step: line["eval_loss"] for step, line in run.counted().items() if line["eval_loss"]}
    return min(losses, key=lambda step: losses[step])


@pytest.mark.full
@pytest.mark.parametrize("faults", ["[]", "[kill@step=37,rank=0]"])
def test_the_best_stays(tmp_path: Path, faults: str) -> None:
    run = train(tmp_path / "run", *SETTINGS, f"faults={faults}", ranks=1, restarts=1)
    assert run.code == 0, run.tail
    best = best_step(run)
    assert 0 < best < 40 and best % 16, run.counted()
    names = [path.name for path in (run.out / "ring").iterdir()]
    assert any(str(best) in name for name in names), (best, names)


def record(serial: int, step: int, state: State = State.clean) -> Record:
    return Record(serial=serial, step=step, cursor=step, state=state)


def test_the_best_of_those_on_disk_is_kept() -> None:
    best = BestCheckpoint([(10, 3.0), (20, 2.0), (30, 2.5)])
    records = [record(1, 10), record(2, 20), record(3, 30)]
    assert best.serials(records) == {2}
    assert best.serials([record(1, 10), record(2, 20, State.tainted), record(3, 30)]) == {3}
    assert best.serials([record(7, 15)]) == set()
    best.evaluated(40, 2.1)
    assert not best.is_new(40)
    best.evaluated(50, 1.9)
    assert best.is_new(50) and not best.is_new(40)


def test_what_a_rollback_undid_is_no_best() -> None:
    best = BestCheckpoint([(10, 3.0), (20, 1.0)])
    best.evaluated(15, 2.0)
    assert best.is_new(15)
    assert best.serials([record(1, 15), record(2, 20)]) == {1}


def test_only_finite_losses_of_applied_steps_count() -> None:
    lines = [
        {"step": 1, "action": "apply", "eval_loss": 2.0},
        {"step": 2, "action": "apply", "eval_loss": None},
        {"step": 3, "action": "discard", "eval_loss": 1.0},
        {"step": 1, "action": "apply", "eval_loss": 2.5},
    ]
    assert held_out_losses(lines) == [(1, 2.5)]
