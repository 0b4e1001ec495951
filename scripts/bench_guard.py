"""What the guard costs: the same training step with guard=default and guard=off, in turn.

    torchrun --nproc-per-node=2 scripts/bench_guard.py [--steps N] [key=value ...]

Two complete runs (own engine, own loop) live in the same processes and take one step each,
the order swapped at every pair, so that whatever disturbs the machine disturbs both. Prints
the ratio of their step times pair by pair: median and quartiles. Never a gate for a test.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from runner.compose import compose
from runner.dist.agree import Ranks
from runner.dist.group import choose_device, end_group, place_from, start_group
from runner.loop import Loop
from runner.rundir import RunDir
from runner.train import Session

_QUIET = ["eval.every=0", "checkpoint.every=1000000", "track.every=1000000"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="pairs measured")
    parser.add_argument("--warmup", type=int, default=60, help="pairs before; arms the guard")
    parser.add_argument("--null", action="store_true", help="guard off twice: the noise alone")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    place = place_from(os.environ)
    device = choose_device("auto", place)
    start_group(place, device, timeout_seconds=300)
    made = tempfile.mkdtemp(prefix="bench-guard-") if place.is_first else None
    folder = Path(Ranks(device).from_first(made))
    guards = {"guarded": "off" if options.null else "default", "bare": "off"}
    loops = {
        name: _open(folder / name, [*_QUIET, *options.overrides, f"guard={guard}"], place, device)
        for name, guard in guards.items()
    }
    for pair in range(options.warmup):
        _pair(loops, pair)
    ratios, seconds = [], []
    for pair in range(options.steps):
        taken = _pair(loops, pair)
        ratios.append(taken["guarded"] / taken["bare"])
        seconds.append(taken["bare"])
    if place.is_first:
        low, middle, high = statistics.quantiles(ratios, n=4)
        result = {
            "compared": f"guard={guards['guarded']} / guard={guards['bare']}",
            "pairs": len(ratios),
            "step_seconds_median": round(statistics.median(seconds), 6),
            "ratio_median": round(middle, 5),
            "ratio_quartiles": [round(low, 5), round(high, 5)],
            "ranks": place.world_size,
            "overrides": options.overrides,
        }
        total = sum(r * s for r, s in zip(ratios, seconds, strict=True)) / sum(seconds)
        result["ratio_of_totals"] = round(total, 5)
        print(json.dumps(result))
    end_group()


def _open(out: Path, overrides: list[str], place, device) -> Loop:  # type: ignore[no-untyped-def]
    config = compose([*overrides, f"out={out}", "steps=1000000", "schedule=constant"])
    loop = Session(config, place, device, RunDir(out), {}).open().loop
    loop.begin()
    return loop


def _pair(loops: dict[str, Loop], pair: int) -> dict[str, float]:
    """One step each; who goes first alternates."""
    taken = {}
    for name in sorted(loops, reverse=bool(pair % 2)):
        dist.barrier()
        began = time.perf_counter()
        loops[name].step()
        taken[name] = time.perf_counter() - began
    return taken


if __name__ == "__main__":
    main()
