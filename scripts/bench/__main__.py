"""The command line of ``scripts/bench.sh``: measures, prints a Markdown table, writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.bench import loop, recovery, steps
from scripts.bench.fair import refuse_measured
from scripts.bench.process import ROOT, MeasureError
from scripts.bench.provenance import head, load
from scripts.bench.report import Row, markdown
from scripts.bench.steps import Plan

# In the order in which they are run.
MEASUREMENTS: dict[str, tuple[Callable[[Plan], list[Row]], str]] = {
    "step": (steps.step, "step time with the guard against a bare loop, FSDP2 and DDP"),
    "guard": (steps.guard, "the guard on against off, and the noise alone"),
    "layers": (steps.layers, "a look into the layers in each step against none"),
    "loop": (loop.measure, "guard.ok in a loop of one's own against that loop without it"),
    "checkpoint": (steps.checkpoint, "guard and checkpoints against a bare loop"),
    "recovery": (recovery.measure, "from a killed rank to the next step"),
}


def main() -> int:
    options = _options()
    if options.table:
        print(markdown(json.loads(options.table.read_text())["measurements"]))
        return 0
    try:
        refuse_measured(options.overrides)
    except MeasureError as error:
        _say(f"error: {error}")
        return 2
    has_gpu = torch.cuda.is_available()
    default_ranks = torch.cuda.device_count() if has_gpu else 2
    plan = Plan(
        quick=options.quick,
        ranks=options.ranks or default_ranks,
        has_gpu=has_gpu,
        overrides=options.overrides,
        say=_say,
    )
    return run(plan, options.only or list(MEASUREMENTS), options.out or _default_out())


def run(plan: Plan, names: Sequence[str], out: Path) -> int:
    """Take the measurements in turn, and write results after each; returns 1 if one failed."""
    results = head(["bash scripts/bench.sh", *sys.argv[1:]]) | {"measurements": []}
    if results["machine"]["warning"]:
        _say(f"warning: {results['machine']['warning']}")
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        _say(f"{name}: {MEASUREMENTS[name][1]}")
        results["measurements"].append(_measured(plan, name))
        results["machine"]["load_at_end"] = load()
        out.write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(results["measurements"]))
    warning = results["machine"]["warning"]
    if warning:
        print(f"\n{warning}")
    _say(f"written to {out}")
    return int(any(measurement["failed"] for measurement in results["measurements"]))


def _measured(plan: Plan, name: str) -> dict[str, Any]:
    began, busy = time.monotonic(), load()
    rows, failed = [], []
    try:
        rows = MEASUREMENTS[name][0](plan)
    except MeasureError as error:
        failed.append(str(error))
        _say(f"  failed: {error}")
    return {
        "name": name,
        "rows": [row.to_json() for row in rows],
        "failed": failed,
        "load_at_start": busy,
        "seconds_taken": round(time.monotonic() - began, 1),
    }


def _default_out() -> Path:
    """Called by the GPU's name in letters of file names, or "cpu"."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    return ROOT / "runs" / f"bench-{name.lower().replace(' ', '-')}.json"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    known = "\n".join(f"  {name:<12}{words}" for name, (_, words) in MEASUREMENTS.items())
    parser = argparse.ArgumentParser(
        prog="bash scripts/bench.sh",
        description="What the runner costs, as paired ratios with their spread.",
        epilog=f"measurements:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats: minutes, more noise")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(MEASUREMENTS),
        metavar="NAME",
        help="may be repeated",
    )
    parser.add_argument("--out", type=Path, help="the JSON; default runs/bench-DEVICE.json")
    parser.add_argument("--ranks", type=int, help="default: every GPU, or 2 on a CPU")
    parser.add_argument("--table", type=Path, metavar="JSON", help="only print its table")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the runner's settings")
    return parser.parse_args()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks are ended too
    os.chdir(ROOT)
    sys.exit(main())
