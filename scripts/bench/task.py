"""One training task for everybody: the same model, initial weights, token batches and recipe.

It travels as a JSON file and a file of tokens, so that the other side needs nothing of the runner
but its decoder.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from runner.model.blueprint import initial_range, initial_std
from runner.model.decoder import Decoder, DecoderShape, RopeScaling
from scripts.bench.fair import watch_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained and how. ``tokens`` is an .npy file [steps, global batch, T + 1]."""

    shape: DecoderShape
    tokens: str
    seed: int
    global_size: int
    micro_size: int
    workers: int
    total: int
    warmup: int
    floor: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float
    precision: str  # "bf16" or "fp32"; weights and moments are FP32
    compile: bool = False  # each block

    @property
    def tokens_per_step(self) -> int:
        return self.global_size * self.shape.seq_len

    def rate(self, update: int) -> float:
        """Cosine after a linear warm-up, as a share of ``lr``."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        done = (update - self.warmup) / max(1, self.total - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def num_micro_batches(self, world_size: int) -> int:
        """Forward passes a rank makes in a step.

        Raises:
            ValueError: the batch does not come out even; the comparison would not be fair.
        """
        per_rank, rest = divmod(self.global_size, world_size)
        if rest or (per_rank > self.micro_size and per_rank % self.micro_size):
            raise ValueError(
                f"batch.global_size={self.global_size}, micro_size={self.micro_size}: does not "
                f"come out even on {world_size} ranks"
            )
        return max(1, per_rank // self.micro_size)


def write_task(task: Task, path: Path) -> None:
    path.write_text(json.dumps(asdict(task)))


def read_task(path: Path) -> Task:
    fields = json.loads(path.read_text())
    scaling = fields["shape"]["rope_scaling"]
    fields["shape"]["rope_scaling"] = RopeScaling(**scaling) if scaling else None
    fields["shape"] = DecoderShape(**fields["shape"])
    fields["betas"] = tuple(fields["betas"])
    return Task(**fields)


def build_model(task: Task, device: torch.device) -> Decoder:
    """The decoder with the weights the runner begins with."""
    model = Decoder(task.shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std, size = initial_std(name, task.shape), parameter.numel()
            values = initial_range(name, parameter.shape, std, seed=task.seed, start=0, count=size)
            parameter.copy_(values.view_as(parameter))
    if task.compile:
        for block in model.blocks:
            block.compile()
    else:  # the hook would become part of what is compiled
        watch_precision(model.blocks[0], task.precision)
    return model.to(device)


def build_optimizer(task: Task, model: torch.nn.Module) -> torch.optim.AdamW:
    """Fused AdamW; decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": task.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=task.lr, betas=task.betas, eps=task.eps, fused=True)


class _MicroBatches(Dataset[torch.Tensor]):
    """Item n is the n-th micro-batch of this rank, int64 [micro, T + 1]; the file goes round."""

    def __init__(self, task: Task, rank: int, world_size: int, first_step: int) -> None:
        self._tokens = np.load(task.tokens, mmap_mode="r")
        self._rank, self._world_size = rank, world_size
        self._num_micro = task.num_micro_batches(world_size)
        self._size = task.micro_size
        self._first_step = first_step

    def __len__(self) -> int:
        return 1_000_000_000  # endless

    def __getitem__(self, number: int) -> torch.Tensor:
        step, micro = divmod(number, self._num_micro)
        step += self._first_step
        own = self._tokens[step % len(self._tokens), self._rank :: self._world_size]
        rows = own[micro * self._size : (micro + 1) * self._size]
        return torch.from_numpy(rows.astype(np.int64))


def build_loader(
    task: Task, *, rank: int, world_size: int, pin: bool = False, first_step: int = 0
) -> DataLoader[torch.Tensor]:
    """This rank's micro-batches, loaded ahead."""
    return DataLoader(
        _MicroBatches(task, rank, world_size, first_step),
        batch_size=None,
        num_workers=task.workers,
        prefetch_factor=2 if task.workers else None,
        pin_memory=pin,
    )
