"""The checkpoint with the best held-out loss is saved, stays, and survives restarts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runner.command.export import export_command
from runner.config.schema import CheckpointConfig, EvalConfig, Goal
from runner.policy.retention.records import Record, State
from runner.train.evaluate import BestEvaluation, evaluations
from tests.conftest import MEMORY_DIR
from tests.crash_world import disk_ring
from tests.rows import full
from tests.run import Result, train
from tests.stored import moment

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


def test_the_best_that_was_in_memory_only_is_saved_and_the_proof_of_the_end_replaces_it_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the best is written. The end is better still, but in no metrics."""
    monkeypatch.setenv(MEMORY_DIR, str(tmp_path))
    learning = ("optim.lr=0.01", "schedule.warmup=5", "checkpoint.memory_every=4", "steps=14")
    fault = ("faults=[kill@step=12,rank=0,at=save]", "checkpoint.background=false")
    run = train(tmp_path / "run", *SETTINGS, *learning, *fault, ranks=1, restarts=1)
    assert run.code == 0 and best_step(run) == 12, run.tail
    last = run.journal("start")[-1]
    assert (last["step"], last["detail"]["tier"]) == (12, "memory"), run.tail
    assert export_command([str(run.out), str(tmp_path / "best"), "--step", "best"]) == 0
    told = capsys.readouterr().out
    assert "exported step 12 of 14 (clean)" in told and " had " not in told, told


@pytest.mark.twin
@pytest.mark.parametrize(("ranks", "fault"), [(1, ""), full(2, "kill@step=27,rank=1")])
def test_the_best_is_exported_and_outlives_out_at_the_remote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, fault: str
) -> None:
    """Each new best is sent, and stays there when newer ones come and ``out`` is lost."""

    def best_of(out: Path, folder: Path) -> str:
        assert export_command([str(out), str(folder), "--step", "best"]) == 0
        return capsys.readouterr().out

    remote, best = tmp_path / "remote", tmp_path / "best"
    words = (*SETTINGS, f"checkpoint.remote=file://{remote}", "checkpoint.remote_wait_seconds=60")
    plain = train(tmp_path / "plain", *SETTINGS, ranks=ranks)
    assert plain.code == 0, plain.tail
    half = train(
        tmp_path / "run",
        *words,
        "steps=40",
        "schedule.total=48",
        f"faults=[{fault}]",
        ranks=ranks,
        restarts=1,
    )
    assert half.code == 0, half.tail
    shutil.rmtree(half.out)
    run = train(half.out, *words, ranks=ranks)
    assert run.code == 0 and run.digest == plain.digest, run.tail
    assert run.journal("restored"), run.tail
    step = best_step(plain)
    [kept] = (remote / "ring").glob(f"*-step-{step:08d}")
    assert not list((run.out / "ring").glob(f"*-step-{step:08d}")), "it was not fetched"
    shutil.copytree(kept, run.out / "ring" / kept.name, ignore=shutil.ignore_patterns("run"))
    for one in (plain, run):
        told = best_of(one.out, best / one.out.name)
        assert f"exported step {step} of 48 (clean)" in told and "the lowest" in told, told
    wanted, got = (load_file(best / name / "model.safetensors") for name in ("plain", "run"))
    assert wanted.keys() == got.keys() and all(torch.equal(wanted[n], got[n]) for n in wanted)
    shutil.rmtree(run.out / "ring" / kept.name)
    told = best_of(run.out, tmp_path / "other")
    assert f"step {step} had " in told and "checkpoint.keep_best=true keeps it" in told, told


def record(serial: int, step: int, state: State = State.clean) -> Record:
    return Record(serial=serial, step=step, cursor=step, state=state)


def test_the_best_of_those_on_disk_is_kept() -> None:
    best = BestEvaluation(EvalConfig(), [(10, 3.0), (20, 2.0), (30, 2.5)])
    records = [record(1, 10), record(2, 20), record(3, 30)]
    assert best.serials(records) == {2}
    assert best.serials([record(1, 10), record(2, 20, State.tainted), record(3, 30)]) == {3}
    assert best.serials([record(7, 15)]) == set()
    equal = BestEvaluation(EvalConfig(), [(10, 2.0), (20, 2.0)])
    found = equal.serials([record(1, 10), record(2, 10), record(3, 20)])
    assert found == {2}, "the first of equal ones, as an early stop names it, saved last"
    best.note(40, 2.1)
    assert not best.is_new(40)
    best.note(50, 1.9)
    assert best.is_new(50) and not best.is_new(40)


def test_the_best_stays_until_a_better_one_is_proven(tmp_path: Path) -> None:
    ring = disk_ring(tmp_path, CheckpointConfig(clean_after=5, keep=1))
    best = BestEvaluation(EvalConfig(), [])
    ring.begin()
    ring.keep_best(best.serials)
    best.saved_steps = ring.saved_steps

    def save(step: int, value: float, *, is_proven: bool = False) -> list[int]:
        best.note(step, value)
        ring.save(moment(step))
        ring.drain()
        ring.after_step(step + 5, 99 if is_proven else 0)
        ring.drain()
        return [record.step for record in ring.records]

    assert save(10, 2.0, is_proven=True) == [10]
    assert save(20, 3.0, is_proven=True) == [10, 20]
    assert save(30, 1.0) == [10, 20, 30]
    assert save(40, 1.5) == [10, 20, 30, 40] and not best.is_new(40)
    assert save(50, 1.6) == [10, 20, 30, 40, 50], "the best, and the newest two unproven"
    ring.abandon_after(2)
    ring.drain()
    assert [record.step for record in ring.records] == [10, 20]
    assert save(30, 1.2, is_proven=True) == [30]
    ring.abandon_after(0)
    assert save(40, 2.5) == [40] and best.is_new(40), "better ones are gone"
    ring.close()


def test_what_a_rollback_undid_is_no_best() -> None:
    best = BestEvaluation(EvalConfig(), [(10, 3.0), (20, 1.0)])
    best.note(15, 2.0)
    assert best.is_new(15)
    assert best.serials([record(1, 15), record(2, 20)]) == {1}
    best.note(15, 4.0)  # computed again, with other samples
    assert not best.is_new(15)


def test_only_finite_losses_of_applied_steps_count() -> None:
    lines = [
        {"step": 1, "action": "apply", "eval_loss": 2.0},
        {"step": 2, "action": "apply", "eval_loss": None},
        {"step": 3, "action": "discard", "eval_loss": 1.0},
        {"step": 1, "action": "apply", "eval_loss": 2.5},
    ]
    assert evaluations(lines, "eval_loss") == [(1, 2.5)]


def test_a_rollback_undoes_later_evaluations() -> None:
    lines = [{"step": n, "action": "apply", "eval_accuracy": n / 10} for n in (1, 2, 3)]
    lines += [{"step": 2, "action": "apply"}]
    assert evaluations(lines, "eval_accuracy") == [(1, 0.1)]


def test_the_run_ends_when_evaluations_get_no_better() -> None:
    lowest = BestEvaluation(EvalConfig(stop_after=2), [(10, 3.0), (20, 2.0), (30, 2.0)])
    assert lowest.ending(30) == ""
    lowest.note(40, 2.5)
    assert "eval_loss 2 of step 20 is the lowest" in lowest.ending(40)
    assert lowest.ending(30) == "", "what a rollback has undone does not count"
    lowest.note(30, 1.9)
    assert lowest.ending(30) == lowest.ending(40) == ""
    accuracy = EvalConfig(metric="eval_accuracy", goal=Goal.highest, stop_after=1)
    highest = BestEvaluation(accuracy, [(10, 0.5), (20, 0.7)])
    assert highest.ending(20) == "" and highest.is_new(20) is False
    highest.note(30, 0.6)
    assert "0.7 of step 20 is the highest" in highest.ending(30)
    highest.note(40, float("nan"))
    assert highest.ending(40) == highest.ending(30), "no loss is no evaluation"
    assert BestEvaluation(EvalConfig(), [(10, 1.0), (20, 2.0)]).ending(20) == ""


EARLY = (*SETTINGS, "eval.every=4", "eval.stop_after=3", "checkpoint.every=8")


def test_an_early_stop_is_exact_over_rollback_crash_and_resume(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", *EARLY, "eval.goal=highest", ranks=1)
    assert plain.code == 0, plain.tail
    end = plain.summary
    assert end["status"] == "done" and end["steps"] < 48, plain.tail
    assert end["reason"].startswith("stopped early: eval_loss ") and "highest" in end["reason"]
    [line] = plain.journal("early_stop")
    assert (line["step"], line["reason"]) == (end["steps"], end["reason"])

    hurt = ("faults=[kill@step=11,rank=0]", "eval.goal=highest")
    killed = train(tmp_path / "killed", *EARLY, *hurt, ranks=1, restarts=1)
    assert killed.code == 0, killed.tail
    assert (killed.summary["reason"], killed.digest) == (end["reason"], plain.digest)
    again = train(tmp_path / "plain", *EARLY, "eval.goal=highest", ranks=1)
    assert (
        again.code == 0 and again.digest == plain.digest and len(again.journal("early_stop")) == 1
    )
    longer = train(tmp_path / "plain", *EARLY, "eval.goal=lowest", "eval.stop_after=0", ranks=1)
    assert longer.code == 0 and longer.summary["steps"] == 48, "another patience goes on"
