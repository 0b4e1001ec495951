"""Loops in which the ranks differ: torchrun strange_ranks.py OUT.

Each rank leaves in OUT/rankN.json what the guard said of each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner import Guard
from runner.system.error import RunnerError
from tests.ranked import ranked

RANK = int(os.environ["RANK"])


def unwrapped() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def unwrapped_and_seeded_by_rank() -> nn.Module:
    torch.manual_seed(RANK)
    return nn.Linear(4, 1)


def stages() -> nn.Module:
    return nn.Linear(4, 1 + RANK)


def shorter() -> nn.Module:
    return DistributedDataParallel(unwrapped())


def train(out: Path, model: nn.Module, num: int) -> None:
    guard = Guard(
        out, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), memory_every=0
    )
    try:
        for batch in guard.over([torch.full((2, 4), 1.0 + RANK)] * num):
            loss = model(batch).square().mean()
            loss.backward()
            guard.ok(loss)
    finally:
        guard._finalizer()


def main() -> None:
    out = Path(sys.argv[1])
    said = {}
    with ranked():
        for build in (unwrapped, unwrapped_and_seeded_by_rank, stages, shorter):
            try:
                train(out / build.__name__, build(), 6 - RANK * (build is shorter))
            except RunnerError as error:
                said[build.__name__] = str(error)
        (out / f"rank{RANK}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
