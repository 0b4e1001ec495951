"""Measures ``guard.ok`` in a user's loop against the same loop without it, in turns.

On the ranks two plain loops on equal models, one with a guard, take turns step by step:

    torchrun --nproc-per-node=2 -m scripts.bench.loop --folder DIR [--pairs N]

Writes DIR/result.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner import Guard
from scripts.bench.process import on_ranks
from scripts.bench.report import Row, compared
from scripts.bench.steps import Plan
from scripts.bench.turns import Turns, on_this_rank

_STEP_SECONDS = 0.3
_AIM = 1.01
_DIM, _LAYERS, _CLIP = 512, 8, 1.0
_WARMUP = 30  # steps after which the guard judges all that it judges
_RARELY = 1_000_000


def measure(plan: Plan) -> list[Row]:
    """One row for a single process, and one for the ranks under DDP."""
    return [_row(plan, ranks) for ranks in sorted({1, plan.ranks})]


def _row(plan: Plan, ranks: int) -> Row:
    result = on_ranks(ranks, "scripts.bench.loop", f"--pairs={plan.pairs(200)}")
    pairs, (ours, theirs) = result["pairs"], result["computing"]
    layout = "one process" if ranks == 1 else f"{ranks} ranks, DDP"
    return compared(
        f"guard.over and guard.ok in a loop of one's own, {layout}",
        "the loop with clip_grad_norm_",
        pairs,
        _AIM,
        ranks=ranks,
        parameters=result["parameters"],
        rows=result["rows"],
        # The processor time of the first rank's main thread, which excludes other programs.
        processor_ms=[round(1e3 * ours, 3), round(1e3 * theirs, 3)],
        processor_ratio=round(ours / theirs, 5),
        difference_ms=round(1e3 * statistics.median(a - b for a, b in pairs), 3),
        checkpoints="none within what is timed",
    )


# -- on the ranks -----------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    with on_this_rank() as (place, device):
        result = _measured(options, device)
        if place.is_first:
            (options.folder / "result.json").write_text(json.dumps(result))


def _measured(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    rows = _rows_for(_STEP_SECONDS, device)
    bare, guarded = _Loop(device), _Loop(device)
    guard = Guard(
        options.folder / "guarded",
        model=guarded.model,
        optimizer=guarded.optimizer,
        every=_RARELY,
        memory_every=0,
        clip=_CLIP,
    )
    ours = _Computing(partial(_guarded_step, guarded, guard, guard.over(_Batches(rows, device))))
    theirs = _Computing(partial(_bare_step, bare, _Batches(rows, device)[0]))
    turns = Turns(ours, device=device, block=1, warmup=_WARMUP, pairs=options.pairs)
    turns.drive(theirs)
    guard.close()
    return {
        "pairs": [(passenger, driver) for driver, passenger in turns.pairs()],
        "computing": [statistics.median(one.seconds[-options.pairs :]) for one in (ours, theirs)],
        "rows": rows,
        "parameters": sum(parameter.numel() for parameter in bare.model.parameters()),
    }


class _Loop:
    """A plain training loop: model, optimizer and backward pass."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(_DIM, _DIM), nn.GELU())]
        model: nn.Module = nn.Sequential(*layers).to(device)
        self.model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.model(batch) - batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss


class _Computing:
    """A step that records the processor seconds of its own thread."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self.seconds: list[float] = []

    def __call__(self) -> None:
        began = time.thread_time()
        self._step()
        self.seconds.append(time.thread_time() - began)


class _Batches:
    """Data with ``[i]`` and ``len``, without cost: always the same batch."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._batch = torch.randn(rows, _DIM, generator=torch.Generator().manual_seed(1)).to(device)

    def __len__(self) -> int:
        return _RARELY

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._batch


def _bare_step(loop: _Loop, batch: torch.Tensor) -> None:
    loop.backward(batch)
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), _CLIP)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def _guarded_step(loop: _Loop, guard: Guard, batches: Iterator[torch.Tensor]) -> None:
    """One step; ``next`` first makes the guard count the previous step."""
    loss = loop.backward(next(batches))
    if guard.ok(loss):
        loop.optimizer.step()
    loop.optimizer.zero_grad()


def _rows_for(seconds: float, device: torch.device) -> int:
    """The number of rows with which a step takes this long; the same on all ranks."""
    loop, rows = _Loop(device), 64
    while True:
        batch = _Batches(rows, device)[0]
        took = min(_timed(partial(_bare_step, loop, batch)) for _ in range(4))
        slowest = torch.tensor([took], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        took = float(slowest.item())
        if took > seconds / 4 or rows > 1 << 20:
            return max(1, round(rows * seconds / took))
        rows *= 2


def _timed(step: Callable[[], None]) -> float:
    """Seconds of a step; without a GPU its processor time, independent of other programs."""
    clock = time.perf_counter if torch.cuda.is_available() else time.thread_time
    began = clock()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


if __name__ == "__main__":
    main()
