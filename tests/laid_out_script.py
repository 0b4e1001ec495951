"""A loop with the guard on tensors laid out in many ways: laid_out_script.py OUT LAYOUT TODO...

LAYOUT: ``plain``; ``tp`` (tensor parallel); ``sp`` (sequence parallel as well); ``fsdp_tp``;
``hsdp_tp``; ``columns`` (FSDP2 along dimension 1). TODO: as in guarded_script.py, with checkpoints
in OUT/TODO; ``look``: the state that OUT/poison holds; ``ring``: checkpoints without a guard;
``all``: two batches a step, read late, evaluations, a rollback, a stop and a kill; ``all_told``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
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
BAD, THREE_STEPS = (6, 20, 21), (6, 24, 26, 28)
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


def batches(data: DeviceMesh | None, bad: Sequence[int], num: int = NUM) -> list[torch.Tensor]:
    """The same for the ranks that compute one sample together."""
    number, count = 0, 1
    if data is not None:
        count = data.size()
        number = data.get_local_rank() if data.ndim == 1 else data.get_local_rank(0) * data.size(1)
        number += data.get_local_rank(1) if data.ndim == 2 else 0
    made = []
    for at in range(num):
        batch = torch.randn(12, LENGTH, DIM, generator=torch.Generator().manual_seed(at))
        if at in bad:
            batch[1, 0, 0] = float("nan")
        made.append(batch.chunk(count)[number])
    return made


def train(out: Path, layout: str, name: str, skip: list[Any]) -> Guard:
    model, data = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    guard = Guard(out, model=model, optimizer=optimizer, skip=skip, **RULES)
    if name == "look":
        return guard
    given = batches(data, BAD if name == "poison" else ())
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


def train_with_all(out: Path, layout: str, *, is_told: bool, skip: list[Any]) -> Guard:
    """The last rank asks to stop in the first start, and dies in the second."""
    model, data = build(layout)
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizers = [torch.optim.AdamW(own, lr=1e-2, fused=True) for own in by_mesh.values()]
    guard = Guard(
        out, model=model, optimizer=optimizers, accumulate=2, skip=skip, sync=is_told, **RULES
    )
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    due = {"0": (15, signal.SIGTERM), "1": (17, signal.SIGKILL)}.get(number, (-1, 0))
    given = batches(data, () if is_told else THREE_STEPS, 56)
    for count, batch in enumerate(guard.over(given)):
        if count == due[0] and is_last and not is_told:
            os.kill(os.getpid(), due[1])
        loss = model(batch).square().mean()
        loss.backward()
        if count % 2 == 0:
            guard.note(loss)
            continue
        if guard.ok(loss):
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if count % 8 == 7:
            model.eval()
            with torch.no_grad():
                model(given[0])
            model.train()
    return guard


def with_ring(out: Path, layout: str) -> dict[str, Any]:
    """Some steps and a checkpoint, or the state that is there."""
    model, data = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with Ring(out, {"model": model, "optimizer": optimizer}) as ring:
        is_new = ring.step == 0
        for batch in batches(data, ())[:4] if is_new else []:
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
        folder, is_told = Path(out) / ("poison" if name == "look" else name), "told" in name
        told = skipped if is_told else []
        if name.startswith("all"):
            guard = train_with_all(folder, layout, is_told=is_told, skip=told)
        else:
            guard = train(folder, layout, name, told)
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
