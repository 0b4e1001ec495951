"""Measures how long training waits for a snapshot, against a plain copy and torch's savers.

On the ranks one of each in turn, between real steps; what goes on in the background has ended
before the next begins:

    torchrun --nproc-per-node=2 -m scripts.bench.snapshot --folder DIR [--rounds N] [key=value ...]

On a CPU it is the seconds that a method keeps the training thread. On CUDA that thread only
launches, and the device waits later: there it is by how much a method lengthens the steps around
it, on the device, for all methods alike. Writes DIR/result.json: seconds of rank 0 by method.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from runner.distributed.env import RankEnv
from runner.model.decoder import num_parameters
from runner.train.run import EngineRun
from scripts.bench.bare import BareLoop, Saved
from scripts.bench.ours import make_task, opened, settings
from scripts.bench.process import on_ranks
from scripts.bench.report import Row, compared
from scripts.bench.steps import Plan
from scripts.bench.task import read_task, write_task
from scripts.bench.turns import Clock, on_this_rank

_AIM_COPY = 1.3
_MEDIUM = ["model.dim=512", "model.layers=8", "model.heads=8"]
# The batch does not matter here: the smallest makes the steps between short.
_TINY_BATCH = ["data.seq_len=32", "batch.micro_size=1"]
_OTHERS = {
    "copy": "plain copy of the same bytes",
    "dcp_save": "dcp.save",
    "dcp_async_save": "dcp.async_save",
    "torch_save": "torch.save",
}
_CYCLE = 8  # steps from one save to disk to the next, on CUDA
_USUAL = 5
_LEAST = 1e-6  # seconds: what is lost in the noise is not negative

Seconds = dict[str, list[float]]


def measure(plan: Plan) -> list[Row]:
    size = plan.size if plan.has_gpu else _MEDIUM
    batch = [*_TINY_BATCH, f"batch.global_size={plan.ranks}"]
    rounds = f"--rounds={3 if plan.quick else 12}"
    words = [rounds, *size, *batch, *plan.overrides]
    result = on_ranks(plan.ranks, "scripts.bench.snapshot", *words)
    seconds, detail = result.pop("seconds"), result
    rows = []
    for name, against in _OTHERS.items():
        kind, own, aim = ("checkpoint on disk", "ring_disk", None)
        if name == "copy":
            kind, own, aim = ("snapshot in memory", "ring_memory", _AIM_COPY)
        pairs = list(zip(seconds[own], seconds[name], strict=True))
        row = compared(f"training waits for a {kind}", against, pairs, aim, **detail)
        plan.say(f"  {row.what} / {row.against}: {row.ratio['median']:.3f}")
        rows.append(row)
    return rows


# -- on the ranks -----------------------------------------------------------------------------


class Methods:
    """Methods that save the same bytes once and return the seconds that training waited."""

    def __init__(self, run: EngineRun, bare: BareLoop, folder: Path, device: torch.device) -> None:
        self._bare, self._folder = bare, folder
        self._clock = Clock(device)
        self._shards = [shard.local for shard in run.engine.shards()]
        has_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty_like(s, device="cpu", pin_memory=has_gpu) for s in self._shards
        ]
        self._group = dist.new_group(backend="gloo")  # as dcp.async_save wants it
        # Into page-locked memory, which it keeps: what a competent person asks for on a GPU.
        self._stager = None
        self._after: Callable[[], object] = lambda: None
        self._usual = 0.0
        if has_gpu:
            options = StagingOptions(use_shared_memory=False, use_async_staging=False)
            self._stager = DefaultStager(options)
            self._after = bare.step
            self._usual = statistics.median(self._timed(lambda: None) for _ in range(_USUAL))

    @property
    def num_bytes(self) -> int:
        """Of the state on this rank."""
        return sum(shard.numel() * shard.element_size() for shard in self._shards)

    def each(self) -> dict[str, float]:
        """One of each."""
        seconds = {name: getattr(self, name)() for name in _OTHERS}
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self._folder.glob("other-*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()
        return seconds

    def copy(self) -> float:
        """A plain copy into allocated host memory."""

        def copy_all() -> None:
            for buffer, shard in zip(self._buffers, self._shards, strict=True):
                buffer.copy_(shard, non_blocking=True)

        return self._timed(copy_all)

    def dcp_save(self) -> float:
        folder = self._folder / "other-dcp"
        return self._timed(lambda: dcp.save({"app": Saved(self._bare)}, checkpoint_id=folder))

    def dcp_async_save(self) -> float:
        pending: list[Any] = []

        def begin() -> None:
            pending.append(
                dcp.async_save(
                    {"app": Saved(self._bare)},
                    checkpoint_id=self._folder / "other-async",
                    process_group=self._group,
                    async_stager=self._stager,
                )
            )

        seconds = self._timed(begin)
        getattr(pending[0], "upload_completion", pending[0]).result()
        return seconds

    def torch_save(self) -> float:
        """Every rank writes its own part to its own file."""
        path = self._folder / f"other-{dist.get_rank()}.pt"
        return self._timed(lambda: torch.save(Saved(self._bare).state_dict(), path))

    def _timed(self, work: Callable[[], object]) -> float:
        """On CUDA: with the step after it, less what a step usually takes."""
        self._clock.start()
        work()
        self._after()
        return max(_LEAST, self._clock.stop() - self._usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with on_this_rank() as (place, device):
        _measure_here(options, place, device)


def _measure_here(options: argparse.Namespace, place: RankEnv, device: torch.device) -> None:
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
        bare = BareLoop(task, "fsdp", device)
        bare.step()
        methods = Methods(run, bare, folder, device)
        measure = _on_device if device.type == "cuda" else _on_cpu
        seconds = measure(run, methods, options.rounds, device)
    if place.is_first:
        seconds = _own(folder / "ours", options.rounds) | seconds
        result = {
            "seconds": seconds,
            "bytes_per_rank": methods.num_bytes,
            "parameters": num_parameters(task.shape),
        }
        (folder / "result.json").write_text(json.dumps(result))


def _on_cpu(run: EngineRun, methods: Methods, rounds: int, device: torch.device) -> Seconds:
    """Seconds by method, but for the run's own."""
    seconds: Seconds = {name: [] for name in _OTHERS}
    for number in range(rounds + 1):
        for _ in range(2):
            run.loop.step()
            run.ring.drain()
        for name, taken in methods.each().items():
            if number:  # the first time makes plans and files
                seconds[name].append(taken)
    run.loop.step()  # a stall is told in the line of the next step
    return seconds


def _on_device(run: EngineRun, methods: Methods, rounds: int, device: torch.device) -> Seconds:
    """As :func:`_on_cpu`, and the run's own: pairs of steps with a save between, and without."""
    clock, seconds = Clock(device), Seconds()

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
        costs = {"ring_memory": in_memory - usual, "ring_disk": on_disk - usual, **methods.each()}
        for name, taken in costs.items() if number else ():
            seconds.setdefault(name, []).append(max(_LEAST, taken))
    return seconds


def _own(out: Path, rounds: int) -> Seconds:
    """The run's own account of its stalls: each line tells those since the line before."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    stalls = [float(line.get("stalls", {}).get("checkpoint", 0.0)) for line in lines]
    after = stalls[1:]  # of the checkpoint at step 1, 2, ...
    return {
        "ring_memory": after[2 : 2 * rounds + 2 : 2],
        "ring_disk": after[3 : 2 * rounds + 2 : 2],
    }


if __name__ == "__main__":
    main()
