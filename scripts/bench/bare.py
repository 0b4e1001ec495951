"""The other side: a training loop written by hand, with FSDP2 or DistributedDataParallel.

    torchrun --nproc-per-node=2 -m scripts.bench.bare --task task.json --out DIR --steps 50

What a competent person writes without a framework: fused AdamW, no guard, no checks, the loss read
only every tenth step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from scripts.bench.fair import DTYPES
from scripts.bench.task import Task, build_loader, build_model, build_optimizer, read_task

LOG_EVERY = 10


class BareLoop:
    """Model, optimizer and data; :meth:`step` is one update."""

    def __init__(self, task: Task, kind: str, device: torch.device) -> None:
        self._task, self._kind, self._device = task, kind, device
        self._num_micro = task.num_micro_batches(dist.get_world_size())
        self.model: Any = build_model(task, device)
        if kind == "fsdp":
            precision = MixedPrecisionPolicy(
                param_dtype=DTYPES[task.precision], reduce_dtype=torch.float32
            )
            for block in self.model.blocks:
                fully_shard(block, mp_policy=precision)
            fully_shard(self.model, mp_policy=precision)
        else:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = build_optimizer(task, self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, task.rate)
        self.steps = 0
        self.last_loss = float("nan")
        self.load_data()

    def load_data(self) -> None:
        """Begin to load from the present step on."""
        loader = build_loader(
            self._task,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pin=self._device.type == "cuda",
            first_step=self.steps,
        )
        self._batches = iter(loader)

    def step(self) -> torch.Tensor:
        """One update; returns this rank's mean loss, still on the device."""
        total = torch.zeros((), device=self._device)
        for number in range(1, self._num_micro + 1):
            total += self._micro_batch(is_last=number == self._num_micro)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._task.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if self.steps % LOG_EVERY == 0:
            self.last_loss = total.item()
        return total

    def _micro_batch(self, *, is_last: bool) -> torch.Tensor:
        tokens = next(self._batches).to(self._device, non_blocking=True)
        with self._reduced_in_the_end(is_last):
            with self._autocast():
                logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss = loss / self._num_micro
            loss.backward()
        return loss.detach()

    def _reduced_in_the_end(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients of a step are reduced once."""
        if self._kind == "fsdp":
            self.model.set_requires_gradient_sync(is_last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if is_last else self.model.no_sync()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._kind == "fsdp":  # its mixed precision policy casts
            return contextlib.nullcontext()
        is_bf16 = self._task.precision == "bf16"
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_bf16)


class Saved(Stateful):
    """What a checkpoint holds, as torch's tutorial on DCP has it."""

    def __init__(self, loop: BareLoop) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._loop.model, self._loop.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self._loop.schedule.state_dict(),
            "steps": self._loop.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self._loop.model,
            self._loop.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._loop.schedule.load_state_dict(state["schedule"])
        self._loop.steps = state["steps"]


def train(loop: BareLoop, options: argparse.Namespace) -> None:
    """Resume from the newest checkpoint, and save every so many steps; all are kept."""
    # DCP writes .metadata last.
    stored = sorted(path.parent for path in options.out.glob("step-*/.metadata"))
    if stored:
        dcp.load({"app": Saved(loop)}, checkpoint_id=stored[-1])
        loop.load_data()
    began = time.time()
    with (options.out / f"log-{dist.get_rank()}.jsonl").open("a") as log:
        while loop.steps < options.steps:
            marker = options.out / "killed"
            is_due = loop.steps + 1 == options.kill_at and dist.get_rank() == 1
            if is_due and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loop.step()
            line = {"step": loop.steps, "time": time.time(), "began": began}
            print(json.dumps(line), file=log, flush=True)
            if loop.steps % options.every == 0:
                dcp.save({"app": Saved(loop)}, checkpoint_id=options.out / f"step-{loop.steps:08}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, help="steps between dcp.save")
    parser.add_argument("--kill-at", type=int, help="rank 1 dies before this step, once")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    train(BareLoop(read_task(options.task), "fsdp", device), options)
    dist.barrier()
    os._exit(0)  # threads that gloo leaves behind abort some of the exits


if __name__ == "__main__":
    main()
