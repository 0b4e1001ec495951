"""A script with a ring and no guard, for the drills: python ringed_script.py OUT STEPS [SHARDED].

KILL_AT=N: SIGKILL at the Nth fsync or rename of the saves from step 4 on. A file for each start
says what it went on from, and whether that was bit for bit what an earlier start had saved.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from runner import Ring


class Randomness:
    """Differs between ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


def build(*, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(5)
    # Three rows on two ranks: uneven shards.
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Dropout(0.1), nn.Linear(3, 8))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(50 + (dist.get_rank() if dist.is_initialized() else 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def killed_at(number: int) -> None:
    """Die instead of the ``number``-th call that makes something durable."""
    count = 0

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, wrapped(getattr(os, name)))


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    sharded = sys.argv[3:] == ["sharded"]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    model, optimizer, scheduler = build(sharded=sharded)
    state = {"rng": Randomness(), "opt": optimizer, "model": model, "schedule": scheduler}
    ring = Ring(out / "run", state)
    digests = out / "digests"
    digests.mkdir(exist_ok=True)
    current_digest, digest_file = ring.digest(), digests / f"{ring.step}"
    if first:
        result = {"step": ring.step, "memory": ring.is_from_memory}
        result["same"] = digest_file.read_text() == current_digest if digest_file.exists() else None
        (out / f"start-{len(list(out.glob('start-*')))}").write_text(json.dumps(result))
    for step in range(ring.step + 1, steps + 1):
        model(torch.full((2, 8), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        digest = ring.digest()
        if first:
            (digests / f"{step}").write_text(digest)
        if step == 4 and "KILL_AT" in os.environ:
            killed_at(int(os.environ["KILL_AT"]))
        ring.save(step, disk="ONLY_MEMORY" not in os.environ or step == 1)
        if str(step) == os.environ.get("KILL_AFTER"):
            os.kill(os.getpid(), signal.SIGKILL)
    end = {"faults": ring.prove(), "digest": ring.digest()}
    if first:
        (out / "end").write_text(json.dumps(end))
    ring.close()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
