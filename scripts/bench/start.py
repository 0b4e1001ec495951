"""From the command to the first step: a run taken up again against a bare start that saves nothing.

The bare start imports torch, makes the group, builds the model, loads a batch and takes a step.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from scripts.bench.ours import make_task, settings
from scripts.bench.process import folder, run, torchrun
from scripts.bench.report import Row, compared
from scripts.bench.steps import Plan
from scripts.bench.task import write_task

_STEPS = 3
_AGAINST = "bare start (import, group, model, one step)"


def measure(plan: Plan) -> list[Row]:
    bare, resumed, fresh = list[float](), list[float](), list[float]()
    with folder() as name:
        own = Path(name)
        # A stopped run to take up, and the bare side's task.
        config = settings(own / "unused", [*plan.size, *plan.overrides])
        write_task(make_task(config, own, steps=8), own / "task.json")
        _ours(plan, own / "stopped", own)
        for _ in range(1 if plan.quick else 4):
            bare.append(_bare(plan, own))
            fresh.append(_ours(plan, own / "fresh", own))
            shutil.rmtree(own / "fresh")
            shutil.copytree(own / "stopped", own / "again")
            resumed.append(_ours(plan, own / "again", own, first=_STEPS + 1))
            shutil.rmtree(own / "again")
    rows = [
        compared(what, _AGAINST, list(zip(ours, bare, strict=True)))
        for what, ours in (
            ("resume, from the command to the next step", resumed),
            ("a new run, from the command to the first step", fresh),
        )
    ]
    for row in rows:
        plan.say(f"  {row.what}: {row.ours:.3g} s, bare {row.theirs:.3g} s")
    return rows


def _ours(plan: Plan, out: Path, own: Path, first: int = 1) -> float:
    """Seconds to the end of step ``first``."""
    # The schedule is of some other length, so that more steps are no other run.
    quiet = ["data=python", "eval.every=0", "track.every=1000", "schedule.total=500"]
    words = [f"out={out}", f"steps={first - 1 + _STEPS}", *quiet, *plan.size, *plan.overrides]
    began = time.time()
    run(torchrun(plan.ranks, "runner", *words), own / "log")
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return next(float(line["time"]) for line in lines if line["step"] == first) - began


def _bare(plan: Plan, own: Path) -> float:
    began = time.time()
    run(torchrun(plan.ranks, "scripts.bench.bare", f"--task={own / 'task.json'}"), own / "log")
    return float((own / "first-step").read_text()) - began
