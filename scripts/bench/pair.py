"""On the ranks: the runner and one opponent take turns on the same model and data.

    torchrun --nproc-per-node=2 -m scripts.bench.pair --against bare-fsdp --folder DIR \\
        [--block K] [--pairs N] [key=value ...]

Writes DIR/result.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.config.schema import RunConfig
from runner.config.validate import check
from runner.distributed.env import RankEnv, place_from
from runner.distributed.process_group import choose_device, end_group, start_group
from runner.health.leave import leave
from runner.model.decoder import num_parameters
from scripts.bench import opponent
from scripts.bench.fair import refuse_other_losses
from scripts.bench.ours import first_losses, make_task, opened, settings
from scripts.bench.process import MeasureError
from scripts.bench.syncs import SyncCount
from scripts.bench.task import Task, read_task, write_task
from scripts.bench.turns import Turns

AfterStep = Callable[..., bool]
# Opponents that are the runner itself, but for a setting.
_ITSELF = {"guard-off": "guard=off", "layers-off": "track.layers_every=0"}


def main() -> None:
    options = _options()
    place = place_from(os.environ)
    device = choose_device("auto", place)
    start_group(place, device, timeout_seconds=300)
    config = settings(options.folder / "ours", options.overrides)
    check(config, world_size=place.world_size)
    task = _shared_task(options, config, place)
    result = _in_turn(options, config, task, place, device)
    if place.is_first:
        (options.folder / "result.json").write_text(json.dumps(result))
    end_group()
    leave(0)


def _in_turn(
    options: argparse.Namespace, config: RunConfig, task: Task, place: RankEnv, device: torch.device
) -> dict[str, Any]:
    before = _thread_ids()
    with opened(config, place, device) as run:
        own_threads = _thread_ids() - before
        for _ in range(options.phase):
            run.loop.step()
        turns = Turns(
            run.loop.step,
            device=device,
            block=options.block,
            warmup=options.warmup,
            pairs=options.pairs,
            settle=run.ring.drain if options.settle else lambda: None,
            check=lambda theirs: _refuse_other_training(config, theirs, place),
        )
        syncs = SyncCount(turns.after_step, run.loop.step)
        began, computed = time.monotonic(), _cpu_seconds(own_threads)
        has_gpu = device.type == "cuda"
        _train(options, task, place, device, syncs.after_step if has_gpu else turns.after_step)
        computed = _cpu_seconds(own_threads) - computed
        share = computed / (time.monotonic() - began)
        pairs = [(ours, theirs) for theirs, ours in turns.pairs()]
        losses = turns.losses()
    dist.barrier()  # the first rank has closed its metrics
    return {
        "pairs": pairs,
        "losses": {"ours": first_losses(Path(config.out), len(losses)), "theirs": losses},
        "threads_share": share,
        "tokens_per_step": task.tokens_per_step,
        "parameters": num_parameters(task.shape),
        "ranks": place.world_size,
        "precision": task.precision,
        "syncs_per_step": syncs.per_step,
    }


def _train(
    options: argparse.Namespace,
    task: Task,
    place: RankEnv,
    device: torch.device,
    after_step: AfterStep,
) -> None:
    """The opponent's training, or the runner's own with another setting."""
    if options.against not in _ITSELF:
        opponent.train(options.against, task, device, after_step)
        return
    other = [*options.overrides, _ITSELF[options.against]]
    config = settings(options.folder / options.against, other)
    with opened(config, place, device) as run:
        while True:
            run.loop.step()
            if after_step():
                return


def _refuse_other_training(config: RunConfig, theirs: list[float], place: RankEnv) -> None:
    """Before anything is timed. Collective.

    Raises:
        MeasureError: the first losses of the two differ; alike on all ranks.
    """
    if not theirs:  # of the runner itself
        return
    refusal: list[str | None] = [None]
    if place.is_first:
        try:
            ours = first_losses(Path(config.out), len(theirs))
            refuse_other_losses(ours, theirs, config.compute.precision.value)
        except MeasureError as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal, src=0)
    if refusal[0] is not None:
        raise MeasureError(refusal[0])


def _shared_task(options: argparse.Namespace, config: RunConfig, place: RankEnv) -> Task:
    folder, is_shared = options.folder, options.against not in _ITSELF
    if place.is_first:
        write_task(make_task(config, folder, is_shared=is_shared), folder / "task.json")
    dist.barrier()
    return read_task(folder / "task.json")


def _thread_ids() -> set[int]:
    return {thread.native_id for thread in threading.enumerate() if thread.native_id is not None}


def _cpu_seconds(threads: set[int]) -> float:
    """What Python's threads of this process have computed; those that ended are left out."""
    total = 0.0
    for thread in threads:
        with contextlib.suppress(OSError):
            schedule = Path(f"/proc/self/task/{thread}/schedstat").read_text()
            total += int(schedule.split()[0]) / 1e9
    return total


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", choices=[*_ITSELF, *opponent.NAMES], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--block", type=int, default=2, help="steps of one side in a row")
    parser.add_argument(
        "--warmup", type=_at_least_one, default=10, help="blocks before; arms the guard"
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--phase", type=int, default=0, help="steps of ours before all else")
    parser.add_argument("--settle", action="store_true", help="ours waits for its background")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def _at_least_one(text: str) -> int:
    return max(1, int(text))  # losses are compared after it


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        leave(1)  # an orderly exit would wait for the loaders of both sides
