"""Measures recovery from a fault and lost steps, against plain torchrun and ``dcp.save``.

The same model, data, batch and interval between checkpoints on disk. A rank is killed, or the whole
job is and the same command is given again at once; and where a hand-written loop has no answer but
to stop and be started again, the runner rolls back within its processes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bench.ours import make_task, settings
from scripts.bench.plan import Plan
from scripts.bench.process import MeasureError, folder, kill_tree, run, running, torchrun
from scripts.bench.ratio import paired
from scripts.bench.report import Row
from scripts.bench.task import write_task

# At step 39 the newest checkpoint on disk is of step 30, in memory of 35; the newest one that ten
# clean steps have proven, which alone a rollback goes to, of 15 and of 25.
_STEPS, _EVERY, _FAULT = 50, 15, 39
_MEMORY_EVERY = 5
_TIERS: dict[str, list[str]] = {"memory": [], "disk": ["checkpoint.memory_every=0"]}
_SIZE = ("batch.global_size=8", "batch.micro_size=4")
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Seconds from the fault to the end of the first step after it, and to where it was again."""

    to_training: float
    to_progress: float
    steps_lost: int


def measure(plan: Plan) -> list[Row]:
    rounds = 1 if plan.quick else 3
    bare: dict[str, list[Recovered]] = {}
    rows = []
    for fault, ours, theirs in (
        ("a killed rank", _our_killed_rank, _bare_killed_rank),
        ("a killed job", _our_killed_job, _bare_killed_job),
    ):
        pairs = [(_apart(ours, plan), _apart(theirs, plan)) for _ in range(rounds)]
        bare[fault] = [theirs for _, theirs in pairs]
        rows += _rows(plan, f"after {fault}", "torchrun and dcp.save", pairs)
    stopped = "torchrun and dcp.save, stopped by the NaN and started again"
    tiers = {"memory": _TIERS["memory"]} if plan.quick else _TIERS
    for tier, overrides in tiers.items():
        back = [_apart(partial(_rollback, overrides), plan) for _ in range(rounds)]
        pairs = list(zip(back, bare["a killed rank"], strict=True))
        rows += _rows(plan, f"rollback from {tier}", stopped, pairs)
    return rows


def _apart(one: Callable[[Plan, Path], Recovered], plan: Plan) -> Recovered:
    with folder() as own:
        return one(plan, own)


def _rows(
    plan: Plan, label: str, against: str, pairs: Sequence[tuple[Recovered, Recovered]]
) -> list[Row]:
    rows = [
        _seconds(f"{label}: to the next step", against, pairs, lambda r: r.to_training),
        _seconds(f"{label}: to where it was", against, pairs, lambda r: r.to_progress),
        Row(
            what=f"{label}: steps lost",
            against=against,
            ours=statistics.median(ours.steps_lost for ours, _ in pairs),
            theirs=statistics.median(theirs.steps_lost for _, theirs in pairs),
            unit="steps",
            detail={"disk_every": _EVERY, "memory_every": _MEMORY_EVERY},
        ),
    ]
    for row in rows:
        plan.say(f"  {row.what}: {row.ours:.3g} {row.unit}, theirs {row.theirs:.3g}")
    return rows


def _seconds(
    label: str,
    against: str,
    pairs: Sequence[tuple[Recovered, Recovered]],
    taken: Callable[[Recovered], float],
) -> Row:
    seconds = [(taken(ours), taken(theirs)) for ours, theirs in pairs]
    return Row(
        what=label,
        against=against,
        ratio=paired(seconds),
        ours=statistics.median(ours for ours, _ in seconds),
        theirs=statistics.median(theirs for _, theirs in seconds),
    )


# -- ours -------------------------------------------------------------------------------------


def _our_settings(plan: Plan) -> list[str]:
    tiers = [f"checkpoint.every={_EVERY}", f"checkpoint.memory_every={_MEMORY_EVERY}"]
    return [*plan.size, *_size(plan), *tiers, *plan.overrides]


def _size(plan: Plan) -> Sequence[str]:
    return () if plan.has_gpu else _SIZE


def _our_command(plan: Plan, out: Path, *overrides: str) -> list[str]:
    """The command of a user, with a short pause between attempts, because torchrun has none."""
    launch = [sys.executable, "-m", "runner", "launch", f"--nproc={plan.ranks}", "--pause=0.1"]
    quiet = ["data=python", "eval.every=0", "track.every=1000"]
    return [*launch, f"out={out}", f"steps={_STEPS}", *quiet, *_our_settings(plan), *overrides]


def _our_killed_rank(plan: Plan, own: Path) -> Recovered:
    out = own / "run"
    last = plan.ranks - 1
    fault = f"faults=[kill@step={_FAULT},rank={last}]"
    run(_our_command(plan, out, fault), own / "log")
    struck = [path.stat().st_mtime for path in (out / "faults").glob("kill-*")]
    if not struck:
        raise MeasureError("the fault did not strike")
    return recovered(applied(out), struck[0], _FAULT - 1)


def _our_killed_job(plan: Plan, own: Path) -> Recovered:
    out = own / "run"
    return _killed_job(_our_command(plan, out), own, lambda: applied(out))


def _rollback(overrides: list[str], plan: Plan, own: Path) -> Recovered:
    """Samples that give NaN, long enough to be no single bad batch."""
    out = own / "run"
    config = settings(out, _our_settings(plan))
    first = _FAULT * config.batch.global_size
    fault = f"faults=[poison@samples={first}-{first + 4 * config.batch.global_size}]"
    run(_our_command(plan, out, fault, "guard.remedy=discard", *overrides), own / "log")
    lines = _json_lines(out / "metrics.jsonl")
    bad = next((n for n, line in enumerate(lines) if line["action"] != "apply"), None)
    back = [line for line in _json_lines(out / "journal.jsonl") if line["kind"] == "rollback"]
    if not bad or not back:
        raise MeasureError("the run did not roll back")
    # The bad step began where the one before it ended.
    steps = [
        (int(line["step"]), float(line["time"])) for line in lines if line["action"] == "apply"
    ]
    after = [step for step in steps if step[1] > float(back[0]["time"])]
    return recovered(after, float(lines[bad - 1]["time"]), int(lines[bad - 1]["step"]))


def applied(out: Path) -> list[tuple[int, float]]:
    lines = _json_lines(out / "metrics.jsonl")
    return [(int(line["step"]), float(line["time"])) for line in lines if line["action"] == "apply"]


# -- theirs -----------------------------------------------------------------------------------


def _bare_command(plan: Plan, own: Path, *options: str) -> list[str]:
    config = settings(own / "unused", [*plan.size, *_size(plan), *plan.overrides])
    write_task(make_task(config, own, steps=_STEPS), own / "task.json")
    out = own / "run"
    out.mkdir()
    command = torchrun(
        plan.ranks,
        "scripts.bench.opponent.bare",
        f"--task={own / 'task.json'}",
        f"--out={out}",
        f"--steps={_STEPS}",
        f"--every={_EVERY}",
        *options,
    )
    restarts = command.index("--standalone")
    return [*command[:restarts], "--max-restarts=3", *command[restarts:]]


def _bare_killed_rank(plan: Plan, own: Path) -> Recovered:
    command = _bare_command(plan, own, f"--kill-at={_FAULT}")
    run(command, own / "log")
    struck = (own / "run" / "killed").stat().st_mtime
    return recovered(logged(own / "run", struck), struck, _FAULT - 1)


def _bare_killed_job(plan: Plan, own: Path) -> Recovered:
    return _killed_job(_bare_command(plan, own), own, lambda: logged(own / "run"))


def logged(out: Path, since: float = 0.0) -> list[tuple[int, float]]:
    """Steps of processes that began after ``since``: a surviving rank logs its last step late."""
    lines = _json_lines(out / "log-0.jsonl")
    return [(line["step"], line["time"]) for line in lines if line["began"] > since]


# -- both -------------------------------------------------------------------------------------


def recovered(steps: Sequence[tuple[int, float]], struck: float, reached: int) -> Recovered:
    """From (step, time of its end) in their order, after a fault at ``struck`` seconds.

    Raises:
        MeasureError: no step followed.
    """
    after = [(step, at) for step, at in steps if at > struck]
    again = [at for step, at in after if step > reached]
    if not again:
        raise MeasureError("the run did not go on after the fault")
    return Recovered(
        to_training=after[0][1] - struck,
        to_progress=again[0] - struck,
        steps_lost=reached - (after[0][0] - 1),
    )


def _killed_job(
    command: list[str], own: Path, steps: Callable[[], list[tuple[int, float]]]
) -> Recovered:
    """Kill the whole job at once, and start the same command again."""
    log = own / "log"
    with running(command, log) as process:
        _wait_until(process, steps, _FAULT - 1)
        struck = time.time()
        kill_tree(process.pid)
        process.wait()
    reached = steps()[-1][0]
    run(command, log)
    return recovered(steps(), struck, reached)


def _wait_until(
    process: subprocess.Popen[bytes], steps: Callable[[], list[tuple[int, float]]], wanted: int
) -> None:
    while process.poll() is None:
        last_steps = steps()
        if last_steps and last_steps[-1][0] >= wanted:
            return
        time.sleep(_POLL_SECONDS)
    raise MeasureError("the job ended before it could be killed")


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file; the last one may still be incomplete."""
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
