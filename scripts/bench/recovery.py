"""From a killed rank to the next step: the runner's launcher against torchrun and ``dcp.save``.

The same model, data, batch and interval between checkpoints on disk. Ours starts ranks by its fork
server (warm) and without one (cold); in "under torchrun" plain torchrun starts the runner again.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from scripts.bench.ours import make_task, settings
from scripts.bench.process import (
    TIMEOUT_SECONDS,
    MeasureError,
    environment,
    folder,
    last_words,
    run,
    torchrun,
)
from scripts.bench.report import Row, compared
from scripts.bench.steps import Plan
from scripts.bench.task import write_task
from tests import namespaces
from tests.namespaces import Network

_STEPS, _EVERY, _FAULT = 24, 10, 18
_SIZE = ("batch.global_size=8", "batch.micro_size=4")
_AGAINST = "torchrun and dcp.save"
_LIMIT_SECONDS, _TRIES = 60.0, 4  # of the loop under torchrun, whose restart may hang or fail
_WAYS = {"warm": [], "cold": ["launch.warm=false"]}
_NODES = ("nodeA", "nodeB")
_NEXT_STEP = "killed rank to the next step"


def measure(plan: Plan) -> list[Row]:
    seconds: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, list[dict[str, float]]] = defaultdict(list)
    failed = 0
    size = [*plan.size, *([] if plan.has_gpu else _SIZE), *plan.overrides]
    if reason := namespaces.unavailable():
        plan.say(f"  two nodes: not measured, {reason}")
    warm, cold = (f"{way}, two nodes" for way in _WAYS)
    on_nodes = () if reason else (warm, cold)
    for _ in range(1 if plan.quick else 12):
        for way in (*_WAYS, "under torchrun", "bare", *on_nodes):
            with folder() as name:
                own = Path(name)
                if way == "bare":
                    took, tries = _tried(plan, own, size)
                    seconds[way].append(took)
                    failed += tries - 1
                else:
                    took, first, parts = _ours(plan, own, size, way)
                    seconds[way].append(took)
                    seconds[f"first step, {way}"].append(first)
                    starts[way].append(parts)
            plan.say(f"  {way}: {seconds[way][-1]:.3g} s")
    return [
        *(
            compared(
                f"{_NEXT_STEP}, {way}",
                _AGAINST,
                list(zip(seconds[way], seconds["bare"], strict=True)),
                aim=aim,
                start_seconds=_medians(starts[way]),
                failed_restarts_of_the_opponent=failed,
            )
            for way, aim in (("warm", 0.5), ("cold", 1.1), ("under torchrun", None))
        ),
        compared(
            "from launch to the first step, warm",
            "the same, cold",
            list(zip(seconds["first step, warm"], seconds["first step, cold"], strict=True)),
            aim=0.6,
        ),
        *(
            [
                compared(
                    f"{_NEXT_STEP}, {warm}",
                    "the same, cold",
                    list(zip(seconds[warm], seconds[cold], strict=True)),
                    start_seconds=_medians(starts[warm]),
                )
            ]
            if on_nodes
            else []
        ),
    ]


def _ours(
    plan: Plan, own: Path, size: list[str], way: str
) -> tuple[float, float, dict[str, float]]:
    """Seconds of the restart and of the first start, and where those of the restart went."""
    out, last = own / "run", plan.ranks - 1
    words = [
        *(f"out={out}", f"steps={_STEPS}", "data=python", "eval.every=0", "track.every=1000"),
        *(f"checkpoint.every={_EVERY}", "checkpoint.memory_every=5", *size),
        f"faults=[kill@step={_FAULT},rank={last}]",
    ]
    if way == "under torchrun":
        run(_restarting(torchrun(plan.ranks, "runner", *words)), own / "log")
        began = 0.0
    else:
        name, _, nodes = way.partition(", ")
        launch = [sys.executable, "-m", "runner", "launch"]
        if nodes:
            launch += [f"--nodes={len(_NODES)}", f"--head={_NODES[0]}", "--name=bench", "--nproc=1"]
            _run_on_nodes([*launch, *words, *_WAYS[name]], own)
        else:
            run([*launch, f"--nproc={plan.ranks}", *words, *_WAYS[name]], own / "log")
        began = _lines(out / "attempts.jsonl")[0]["began"]
    struck = next((out / "faults").glob("kill-*")).stat().st_mtime
    times = [float(line["time"]) for line in _lines(out / "metrics.jsonl")]
    start = [line for line in _lines(out / "journal.jsonl") if line["kind"] == "start"][-1]
    again = next(time for time in times if time > struck)
    parts = start["detail"]["start_seconds"] | {"checks and first step": again - start["time"]}
    return again - struck, times[0] - began, parts


def _run_on_nodes(command: list[str], own: Path) -> None:
    """Run a command on each node until all have ended."""
    with Network(f"hb{os.getpid()}", _NODES, own / "net") as network:
        logs = {node: own / f"{node}.log" for node in _NODES}
        processes = {
            node: network.start(node, command, log=log, env=environment())
            for node, log in logs.items()
        }
        for node, process in processes.items():
            if code := process.wait(TIMEOUT_SECONDS):
                raise MeasureError(f"{node} ended with {code}: {last_words(logs[node])}")


def _tried(plan: Plan, own: Path, size: list[str]) -> tuple[float, int]:
    """Seconds of the loop under torchrun, and how often it was tried until it went on."""
    for number in range(1, _TRIES + 1):
        try:
            (own / str(number)).mkdir()
            return _bare(plan, own / str(number), size), number
        except MeasureError as error:
            plan.say(f"  {_AGAINST}: the restart failed ({error})"[:200])
    raise MeasureError(f"{_AGAINST}: {_TRIES} restarts failed")


def _bare(plan: Plan, own: Path, size: list[str]) -> float:
    config = settings(own / "unused", size)
    write_task(make_task(config, own, steps=_STEPS), own / "task.json")
    options = [f"--steps={_STEPS}", f"--every={_EVERY}", f"--kill-at={_FAULT}"]
    command = torchrun(
        plan.ranks, "scripts.bench.bare", f"--task={own / 'task.json'}", f"--out={own}", *options
    )
    run(_restarting(command), own / "log", _LIMIT_SECONDS)
    struck = (own / "killed").stat().st_mtime
    # A surviving rank writes its last step late.
    times = [line["time"] for line in _lines(own / "log-0.jsonl") if line["began"] > struck]
    if not times:
        raise MeasureError("the bare loop did not go on after the fault")
    return min(times) - struck


def _restarting(command: list[str]) -> list[str]:
    place = command.index("--standalone")
    return [*command[:place], "--max-restarts=3", *command[place:]]


def _medians(parts: list[dict[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for one in parts for name in one))
    middle = len(parts) // 2
    return {name: round(sorted(one.get(name, 0.0) for one in parts)[middle], 3) for name in names}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
