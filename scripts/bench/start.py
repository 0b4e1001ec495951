"""From the command to the first step: a run taken up again against a bare start that saves nothing.

The bare start imports torch, makes the group, builds the model, loads a batch and takes a step.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path

from scripts.bench.ours import make_task, settings
from scripts.bench.plan import Plan
from scripts.bench.process import folder, run, torchrun
from scripts.bench.ratio import paired
from scripts.bench.recovery import applied, logged
from scripts.bench.report import Row
from scripts.bench.task import write_task

_STEPS = 3


def measure(plan: Plan) -> list[Row]:
    rounds = 1 if plan.quick else 4
    taken: dict[str, list[float]] = {"bare": [], "resume": [], "begin": []}
    with folder() as own:
        _prepare(plan, own)
        for _ in range(rounds):
            taken["bare"].append(_bare(plan, own))
            taken["begin"].append(_ours(plan, own, "fresh"))
            taken["resume"].append(_ours(plan, own, "again"))
    rows = [
        _row("resume, from the command to the next step", taken["resume"], taken["bare"]),
        _row("a new run, from the command to the first step", taken["begin"], taken["bare"]),
    ]
    for row in rows:
        plan.say(f"  {row.what}: {row.ours:.3g} s, bare {row.theirs:.3g} s")
    return rows


def _row(label: str, ours: list[float], theirs: list[float]) -> Row:
    return Row(
        what=label,
        against="bare start (import, group, model, one step)",
        ratio=paired(list(zip(ours, theirs, strict=True))),
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
    )


def _prepare(plan: Plan, own: Path) -> None:
    """A stopped run to take up, and the bare side's task."""
    config = settings(own / "unused", [*plan.size, *plan.overrides])
    write_task(make_task(config, own, steps=8), own / "task.json")
    log = own / "log"
    run(_our_command(plan, own / "stopped", _STEPS), log)


def _our_command(plan: Plan, out: Path, steps: int) -> list[str]:
    # The schedule is of some other length, so that more steps are no other run.
    quiet = ["eval.every=0", "track.every=1000", "schedule.total=500"]
    overrides = [f"out={out}", f"steps={steps}", *quiet, *plan.size, *plan.overrides]
    return torchrun(plan.ranks, "runner", *overrides)


def _ours(plan: Plan, own: Path, name: str) -> float:
    out, log = own / name, own / "log"
    shutil.rmtree(out, ignore_errors=True)
    steps = _STEPS
    if name == "again":
        shutil.copytree(own / "stopped", out)
        steps = 2 * _STEPS
    before = applied(out)[-1][0] if name == "again" else 0
    began = time.time()
    run(_our_command(plan, out, steps), log)
    return next(at for step, at in applied(out) if step == before + 1) - began


def _bare(plan: Plan, own: Path) -> float:
    out, log = own / "bare", own / "log"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    options = [f"--task={own / 'task.json'}", f"--out={out}", f"--steps={_STEPS}"]
    began = time.time()
    run(torchrun(plan.ranks, "scripts.bench.opponent.bare", *options), log)
    return logged(out)[0][1] - began
