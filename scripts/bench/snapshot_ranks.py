"""On the ranks: how long training waits for a checkpoint, ours and others' of the same state.

    torchrun --nproc-per-node=2 -m scripts.bench.snapshot_ranks --folder DIR [--rounds N] \\
        [key=value ...]

One of each in turn, between real steps; what goes on in the background has ended before the next
begins. On a CPU it is the seconds that a method keeps the training thread. On CUDA that thread only
launches, and the device waits later: there it is by how much a method lengthens the steps around
it, on the device, for all methods alike. Writes DIR/result.json: seconds of rank 0 by method.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from runner.distributed.env import place_from
from runner.distributed.process_group import choose_device, end_group, start_group
from runner.health.leave import leave
from runner.model.decoder import num_parameters
from runner.session.phases import Run
from scripts.bench.opponent.bare import BareLoop, Saved
from scripts.bench.ours import make_task, opened, settings
from scripts.bench.task import Task, read_task, write_task
from scripts.bench.turns import Clock

_CYCLE = 8  # steps from one save to disk to the next, on CUDA
_USUAL = 5
_LEAST = 1e-6  # seconds: what is lost in the noise is not negative


class Methods:
    """Methods that save the same bytes once and return the seconds that training waited."""

    def __init__(self, run: Run, bare: BareLoop, folder: Path, device: torch.device) -> None:
        self._run, self._bare, self._folder = run, bare, folder
        self._clock = Clock(device)
        self._buffers = [
            torch.empty(
                shard.local.shape, dtype=shard.local.dtype, pin_memory=device.type == "cuda"
            )
            for shard in run.engine.shards()
        ]
        self._group = dist.new_group(backend="gloo")  # as dcp.async_save wants it
        # Into page-locked memory, which it keeps: what a competent person asks for on a GPU.
        self._stager = None
        self._after: Callable[[], object] = lambda: None
        self._usual = 0.0
        if device.type == "cuda":
            options = StagingOptions(use_shared_memory=False, use_async_staging=False)
            self._stager = DefaultStager(options)
            self._after = bare.step
            usual = [self._timed(lambda: None) for _ in range(_USUAL)]
            self._usual = statistics.median(usual)

    def copy(self) -> float:
        """A plain copy into allocated host memory."""
        shards = run_shards(self._run)
        return self._timed(
            lambda: [
                b.copy_(s, non_blocking=True) for b, s in zip(self._buffers, shards, strict=True)
            ]
        )

    def dcp_save(self) -> float:
        return self._timed(lambda: dcp.save(self._state(), checkpoint_id=self._folder / "dcp"))

    def dcp_async_save(self) -> float:
        pending: list[Any] = []

        def begin() -> None:
            folder = self._folder / "async"
            pending.append(
                dcp.async_save(
                    self._state(),
                    checkpoint_id=folder,
                    process_group=self._group,
                    async_stager=self._stager,
                )
            )

        seconds = self._timed(begin)
        getattr(pending[0], "upload_completion", pending[0]).result()
        return seconds

    def torch_save(self) -> float:
        """Every rank writes its own part to its own file."""
        path = self._folder / f"rank-{dist.get_rank()}.pt"
        return self._timed(lambda: torch.save(Saved(self._bare).state_dict(), path))

    def _state(self) -> dict[str, Any]:
        return {"app": Saved(self._bare)}

    def _timed(self, work: Callable[[], object]) -> float:
        """On CUDA: with the step after it, less what a step usually takes."""
        self._clock.start()
        work()
        self._after()
        return max(_LEAST, self._clock.stop() - self._usual)


def run_shards(run: Run) -> list[torch.Tensor]:
    return [shard.local for shard in run.engine.shards()]


def main() -> None:
    options = _options()
    place = place_from(os.environ)
    device = choose_device("auto", place)
    start_group(place, device, timeout_seconds=300)
    folder = options.folder
    # Odd steps: memory only. Even ones: disk as well.
    disk, memory = (_CYCLE, _CYCLE // 2) if device.type == "cuda" else (2, 1)
    due = [f"checkpoint.every={disk}", "checkpoint.clean_after=1", "checkpoint.keep=1"]
    due += [f"checkpoint.memory_every={memory}"]
    config = settings(folder / "ours", [*due, *options.overrides])
    if place.is_first:
        write_task(make_task(config, folder, steps=8), folder / "task.json")
    dist.barrier()
    task = read_task(folder / "task.json")
    with opened(config, place, device) as run:
        measure = _measure_on_device if device.type == "cuda" else _measure
        seconds, num_bytes = measure(run, task, folder, device, options.rounds)
    if place.is_first:
        result = {
            "seconds": seconds
            if device.type == "cuda"
            else seconds | _own(folder / "ours", options.rounds),
            "bytes_per_rank": num_bytes,
            "parameters": num_parameters(task.shape),
        }
        (folder / "result.json").write_text(json.dumps(result))
    end_group()
    leave(0)


def _measure(
    run: Run, task: Task, folder: Path, device: torch.device, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Seconds by method, but for the run's own; and the state's bytes on this rank."""
    bare = BareLoop(task, "fsdp", device)
    bare.step()
    methods = Methods(run, bare, folder, device)
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for _ in range(2):
            run.loop.step()
            run.ring.drain()
        for name in ("copy", "dcp_save", "dcp_async_save", "torch_save"):
            taken = getattr(methods, name)()
            if number:  # the first time makes plans and files
                seconds.setdefault(name, []).append(taken)
        _remove(folder)
    run.loop.step()  # a stall is told in the line of the next step
    return seconds, sum(shard.numel() * shard.element_size() for shard in run_shards(run))


def _measure_on_device(
    run: Run, task: Task, folder: Path, device: torch.device, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """As :func:`_measure`, and the run's own: pairs of steps with a save between, and without."""
    bare = BareLoop(task, "fsdp", device)
    bare.step()
    methods = Methods(run, bare, folder, device)
    clock, seconds = Clock(device), dict[str, list[float]]()

    def pair() -> float:
        clock.start()
        run.loop.step()
        run.loop.step()
        taken = clock.stop()
        run.ring.drain()
        return taken

    run.loop.step()
    for number in range(rounds + 1):
        # Steps 2 and 3, 4 (memory) and 5, 6 and 7, 8 (disk) and 9 of a cycle.
        before, in_memory, between, on_disk = (pair() for _ in range(4))
        usual = (before + between) / 2
        costs = {"ring_memory": in_memory - usual, "ring_disk": on_disk - usual}
        for name in ("copy", "dcp_save", "dcp_async_save", "torch_save"):
            costs[name] = getattr(methods, name)()
        for name, taken in costs.items() if number else ():
            seconds.setdefault(name, []).append(max(_LEAST, taken))
        _remove(folder)
    return seconds, sum(shard.numel() * shard.element_size() for shard in run_shards(run))


def _own(out: Path, rounds: int) -> dict[str, list[float]]:
    """The run's own account of its stalls: each line tells those since the line before."""
    with (out / "metrics.jsonl").open() as file:
        stalls = [float(json.loads(line).get("stalls", {}).get("checkpoint", 0.0)) for line in file]
    after = stalls[1:]  # of the checkpoint at step 1, 2, ...
    return {
        "ring_memory": after[2 : 2 * rounds + 2 : 2],
        "ring_disk": after[3 : 2 * rounds + 2 : 2],
    }


def _remove(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for name in ("dcp", "async"):
            shutil.rmtree(folder / name)
        for path in folder.glob("rank-*.pt"):
            path.unlink()
    dist.barrier()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


if __name__ == "__main__":
    main()
