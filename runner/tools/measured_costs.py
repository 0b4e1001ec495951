"""What checkpoints and failures have cost a run, from its files: the inputs of a plan."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from runner.run_dir.paths import RunDir
from runner.system.json_lines import iter_lines
from runner.tools.ring_files import checkpoints


@dataclass(frozen=True, slots=True)
class Value:
    """A number and its source."""

    number: float
    source: str


Values = dict[str, Value]


def measured(out: Path, journal: Sequence[dict[str, Any]]) -> Values:
    """Numbers from a run's records, as far as it has them."""
    source = f"measured: {out}"
    steps, saves, restarts = array("d"), array("d"), array("d")
    time_of_step: dict[int, float] = {}
    last_time = 0.0
    for line in iter_lines(out / "metrics.jsonl"):
        stalls, last_time = line.get("stalls", {}), float(line.get("time", 0.0))
        _append(saves, stalls.get("checkpoint"))
        _append(restarts, stalls.get("restart"))
        if line["action"] == "apply":
            steps.append(line["seconds"])
            time_of_step[line["step"]] = last_time
    sizes, writes = _ring(out, time_of_step)
    numbers = {
        "step_seconds": _median(steps),
        "stall_seconds": _median(saves),
        "save_seconds": _median(writes),
        "restart_seconds": _median(restarts),
        "state_gb": sizes[-1] / 1e9 if sizes else None,
    }
    values = {name: Value(number, source) for name, number in numbers.items() if number is not None}
    if restarts:
        values["detect_seconds"] = Value(0.0, f"{source}, within restart_seconds")
    return values | _failures(journal, last_time, source)


def _append(numbers: array[float], seconds: float | None) -> None:
    if seconds:
        numbers.append(seconds)


def _median(numbers: Iterable[float]) -> float | None:
    values = list(numbers)
    return statistics.median(values) if values else None


def _ring(out: Path, time_of_step: dict[int, float]) -> tuple[list[int], list[float]]:
    """Bytes of the checkpoints, and seconds from their step's end to their commit marker."""
    sizes, writes = [], []
    for entry in checkpoints(RunDir(out)):
        sizes.append(entry.num_bytes)
        seconds = entry.time - time_of_step.get(entry.step, math.inf)
        if seconds > 0:  # else that step was done again since
            writes.append(seconds)
    return sizes, writes


def _failures(journal: Sequence[dict[str, Any]], last: float, source: str) -> Values:
    """The nodes of the newest start and, where something crashed, the time between failures."""
    starts = [line for line in journal if line["kind"] == "start"]
    crashes = sum(line["kind"] == "crash" for line in journal)
    if not starts:
        return {}
    nodes = max(1, len(starts[-1]["detail"].get("hosts", {})))
    values = {"nodes": Value(nodes, source)}
    end = max(chain([last], (float(line["time"]) for line in journal)))
    hours = (end - float(journal[0]["time"])) / 3600
    if crashes and hours > 0:
        crash_source = f"{source}, {crashes} crash{'es' if crashes > 1 else ''}"
        values["mtbf_node_hours"] = Value(hours * nodes / crashes, crash_source)
    return values
