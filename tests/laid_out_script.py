"""A loop with the guard on tensors laid out in many ways: laid_out_script.py OUT LAYOUT TODO...

LAYOUT: ``plain``; ``tp`` (tensor parallel); ``sp`` (sequence parallel as well); ``fsdp_tp``;
``hsdp_tp``; ``columns`` (FSDP2 along dimension 1). TODO: as in guarded_script.py, with checkpoints
in OUT/TODO; ``look``: the state that OUT/poison holds; ``ring``: checkpoints without a guard.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runner import Guard, Ring

NUM, DIM, LENGTH = 36, 8, 4
BAD = (6, 20, 21)
RULES: dict[str, Any] = {"every": 6, "clean_after": 3, "min_history": 8, "clip": 0.5}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, 5, bias=False)  # cut by no plan
        self.scale = nn.Parameter(torch.ones(2, 3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale.mean(dim=(0, 1))


def meshes(layout: str) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Of data and of tensor parallelism."""
    size = dist.get_world_size()
    if layout in ("tp", "sp"):
        return None, init_device_mesh("cpu", (size,))
    if layout == "fsdp_tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "model"))
        return mesh["data"], mesh["model"]
    if layout == "hsdp_tp":
        names = ("copies", "data", "model")
        mesh = init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=names)
        return mesh["copies", "data"], mesh["model"]
    return init_device_mesh("cpu", (size,)), None


def build(layout: str) -> tuple[nn.Module, DeviceMesh | None]:
    torch.manual_seed(5)
    model = Net()
    if layout == "plain":
        return model, None
    data, tensor = meshes(layout)
    if tensor is not None:
        plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if layout == "sp":
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        whole, part = Replicate(), Shard(1)
        for block in model.blocks:
            parallelize_module(block, tensor, plan)
            if layout == "sp":
                given = PrepareModuleInput(input_layouts=whole, desired_input_layouts=part)
                got = PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole)
                parallelize_module(block, tensor, given)
                parallelize_module(block, tensor, got)
    if data is not None:
        along = 1 if layout == "columns" else 0
        choose = lambda p: Shard(along if p.dim() == 2 else 0)  # noqa: E731
        for block in model.blocks:
            fully_shard(block, mesh=data, shard_placement_fn=choose)
        fully_shard(model, mesh=data, shard_placement_fn=choose)
    return model, data


def batches(layout: str, data: DeviceMesh | None, *, poison: bool) -> list[torch.Tensor]:
    """The same for the ranks that compute one sample together."""
    number, count = 0, 1
    if data is not None:
        count = data.size()
        number = data.get_local_rank() if data.ndim == 1 else data.get_local_rank(0) * data.size(1)
        number += data.get_local_rank(1) if data.ndim == 2 else 0
    made = []
    for at in range(NUM):
        batch = torch.randn(12, LENGTH, DIM, generator=torch.Generator().manual_seed(at))
        if poison and at in BAD:
            batch[1, 0, 0] = float("nan")
        made.append(batch.chunk(count)[number])
    return made


def train(out: Path, layout: str, name: str, skip: list[Any]) -> Guard:
    model, data = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    guard = Guard(out, model=model, optimizer=optimizer, skip=skip, **RULES)
    if name == "look":
        return guard
    given = batches(layout, data, poison=name == "poison")
    for count, batch in enumerate(guard.over(given)):
        is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        is_due = os.environ.get("KILL_AT") == str(count) and name == "poison"
        if is_due and is_last and not guard.resumed_step:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(batch).square().mean()
        loss.backward()
        if guard.ok(loss):
            optimizer.step()
        optimizer.zero_grad()
    return guard


def with_ring(out: Path, layout: str) -> dict[str, Any]:
    """Some steps and a checkpoint, or the state that is there."""
    model, data = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with Ring(out, {"model": model, "optimizer": optimizer}) as ring:
        is_new = ring.step == 0
        for batch in batches(layout, data, poison=False)[:4] if is_new else []:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if is_new:
            ring.save(4)
        return {"digest": ring.digest(), "step": ring.step}


def main() -> None:
    out, layout, *todo = sys.argv[1:]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    ends: dict[str, Any] = {}
    skipped: list[Any] = []
    for name in todo:
        if name == "ring":
            ends[name] = with_ring(Path(out) / name, layout)
            continue
        folder = Path(out) / ("poison" if name == "look" else name)
        guard = train(folder, layout, name, skipped if name == "told" else [])
        skipped = guard.skipped
        ends[name] = {"digest": guard.state_digest(), "skipped": skipped}
        ends[name]["resumed"] = guard.resumed_step
        guard.close()
    if not dist.is_initialized() or dist.get_rank() == 0:
        (Path(out) / f"{layout}.json").write_text(json.dumps(ends))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
