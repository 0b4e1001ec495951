"""Measures the peak memory of a whole job, with all ranks and loaders, each side alone."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.ours import make_task, settings
from scripts.bench.plan import Plan
from scripts.bench.process import MeasureError, descendants, finish, folder, running, torchrun
from scripts.bench.ratio import paired
from scripts.bench.report import Row
from scripts.bench.steps import AGAINST
from scripts.bench.task import write_task

_POLL_SECONDS = 0.1


def measure(plan: Plan) -> list[Row]:
    rounds = 1 if plan.quick else 2
    kinds = ("fsdp",) if plan.quick else ("fsdp", "ddp")
    peaks = {kind: [_peak(plan, kind, None) for _ in range(rounds)] for kind in kinds}
    ours = {kind: [peak.trained for peak in kind_peaks] for kind, kind_peaks in peaks.items()}
    rows = []
    snapshots = [_peak(plan, "fsdp", None, "checkpoint.memory_every=10") for _ in range(rounds)]
    # Of the host in any case: there they are.
    both = [[peak.host for peak in kind_peaks] for kind_peaks in (snapshots, peaks["fsdp"])]
    rows.append(_row(plan, "fsdp, with snapshots", "the runner without", *both, on_host=True))
    for kind in kinds:
        theirs = [_peak(plan, kind, f"bare-{kind}").trained for _ in range(rounds)]
        rows.append(_row(plan, kind, AGAINST[kind], ours[kind], theirs))
    return rows


def _row(
    plan: Plan,
    kind: str,
    label: str,
    ours: list[float],
    theirs: list[float],
    *,
    on_host: bool = False,
) -> Row:
    row = Row(
        what=f"peak memory of the job, {kind}",
        against=label,
        ratio=paired(list(zip(ours, theirs, strict=True))),
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        unit="MB",
        detail={"of": "GPU 0" if plan.has_gpu and not on_host else "all processes, PSS"},
    )
    plan.say(f"  {row.what} / {label}: {row.ours:.0f} / {row.theirs:.0f} MB")
    return row


@dataclass(frozen=True, kw_only=True)
class _Peak:
    """MB of one side alone: ``host`` of all its processes, ``trained`` of the GPU, if any."""

    host: float
    trained: float


def _peak(plan: Plan, kind: str, opponent: str | None, *overrides: str) -> _Peak:
    overrides = (f"parallel={kind}", *plan.size, *plan.overrides, *overrides)
    with folder() as own:
        log = own / "log"
        if opponent:
            config = settings(own / "unused", overrides)
            write_task(make_task(config, own, steps=16), own / "task.json")
        named = [f"--folder={own}", f"--who={opponent or 'ours'}"]
        command = torchrun(plan.ranks, "scripts.bench.alone", *named, *overrides)
        with running(command, log) as process:
            most = _watch(process)
            finish(process, log)
        result = json.loads((own / "result.json").read_text())
    return _Peak(host=most, trained=result["gpu_bytes"] / 1e6 or most)


def _watch(process: subprocess.Popen[bytes]) -> float:
    """The largest sum of PSS in MB over all processes below torchrun, until it ends."""
    most = 0.0
    while process.poll() is None:
        most = max(most, sum(pss_kib(pid) for pid in descendants(process.pid)))
        time.sleep(_POLL_SECONDS)
    if not most:
        raise MeasureError("/proc/PID/smaps_rollup tells nothing here")
    return most * 1024 / 1e6


def pss_kib(pid: int) -> int:
    """A process's proportional set size in KiB; 0 if it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in rollup.splitlines() if line[:4] == "Pss:"), 0)
