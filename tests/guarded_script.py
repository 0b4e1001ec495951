"""A user's training script, for the drills: python guarded_script.py OUT LAYOUT TODO...

LAYOUT: ``plain``, ``ddp``, ``fsdp``; ``sampler``: DDP with a DataLoader that has our sampler;
``micro``: DDP with two batches a step, where only the loss of the first one is ever NaN; or
``windows``: the same with random windows, drawn from the generator that dropout draws from.

TODO: ``poison`` (rank 1 alone sees NaN), ``told`` (told to skip what that run skipped), ``break``
(left without a word within a step, and begun again), ``kill`` (SIGKILL, once), ``bare`` (no guard:
what was skipped is read and not used). Where LATE is set the poisoned run reads the numbers of a
step one step late. At the batch STOP_AT of a run that was never stopped, rank 1 gets SIGTERM; where
SLOW_DISK is set no rank's disk takes a file within the grace from then on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from runner import Guard, Sampler
from runner.checkpoint.disk import tier
from runner.checkpoint.state_digest import state_digest
from runner.distributed.agreement import Ranks
from runner.embed.state.loop_state import LoopState
from tests.ranked import in_turn, ranked

NUM, DIM = 48, 8
BAD = (6, 20, 29, 30, 31)
TWO_A_STEP = ("micro", "windows")
RULES: dict[str, Any] = {"every": 8, "clean_after": 3, "min_history": 8, "clip": 0.5}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Three rows on two ranks: uneven shards.
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, 3), nn.Linear(3, 1)])
        self.norm, self.drop = nn.BatchNorm1d(DIM), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(torch.tanh(second(self.drop(self.norm(first(x))))))


def data(rank: int, *, poison: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(6, DIM, generator=generator) for _ in range(NUM)]
    for number in BAD if poison and rank == 1 else ():
        batches[number][0, 0] = float("nan")
    return batches


def sampled(*, poison: bool) -> Any:
    """A DataLoader with our sampler; in each bad batch, rank 1's sample is bad."""
    per_batch = 12
    num = NUM * per_batch
    samples = torch.randn(num, DIM, generator=torch.Generator().manual_seed(7))
    order = [i for [i] in Sampler(num, global_size=1, seed=5, rank=0, world_size=1)]
    for number in BAD if poison else ():
        samples[order[per_batch * number + 1], 0] = float("nan")
    return DataLoader(samples, batch_sampler=Sampler(num, global_size=per_batch, seed=5))  # type: ignore[arg-type]


class Windows:
    """Random windows, as nanoGPT draws them."""

    def __init__(self, rank: int, *, poison: bool) -> None:
        self._samples = torch.randn(40, DIM, generator=torch.Generator().manual_seed(9))
        # Of two batches the first, the second; then three steps in a row.
        self._bad = (8, 21, 41, 43, 44) if poison and rank == 1 else ()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(NUM + 16):
            windows = self._samples[torch.randint(len(self._samples), (6,))]
            yield windows * (float("nan") if number in self._bad else 1.0)


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model: nn.Module = Net()
    if layout in ("ddp", "sampler", "micro", "windows"):
        model = DistributedDataParallel(model)
    elif layout == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(50 + (dist.get_rank() if dist.is_initialized() else 0))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@torch.no_grad()
def look(model: nn.Module) -> None:
    """An evaluation, after which FSDP2 keeps the root's parameters gathered."""
    model.eval()
    model(torch.zeros(2, DIM))
    model.train()


def read_by(layout: str, rank: int, *, poison: bool) -> Any:
    if layout == "sampler":
        return sampled(poison=poison)
    if layout == "windows":
        return Windows(rank, poison=poison)
    return data(rank, poison=poison and layout != "micro")


def ask_to_stop(rank: int) -> None:
    if os.environ.get("SLOW_DISK"):
        tier.write_rank_file = lambda *_, **named: time.sleep(60)  # type: ignore[assignment]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def train(out: Path, layout: str, *, poison: bool, stop_at: int = -1, **settings: Any) -> Guard:
    model, optimizer = build(layout)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    if layout == "fsdp":
        look(model)
    guard = Guard(
        out, model=model, optimizer=optimizer, scheduler=scheduler,
        accumulate=2 if layout in TWO_A_STEP else 1, **RULES, **settings,
    )  # fmt: skip
    rank = dist.get_rank() if dist.is_initialized() else 0
    is_micro = layout == "micro"
    loader = read_by(layout, rank, poison=poison)
    stop = int(os.environ.get("STOP_AT", "-1")) if poison and not guard.resumed_step else -1
    for count, batch in enumerate(guard.over(loader)):
        if rank == 1 and stop - 4 <= count < stop:
            time.sleep(1.2)  # two slow steps
        if count == stop:
            ask_to_stop(rank)
        loss = model(batch).square().mean()
        loss.backward()
        if layout in TWO_A_STEP and count % 2 == 0:
            in_hand = guard._steps.in_hand
            is_bad = is_micro and poison and rank == 1 and in_hand[1] - 1 in BAD
            guard.note(loss * float("nan") if is_bad else loss)
            continue
        if count == stop_at:
            guard._finalizer()
            return guard
        if (
            os.environ.get("KILL_AT") == str(count)
            and poison
            and guard.resumed_step == 0
            and rank == 1
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        if guard.ok(loss):
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        if layout == "fsdp" and count % 4 == 3:
            look(model)
    return guard


def bare(layout: str, skipped: list[tuple[int, int]]) -> str:
    """The loop without a guard; returns its state's digest."""
    model, optimizer = build(layout)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    for number, batch in enumerate(Windows(dist.get_rank(), poison=False)):
        if any(start <= number < stop for start, stop in skipped):
            continue
        model(batch).square().mean().backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), RULES["clip"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    cpu = torch.device("cpu")
    return state_digest(LoopState([model], [optimizer], Ranks(cpu), cpu).tensors(), {})


def main() -> None:
    out, layout, *todo = sys.argv[1:]

    def run(name: str, skipped: list[Any]) -> dict[str, Any]:
        folder = Path(out) / f"{layout}-{name}"
        if name == "break":
            train(folder, layout, poison=True, stop_at=25)
            train(folder, layout, poison=True, stop_at=11)
        if name == "bare":
            return {"digest": bare(layout, skipped), "skipped": skipped}
        settings: dict[str, Any] = {"skip": skipped} if name == "told" else {}
        if "STOP_AT" in os.environ:
            settings["grace_seconds"] = 4.0
        if os.environ.get("SLOW_DISK") == "no memory":
            settings["memory_every"] = 0
        if name == "poison" and os.environ.get("LATE"):
            settings["sync"] = False
        guard = train(folder, layout, poison=name != "told", **settings)
        guard.close()
        return {"digest": guard.state_digest(), "skipped": guard.skipped}

    with ranked() as rank:
        ends = in_turn(todo, run)
        if rank == 0:
            (Path(out) / f"{layout}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
