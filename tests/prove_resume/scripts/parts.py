"""What the training scripts of this folder share: settings, data, model, checkpoint files, output.

Each script takes ``--out DIR --steps N --save-every K``, goes on from the newest checkpoint in DIR,
and prints the loss of each step and a digest of its final state. The environment variable
``DEFECT`` plants one mistake in how it resumes, ``VARIANT`` selects another script of the kind.
``STOP_AT=N``, for tests: the first rank stands still for ever after step N.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

DEFECT, VARIANT = os.environ.get("DEFECT", ""), os.environ.get("VARIANT", "")
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, BATCH, SEED = 96, 8, 20


def settings(*, defects: Collection[str], variants: Collection[str] = ()) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        ValueError: DEFECT or VARIANT is none of the script's.
    """
    for name, value, known in (("DEFECT", DEFECT, defects), ("VARIANT", VARIANT, variants)):
        if value and value not in known:
            raise ValueError(f"{name}={value}: this script has {', '.join(sorted(known))}")
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


# -- data ---------------------------------------------------------------------------------------


class Samples(Dataset[Any]):
    """SAMPLES rows of 8 numbers, each with its class: 0 to 3."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(SAMPLES, 8, generator=generator)
        self.labels = torch.randint(0, 4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


class Noisy(Samples):
    """Augments a sample with the random numbers of the process that reads it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs + 0.3 * torch.randn(8), label


class Stream(IterableDataset[Any]):
    """An endless stream through a shuffle buffer of 16, a share of it for each rank.

    Its ``state_dict`` is that after the last sample it gave, without the buffer if it is told so.
    """

    def __init__(self, *, keeps_buffer: bool = True) -> None:
        self.samples, self.keeps_buffer = Samples(), keeps_buffer
        self.random = random.Random(SEED + RANK)
        self.position, self.buffer = RANK, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            while len(self.buffer) < 16:
                self.buffer.append(self.position % SAMPLES)
                self.position += WORLD
            yield self.samples[self.buffer.pop(self.random.randrange(16))]

    def state_dict(self) -> dict[str, Any]:
        buffer = list(self.buffer) if self.keeps_buffer else []
        return {"position": self.position, "random": self.random.getstate(), "buffer": buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer = state["position"], list(state["buffer"])
        self.random.setstate(state["random"])


# -- model --------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two towers of the same shape, with dropout, under one head."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d, dropout: float = 0.2) -> None:
        super().__init__()
        towers = (
            nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Dropout(dropout))  # type: ignore[call-arg]
            for _ in range(2)
        )
        self.left, self.right = towers
        self.head = nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(inputs), self.right(inputs)], dim=1))


def groups_of(model: Any, *, swapped: bool = False) -> list[dict[str, Any]]:
    """Two groups of equal shapes and a third; ``swapped``: the first two in the other order."""
    left = {"params": list(model.left.parameters()), "lr": 2e-2, "weight_decay": 0.1}
    right = {"params": list(model.right.parameters()), "lr": 5e-3, "weight_decay": 0.0}
    return [*([right, left] if swapped else [left, right]), {"params": model.head.parameters()}]


def warm_up_and_decay(step: int) -> float:
    return min(1.0, (step + 1) / 10) * 0.97**step


@torch.no_grad()
def average_into(ema: nn.Module, model: nn.Module) -> None:
    for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
        average.lerp_(parameter, 0.1)


# -- mistakes that several scripts make, where DEFECT names them ---------------------------------

BATCH_SHIFT = {"batch_skipped": 1, "batch_repeated": -1}.get(DEFECT, 0)


def weights(state: dict[str, Any]) -> dict[str, Any]:
    """The weights as they are stored: in half the bytes, or without the running statistics."""
    if DEFECT == "weights_bf16":
        state = {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()}
    if DEFECT == "batchnorm":
        state = {n: t for n, t in state.items() if "running" not in n}
    return state


def of_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state as it is loaded: learning rates and options only, or uncounted."""
    if DEFECT == "moments":
        state = {**state, "state": {}}
    if DEFECT == "step_counts":  # what a format of one's own forgets
        for one in state["state"].values():
            one["step"] = torch.zeros(())
    return state


# -- random numbers, checkpoint files -----------------------------------------------------------


def random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def write(state: Any, path: Path) -> None:
    """Save a file that is there whole, or not at all."""
    partial = path.with_suffix(f".partial{RANK}")
    torch.save(state, partial)
    os.replace(partial, path)


def read(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def newest(folder: Path, pattern: str) -> Path | None:
    """The file or folder whose name matches and has the greatest number in it."""
    return max(folder.glob(pattern), key=number_of, default=None)


def number_of(path: Path) -> int:
    return int(re.findall(r"\d+", path.name)[-1])


# -- output -------------------------------------------------------------------------------------


def report(step: int, loss: Any) -> None:
    _print(f"step {step} loss {float(loss)!r}")
    if RANK == 0 and os.environ.get("STOP_AT") == str(step):
        time.sleep(3600)


def report_digest(*states: Any) -> None:
    _print(f"digest {digest(states)}")


def _print(text: str) -> None:
    """In one piece: torchrun has its ranks write without a buffer."""
    sys.stdout.write(f"rank {RANK} {text}\n")
    sys.stdout.flush()


def digest(state: Any) -> str:
    """SHA-256 of a nested state, bit for bit."""
    sha256 = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            whole = one.detach().contiguous().view(-1).view(torch.uint8)
            sha256.update(f"{one.dtype}{tuple(one.shape)}".encode() + whole.numpy().tobytes())
        elif isinstance(one, dict):
            for key in sorted(one, key=str):
                sha256.update(str(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for inner in one:
                add(inner)
        else:
            sha256.update(repr(one).encode())

    add(state)
    return sha256.hexdigest()[:16]
