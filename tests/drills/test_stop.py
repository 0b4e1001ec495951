"""P15: a request to stop in any phase is seen within a micro-batch, and the run ends as if it had
never been stopped: the state of the last applied step is saved, and the rest is done anew."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.drills.conftest import POISON
from tests.rows import full_but
from tests.run import Result, train

pytestmark = pytest.mark.usefixtures("leaves_nothing")
PROGRAM = Path(__file__).parents[1] / "stopped_in.py"
# Four micro-batches a rank and step, six an evaluation.
SETTINGS = (
    *("steps=20", "batch.micro_size=4", "eval.every=6", "eval.samples=48", "debug.audit_every=6"),
    *("checkpoint.keep_best=true", "guard.remedy=verdict", "explain=full"),
)
BAD_SAMPLES = "faults=[poison@samples=480-481]"
SLOW = ("faults=[slow@step=11-12,rank=1,seconds=3]", "preempt.grace_seconds=5")
STEPS = {
    "plain": (),
    "best": (
        *("guard.enabled=false", "checkpoint.keep=1"),
        "schedule._target_=tests.drills.test_stop.destroying",
    ),
    "samples": (BAD_SAMPLES,),
    # Two such steps take longer than the grace.
    "slow": SLOW,
    "slow buffers": (
        *SLOW,
        "model._target_=tests.guests.Residual",
        "data._target_=tests.guests.Images",
    ),
    "slow zero": (*SLOW, "parallel=zero2"),
    "compiled": ("compute.compile=true",),
    "average": ("optim.ema=0.9", "parallel=ddp"),
    "zero": (BAD_SAMPLES, "parallel=zero2", "optim.ema=0.9"),
    "passing": ("faults=[nan_grad@step=15,rank=1]",),
    # Of losses that fall: the first is the best, the second ends the run.
    "early": ("eval.stop_after=1", "eval.goal=highest"),
    "rate": (
        *("schedule._target_=tests.drills.test_redo.jump", "steps=32"),
        *("guard.max_rollbacks=6", "guard.cooldown_steps=1000"),
        # Back to the same checkpoint: a stop drops snapshots, and waits for proofs under way.
        *("checkpoint.memory_every=0", "checkpoint.clean_after=3"),
    ),
}


def destroying(updates: int) -> float:
    """A schedule after which the held-out loss of step 12 is the best."""
    return 3e-3 if updates < 12 else 0.3


@dataclass(frozen=True)
class Phase:
    """Where a run is asked, and what is expected of it.

    Args:
        run: which of the runs of :data:`STEPS`.
        place: see tests/stopped_in.py.
        saved: the step that is saved.
        left: words of the reason.
        is_lost: ``out`` is lost afterwards, and comes back from a bucket, unproven.
    """

    run: str
    place: str
    saved: int
    left: str = ""
    is_lost: bool = False


BENCH, EVALUATOR = "runner.explain.probe:Bench", "runner.train.evaluate:Evaluator"
RATE = "runner.explain.repeated_steps:RateProbe._is_cured 2 9"
NEXT = "the next start makes the evaluation of step"
ANEW = "is bad and not explained yet: the next start computes it again"
PHASES = {
    "step": Phase("plain", "runner.train.step:Stepper.launch 13 2", 14),
    "slow step": Phase("slow", "runner.train.step:Stepper.launch 13 2", 12),
    "slow step of buffers": Phase("slow buffers", "runner.train.step:Stepper.launch 13 2", 12),
    "slow step under ZeRO": Phase("slow zero", "runner.train.step:Stepper.launch 13 2", 12),
    "first step": Phase("plain", "runner.train.step:Stepper.launch 1 2", 0),
    "first compile": Phase("compiled", "runner.train.step:Stepper.launch 1 1", 0),
    "step before an evaluation": Phase("plain", "runner.train.step:Stepper.launch 12 2", 12, NEXT),
    "evaluation": Phase("best", f"{EVALUATOR}.loss 2 3", 12, NEXT),
    "evaluation that ends the run": Phase("early", f"{EVALUATOR}.loss 2 3", 12, NEXT),
    "evaluation of an average": Phase("average", f"{EVALUATOR}.loss 2 3", 12, NEXT),
    "evaluation under ZeRO": Phase("zero", f"{EVALUATOR}.loss 2 3", 12, NEXT),
    "A under ZeRO": Phase("zero", f"{BENCH}.compute 1 2", 14, ANEW),
    "audit": Phase("plain", "runner.explain.audit:SameBatch.compute 3 0", 12),
    "first save": Phase("plain", "runner.train.checkpoints:Checkpoints.begin 1 0", 0),
    "save": Phase("plain", "runner.checkpoint.ring:CheckpointRing.save 2 0", 7),
    "last proof": Phase("plain", "runner.train.checkpoints:LastProof.fault 1 0", 20),
    "A": Phase("samples", f"{BENCH}.compute 1 2", 14, ANEW),
    "J": Phase("samples", f"{BENCH}.read 1 0", 14, ANEW),
    "known": Phase("samples", f"{BENCH}.known 1 3", 14, ANEW),
    "B": Phase("samples", f"{BENCH}.rotated 1 1", 14, ANEW),
    "C": Phase("samples", f"{BENCH}.compute_wider 1 2", 14, ANEW),
    "D": Phase("samples", "runner.explain.probe:CleanWeights.compute 2 1", 14, ANEW),
    "E": Phase("samples", "runner.explain.culprits:Culprits._without 1 2", 14, ANEW),
    "repetition": Phase("passing", f"{BENCH}.compute 3 1", 14, ANEW),
    "G": Phase("rate", RATE, 25, ANEW),
    # It goes back to a checkpoint that was clean, of those that came back.
    "G, and out is lost": Phase("rate", RATE, 25, ANEW, is_lost=True),
}


@pytest.fixture(scope="module")
def undisturbed(runs: Path) -> dict[str, Result]:
    return {}


def never_stopped(known: dict[str, Result], runs: Path, name: str) -> Result:
    if name not in known:
        known[name] = train(runs / f"never-stopped-{name}", *SETTINGS, *STEPS[name])
    return known[name]


NOTICE = "notice"  # the first rank of a node reads it


def crossed(phases: Iterable[str], always: Collection[tuple[str, str, str]]) -> list[Any]:
    """Each phase with each kind of request, and with each choice of ranks; one handler notes all
    signals, so that not all three are crossed."""
    rows = []
    for place, phase in enumerate(phases):
        for turn, kind in enumerate(("SIGTERM", "SIGUSR1", "SIGINT")):
            rows.append((phase, kind, ("0", "1", "0,1")[(place + turn) % 3]))
        rows.append((phase, NOTICE, "0"))
    return full_but(always, dict.fromkeys([*always, *rows]))


def asking(folder: Path, kind: str, ranks: str) -> tuple[dict[str, str], Path]:
    """What tests/stopped_in.py is told, and the file of the notice."""
    notice = folder / "notice"
    number = str(notice) if kind == NOTICE else str(int(signal.Signals[kind]))
    log = str(folder / "batches")
    return {"STOPPED_SIGNAL": number, "STOPPED_RANKS": ranks, "STOPPED_LOG": log}, notice


def said(kind: str, ranks: str) -> str:
    what = "a notice" if kind == NOTICE else kind
    return f"asked to stop ({'; '.join(f'rank {rank}: {what}' for rank in ranks.split(','))}"


@pytest.mark.parametrize(
    ("name", "kind", "ranks"),
    crossed(PHASES, [("evaluation", "SIGINT", "1"), ("A", "SIGUSR1", "0,1")]),
)
def test_a_stop_in_any_phase_leaves_no_trace(
    tmp_path: Path, runs: Path, undisturbed: dict[str, Result], name: str, kind: str, ranks: str
) -> None:
    phase, out = PHASES[name], tmp_path / "run"
    env, notice = asking(tmp_path, kind, ranks)
    log = Path(env["STOPPED_LOG"])
    settings = (*SETTINGS, *STEPS[phase.run], f"preempt.notice=file:{notice}")
    if phase.is_lost:
        settings += (f"checkpoint.remote=file://{tmp_path}/store",)
    asked = train(out, *settings, program=PROGRAM, env=env | {"STOPPED_IN": phase.place})
    assert asked.summary["exit_code"] == 75, asked.tail
    reason = asked.summary["reason"]
    assert said(kind, ranks) in reason and phase.left in reason, reason
    assert f"saved at step {phase.saved}" in reason, reason
    notice.unlink(missing_ok=True)
    if phase.is_lost:
        shutil.rmtree(out)
    if not name.startswith(("step", "save")):
        assert not log.exists(), f"computed after the signal:\n{log.read_text()}"
    again = train(out, *settings)
    assert again.journal("start")[-1]["step"] == phase.saved, again.tail
    other = never_stopped(undisturbed, runs, phase.run)
    assert again.code == other.code, again.tail
    assert again.digest == other.digest and again.counted() == other.counted(), again.tail
    assert best(again) <= steps_on_disk(again) and best(other) <= steps_on_disk(other)
    if phase.run == "passing":  # the next start does not meet it again
        assert not decisions(again)
    else:
        assert again.metrics() == other.metrics(), again.tail
        assert decisions(again) == decisions(other)


# What is read back to be proven comes late.
SLOW_PROOFS = """
import time
from runner.checkpoint.disk import tier
verify = tier.verify_files
def slowly(*given, **named):
    time.sleep(5)
    return verify(*given, **named)
tier.verify_files = slowly
import tests.stopped_in
"""


@pytest.mark.full
def test_a_stop_while_a_rollback_waits_for_its_checkpoint(tmp_path: Path) -> None:
    """Nothing is decided: the last update is saved, and the next start computes the bad step."""
    program, out = tmp_path / "program.py", tmp_path / "run"
    program.write_text(SLOW_PROOFS)
    settings = ("steps=32", "checkpoint.every=40", "checkpoint.memory_every=0", POISON)
    env, _ = asking(tmp_path, "SIGTERM", "1")
    env["STOPPED_IN"] = "runner.checkpoint.ring:CheckpointRing.finish_proofs 1 0"
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    asked = train(out, *settings, program=program, env=env)
    assert asked.summary["exit_code"] == 75, asked.tail
    assert "step 22 is bad and not explained yet" in asked.summary["reason"], asked.tail
    assert "saved at step 21" in asked.summary["reason"] and not asked.journal("rollback")
    again, other = train(out, *settings), train(tmp_path / "other", *settings)
    assert again.journal("start")[-1]["step"] == 21 and again.journal("rollback"), again.tail
    assert again.digest == other.digest and again.counted() == other.counted(), again.tail
    assert decisions(again) == decisions(other) and not again.journal("crash")


def test_a_stop_behind_a_rollback_names_no_evaluation_that_it_undid(tmp_path: Path) -> None:
    env, _ = asking(tmp_path, "SIGTERM", "1")
    env["STOPPED_IN"] = "runner.train.recovery:Recovery.roll_back 1 0"
    settings = ("steps=32", "checkpoint.memory_every=0", POISON)
    asked = train(tmp_path / "run", *settings, program=PROGRAM, env=env)
    summary, evaluated = asked.summary, {}
    for line in asked.metrics():
        if line["eval_loss"] is not None:
            evaluated[line["step"]] = line["eval_loss"]
    assert summary["exit_code"] == 75 and asked.journal("rollback"), asked.tail
    assert 8 <= summary["steps"] < 16 and [*evaluated] == [8, 16], asked.tail
    assert summary["eval_loss"] == evaluated[8], "not that of step 16"


STARTS = {
    "first": "runner.engine.fsdp:FsdpEngine.__init__ 1 0",
    "restart": "runner.engine.fsdp:FsdpEngine.finish_load 1 0",
    "lost": "runner.startup.restore:Restorer._fetch 1 0",
}


@pytest.mark.parametrize(("start", "kind", "ranks"), crossed(STARTS, [("restart", "SIGTERM", "1")]))
def test_a_stop_in_a_start_ends_it_before_the_first_step(
    tmp_path: Path, runs: Path, undisturbed: dict[str, Result], start: str, kind: str, ranks: str
) -> None:
    """While it opens, loads its checkpoint, or takes it back from an object store."""
    out = tmp_path / "run"
    env, notice = asking(tmp_path, kind, ranks)
    settings = (*SETTINGS, f"preempt.notice=file:{notice}")
    if start == "lost":
        settings += (f"checkpoint.remote=file://{tmp_path}/store",)
    if start != "first":
        before = env | {"STOPPED_SIGNAL": "15", "STOPPED_IN": PHASES["step"].place}
        assert train(out, *settings, program=PROGRAM, env=before).summary["exit_code"] == 75
    if start == "lost":
        shutil.rmtree(out)
    restart = train(out, *settings, program=PROGRAM, env=env | {"STOPPED_IN": STARTS[start]})
    assert "exitcode  : 75" in restart.text, restart.tail
    words = f"{said(kind, ranks)}) before the first step; this start trained nothing"
    assert words in restart.text, restart.tail
    notice.unlink(missing_ok=True)
    again, other = train(out, *settings), never_stopped(undisturbed, runs, "plain")
    starts = [line["step"] for line in again.journal("start")]
    assert starts == ([0] if start == "first" else [0, 14]), "none of the start that was left"
    assert again.digest == other.digest and again.counted() == other.counted(), again.tail
    assert again.metrics() == other.metrics()


def best(run: Result) -> set[int]:
    """The step with the best held-out loss."""
    losses = {step: line["eval_loss"] for step, line in run.counted().items() if line["eval_loss"]}
    assert len(losses) == max(run.counted()) // 6, "each step that is due has a loss"
    return {min(losses, key=lambda step: losses[step])}


def steps_on_disk(run: Result) -> set[int]:
    folders = (run.out / "ring").glob("*-step-*")
    return {int(folder.name.rpartition("-")[2]) for folder in folders}


def decisions(run: Result) -> list[list[object]]:
    """What was decided about bad steps, without times."""
    kinds = ("redo", "discard", "rollback", "rebaseline", "episode", "explained", "audit")
    lines = [line for line in run.journal() if line["kind"] in kinds]
    return [[line["kind"], line["step"], line["decision"], line["samples"]] for line in lines]
