"""Times two ways of taking a training step, one of each in turn, in the same processes.

Whatever disturbs the machine then disturbs both; the ratio is taken pair by pair.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner import assemble
from runner.compose import compose
from runner.config import RunConfig
from runner.dist.agree import Ranks
from runner.dist.launcher import Place, launch_from
from runner.loop import Loop
from runner.rundir import RunDir
from runner.train import Session

# Neither evaluation nor checkpoints nor printing within the steps that are timed.
_QUIET = ("eval.every=0", "checkpoint.every=1000000", "track.every=1000000")
_ENDLESS = ("steps=1000000", "schedule=constant")


def shared_folder(device: torch.device) -> Path:
    """A temporary directory of rank 0, told to all."""
    ranks = Ranks(device)
    return Path(ranks.from_first(tempfile.mkdtemp(prefix="bench-") if ranks.rank == 0 else None))


def settings(out: Path, overrides: Sequence[str]) -> RunConfig:
    """Of a run without end that does nothing but steps."""
    return compose([*_QUIET, *overrides, *_ENDLESS, f"out={out}"])


def open_loop(config: RunConfig, place: Place, device: torch.device) -> Loop:
    """A complete run, ready to take steps."""
    run_dir, launch = RunDir(Path(config.out)), launch_from(os.environ)
    stop = assemble.stop_request(config, launch)
    witness = assemble.witness(config, place, launch, run_dir, stop)
    loop = Session(config, place, launch, device, run_dir, {}, witness, stop, []).open().loop
    loop.begin()
    return loop


def compare(
    one: Callable[[], object], other: Callable[[], object], *, warmup: int, pairs: int
) -> dict[str, Any]:
    """Ratio of the step times one / other: median and quartiles over the pairs."""
    for number in range(warmup):
        _pair(one, other, number)
    taken = [_pair(one, other, number) for number in range(pairs)]
    low, middle, high = statistics.quantiles([a / b for a, b in taken], n=4)
    return {
        "pairs": pairs,
        "ratio_median": round(middle, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "ratio_of_medians": round(_median(taken, 0) / _median(taken, 1), 4),
        "step_seconds_median": round(_median(taken, 1), 5),
        "ranks": dist.get_world_size(),
    }


def _median(taken: Sequence[tuple[float, float]], side: int) -> float:
    return statistics.median(pair[side] for pair in taken)


def _pair(
    one: Callable[[], object], other: Callable[[], object], number: int
) -> tuple[float, float]:
    """One step each; who goes first alternates."""
    if number % 2:
        second = _timed(other)
        return _timed(one), second
    return _timed(one), _timed(other)


def _timed(step: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began
