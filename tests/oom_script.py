"""A user's script whose memory holds two samples at once: python oom_script.py OUT CHOICE.

On two ranks, DDP. Rank 1 runs out of memory from the batch FULL_AT on, sees NaN in batch BAD, and
is asked to stop within an evaluation; rank 0 is killed once, later. Then the plain loop is run that
makes the same choice. Each rank leaves both ends in ``rankN.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runner import Guard
from tests.frameworks import digest
from tests.ranked import ranked

NUM, ROWS, DIM, BAD, FULL_AT, STOP_AT, KILL_AT = 40, 8, 6, 11, 17, 26, 31
FITS = 2  # samples


def batches(rank: int, *, poison: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    made = [{"x": torch.randn(ROWS, DIM, generator=generator)} for _ in range(NUM)]
    if poison and rank == 1:
        made[BAD]["x"][0, 0] = float("nan")
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(DIM, 16), nn.Dropout(0.1), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = DistributedDataParallel(Net())
    torch.manual_seed(50 + rank)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, parts: Iterable[tuple[Any, float]], *, most: int = ROWS) -> torch.Tensor:
    total = torch.zeros(())
    for part, share in parts:
        if len(part["x"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. (On purpose.)")
        loss = model(part["x"]).square().mean() * share
        loss.backward()
        total += loss.detach()
    return total


def guarded(out: Path, rank: int, choice: str) -> tuple[str, list[tuple[int, int]]]:
    model, optimizer = build(rank)
    guard = Guard(
        out, model=model, optimizer=optimizer, every=6, clean_after=2, min_history=8, on_oom=choice
    )
    made = batches(rank, poison=True)
    for batch in guard.over(made):
        number = next(i for i, one in enumerate(made) if one is batch)
        is_full = number >= FULL_AT if choice == "halve" else number == FULL_AT
        if number == KILL_AT and rank == 0 and not (out / "killed").exists():
            (out / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        total = step(model, guard.parts(batch), most=FITS if is_full and rank == 1 else ROWS)
        if guard.ok(total):
            optimizer.step()
        optimizer.zero_grad()
        if number % 6 == STOP_AT % 6:
            evaluate(model, guard, asks=number == STOP_AT and rank == 1, mark=out / "stopped")
    end = digest([model.state_dict(), optimizer.state_dict()]), guard.skipped
    guard.close()
    return end


def evaluate(model: nn.Module, guard: Guard, *, asks: bool, mark: Path) -> None:
    """In evaluation mode; this rank is asked to stop in it, once."""
    model.eval()
    for batch in range(3):
        if asks and batch == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        guard.check_stop()
        with torch.no_grad():
            model(torch.ones(1, DIM))
    model.train()


def plain(rank: int, skipped: list[tuple[int, int]], choice: str) -> str:
    model, optimizer = build(rank)
    for number, batch in enumerate(batches(rank, poison=False)):
        if any(start <= number < stop for start, stop in skipped):
            continue
        num = ROWS // FITS if choice == "halve" and number >= FULL_AT else 1
        parts = [({"x": part}, 1 / num) for part in batch["x"].chunk(num)]
        step(model, parts)
        optimizer.step()
        optimizer.zero_grad()
    return digest([model.state_dict(), optimizer.state_dict()])


def main() -> None:
    folder, choice = Path(sys.argv[1]), sys.argv[2]
    with ranked() as rank:
        ended, skipped = guarded(folder / "run", rank, choice)
        found = {"run": ended, "plain": plain(rank, skipped, choice), "skipped": skipped}
        (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
