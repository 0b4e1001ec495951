"""Training scripts with our own parts: python own.py KIND --out DIR --steps N (guard or ring)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from runner import Guard, Ring, Sampler

SAMPLES = torch.randn(96, 8, generator=torch.Generator().manual_seed(7))


class Randomness:
    """Torch's generator, which dropout draws from."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Dropout(0.1), nn.Linear(3, 8))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(50 + (dist.get_rank() if dist.is_initialized() else 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))


def with_guard(out: Path, steps: int) -> None:
    model, optimizer, schedule = build()
    guard = Guard(out, model=model, optimizer=optimizer, scheduler=schedule, every=5)
    sampler = Sampler(SAMPLES, global_size=12, seed=3)
    loader = DataLoader(SAMPLES, batch_sampler=sampler)  # type: ignore[arg-type]
    for _ in range(-(-steps // (len(SAMPLES) // 12))):
        for batch in guard.over(loader):
            loss = model(batch).square().mean()
            loss.backward()
            if guard.ok(loss):
                optimizer.step()
                schedule.step()
            optimizer.zero_grad()
    guard.close()


def with_ring(out: Path, steps: int) -> None:
    model, optimizer, schedule = build()
    sampler = Sampler(SAMPLES, global_size=12, seed=3)
    # With a generator of its own: a loader that begins draws a number.
    own = torch.Generator()
    loader = DataLoader(SAMPLES, batch_sampler=sampler, generator=own)  # type: ignore[arg-type]
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    with Ring(out, {**parts, "random": Randomness()}) as ring:
        step = ring.step
        while step < steps:
            for batch in sampler.over(loader):
                model(batch).square().mean().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                if step % 5 == 0:
                    ring.save(step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["guard", "ring"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    {"guard": with_guard, "ring": with_ring}[arguments.kind](arguments.out, arguments.steps)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
