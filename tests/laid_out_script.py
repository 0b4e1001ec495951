"""A loop with the guard on tensors laid out in many ways: laid_out_script.py OUT LAYOUT TODO...

LAYOUT: ``plain``; ``tp`` (tensor parallel); ``sp`` (sequence parallel as well); ``fsdp_tp``;
``hsdp_tp``; ``columns`` (FSDP2 along dimension 1); ``pp`` (two stages of a pipeline); ``pp_fsdp``;
``pp_alike`` (both stages have the same names); experts in parallel, each rank with its own: ``ep``
(DTensors), ``ep_plain`` and ``ep_fsdp`` (sharded among those with the same), which are refused.
TODO: as in guarded_script.py, with checkpoints
in OUT/TODO; ``look``: the state that OUT/poison holds; ``ring``: checkpoints without a guard;
``nanR``: rank R's gradient of one step is NaN; ``all``: two batches a step, read late, evaluations,
a rollback, a stop and a kill; ``all_told``; ``epochs``: passes of a DataLoader, out of memory;
``bare``: the same without a guard. DROP in the environment: the share that drops out. Each end has
``draws``, digests of the generators by rank.
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
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler

from runner import Guard, Ring
from runner.checkpoint.state_digest import state_digest
from runner.distributed.agreement import Ranks
from runner.embed.state.loop_state import LoopState
from tests.ranked import in_turn, ranked

NUM, DIM, LENGTH = 36, 8, 12
NUM_EXPERTS = 6
NAN_AT, OVERFLOW_AT, FULL_AT = 12, 41, 10
BAD, THREE_STEPS = (6, 20, 21), (6, 24, 26, 28)
RULES: dict[str, Any] = {"every": 6, "clean_after": 3, "min_history": 8, "clip": 0.5}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)
        self.drop = nn.Dropout(float(os.environ.get("DROP", "0")))
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))  # forward passes, as of running statistics

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


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


class Experts(nn.Module):
    """Of which each rank holds some, and computes what these give for the samples of all ranks."""

    def __init__(self, ranks: DeviceMesh, kind: str) -> None:
        super().__init__()
        group = ranks.get_group()
        self._group, self._number, self._count = group, ranks.get_local_rank(), ranks.size()
        self.router = nn.Linear(DIM, NUM_EXPERTS)
        weights = torch.randn(NUM_EXPERTS, DIM, DIM).tensor_split(self._count)[self._number]
        whole = (NUM_EXPERTS, DIM, DIM)
        place = {"shape": whole, "stride": (DIM * DIM, DIM, 1), "run_check": False}
        laid_out = DTensor.from_local(weights, ranks, [Shard(0)], **place)
        self.weights = nn.Parameter(laid_out if kind == "ep" else weights.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x if n == self._number else torch.zeros_like(x) for n in range(self._count)]
        given = all_reduce(torch.cat(parts), group=self._group)
        weights = self.weights.to_local() if isinstance(self.weights, DTensor) else self.weights
        shares = self.router(given).softmax(-1).tensor_split(self._count, -1)[self._number]
        own = torch.einsum("...d,edf,...e->...f", given, weights, shares)
        return all_reduce(own, group=self._group).chunk(self._count)[self._number]


class Stage(nn.Module):
    """One of two: of a net, or of equal halves."""

    def __init__(self, net: Net, number: int, *, are_alike: bool) -> None:
        super().__init__()
        blocks = list(net.blocks)
        blocks[1 - number] = nn.Identity()
        self.blocks = nn.ModuleList(blocks[number : number + 1] if are_alike else blocks)
        if number == 1 and not are_alike:
            self.head, self.scale = net.head, net.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x if isinstance(block, nn.Identity) else x + block(x)
        return self.head(x) * self.scale.mean(dim=(0, 1)) if hasattr(self, "head") else x


class Pipeline:
    """A step's forward and backward in two stages: the loss on the last one, None on the other."""

    def __init__(self, model: Stage, mesh: DeviceMesh, rows: int) -> None:
        self.number = mesh.get_local_rank()
        read = torch.zeros(rows // 2, LENGTH, DIM, requires_grad=self.number == 1)
        width = 5 if hasattr(model, "head") else DIM
        made = torch.zeros(rows // 2, LENGTH, width, requires_grad=True)
        stage = PipelineStage(
            model,
            self.number,
            2,
            torch.device("cpu"),
            # Otherwise torch asks for them by a forward pass at each start, which is counted.
            input_args=read,
            output_args=made,
            group=mesh.get_group(),
        )
        self.schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().mean())

    def step(self, batch: torch.Tensor) -> torch.Tensor | None:
        if self.number == 0:
            self.schedule.step(batch)
            return None
        losses: list[torch.Tensor] = []
        self.schedule.step(target=batch, losses=losses)
        return torch.stack(losses).detach().mean()


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
        copies = 2 if size % 4 == 0 else size // 2
        mesh = init_device_mesh("cpu", (copies, size // copies // 2, 2), mesh_dim_names=names)
        return mesh["copies", "data"], mesh["model"]
    return init_device_mesh("cpu", (size,)), None


def build_stage(layout: str) -> tuple[Stage, DeviceMesh, DeviceMesh]:
    """A stage, and the meshes of data parallelism and of the pipeline."""
    torch.manual_seed(5)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "data"))
    model = Stage(Net(), mesh.get_local_rank("pp"), are_alike=layout == "pp_alike")
    if layout == "pp_fsdp":
        fully_shard(model, mesh=mesh["data"])
    return model, mesh["data"], mesh["pp"]


def build_experts(layout: str) -> tuple[nn.Module, DeviceMesh]:
    """All else is sharded over all ranks."""
    torch.manual_seed(5)
    ranks = init_device_mesh("cpu", (dist.get_world_size(),))
    if layout == "ep_fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
        experts = Experts(mesh["expert"], layout)
        fully_shard(experts, mesh=mesh["data"])
    else:
        experts = Experts(ranks, layout)
    model = Net()
    model.blocks[1] = experts
    fully_shard(model, mesh=ranks, ignored_params={experts.weights})
    return model, ranks


def build(layout: str) -> tuple[nn.Module, DeviceMesh | None]:
    if layout.startswith("ep"):
        return build_experts(layout)
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


def place(data: DeviceMesh | None) -> tuple[int, int]:
    """Which part of a batch this rank reads, and of how many."""
    if data is None:
        return 0, 1
    number = data.get_local_rank() if data.ndim == 1 else data.get_local_rank(0) * data.size(1)
    return number + (data.get_local_rank(1) if data.ndim == 2 else 0), data.size()


def batches(data: DeviceMesh | None, bad: Sequence[int], num: int = NUM) -> list[torch.Tensor]:
    """The same for the ranks that compute one sample together."""
    number, count = place(data)
    made = []
    for at in range(num):
        batch = torch.randn(12, LENGTH, DIM, generator=torch.Generator().manual_seed(at))
        if at in bad:
            batch[1, 0, 0] = float("nan")
        made.append(batch.chunk(count)[number])
    return made


class Trained:
    """A model in a layout, and how it computes one batch's gradients."""

    def __init__(self, layout: str) -> None:
        self.line: DeviceMesh | None = None
        self.model: Any
        if layout.startswith("pp"):
            self.model, self.data, self.line = build_stage(layout)
            self._pipeline = Pipeline(self.model, self.line, 12 // self.data.size())
        else:
            self.model, self.data = build(layout)
        # Ranks that compute a sample together drop the same out; others do not.
        torch.manual_seed(50 + place(self.data)[0])

    def backward(
        self, batch: torch.Tensor, scaler: torch.amp.GradScaler | None = None, share: float = 1.0
    ) -> Any:
        """The loss, where this rank has it; its gradients are multiplied by ``share``."""
        if self.line is not None:
            return self._pipeline.step(batch)
        loss: torch.Tensor = self.model(batch).square().mean()
        (loss * share if scaler is None else scaler.scale(loss)).backward()
        return loss

    @torch.no_grad()
    def evaluate(self, batch: torch.Tensor) -> None:
        self.model.eval()
        if self.line is None:
            self.model(batch)
        self.model.train()


def train(out: Path, layout: str, name: str, skip: list[Any]) -> Guard:
    net = Trained(layout)
    optimizer = torch.optim.AdamW(net.model.parameters(), lr=1e-2, foreach=False)
    given: dict[str, Any] = {"model": net.model, "optimizer": optimizer, "pipeline": net.line}
    guard = Guard(out, **given, skip=skip, **RULES)
    if name == "look":
        guard._carried.restore_randomness()  # as for the first batch
        return guard
    read = batches(net.data, BAD if name == "poison" else ())
    for count, batch in enumerate(guard.over(read)):
        is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
        is_due = os.environ.get("KILL_AT") == str(count) and name == "poison"
        if is_due and is_last and not guard.resumed_step:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = net.backward(batch)
        if name == f"nan{dist.get_rank() if dist.is_initialized() else 0}" and count == NAN_AT:
            grads = [p.grad for p in net.model.parameters() if p.grad is not None]
            parts = [getattr(grad, "_local_tensor", grad) for grad in grads]
            next(part for part in parts if part.numel()).view(-1)[0] = float("nan")
        if guard.ok(loss):
            optimizer.step()
        optimizer.zero_grad()
    return guard


def train_with_all(out: Path, layout: str, *, is_told: bool, skip: list[Any]) -> Guard:
    """The last rank is asked to stop in the first start's evaluation, and dies in the second.

    But for pipelines a scaler scales the loss, and one step overflows: the last rank alone sees it,
    of the run that is told rank 0, in its part of a gradient.
    """
    net = Trained(layout)
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in net.model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizers = [torch.optim.AdamW(own, lr=1e-2, fused=True) for own in by_mesh.values()]
    named: dict[str, Any] = {"model": net.model, "optimizer": optimizers, "pipeline": net.line}
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=net.line is None)
    guard = Guard(out, **named, scheduler=scaler, accumulate=2, skip=skip, sync=is_told, **RULES)
    number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    is_ours = is_last and not is_told
    given = batches(net.data, () if is_told else THREE_STEPS, 56)
    for count, batch in enumerate(guard.over(given)):
        if is_ours and (number, count) == ("1", 17):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = net.backward(batch, scaler)
        guard.log(read=(0, 0) if loss is None else (float(batch.square().sum()), len(batch)))
        if count % 2 == 0:
            guard.note(loss)
            continue
        if batch is given[OVERFLOW_AT]:
            overflow(net, rank=0 if is_told else -1)
        update(guard, loss, scaler, optimizers)
        if count % 8 == 7:
            if is_ours and (number, count) == ("0", 15):
                os.kill(os.getpid(), signal.SIGTERM)
            guard.check_stop()
            net.evaluate(given[0])
    return guard


def shuffled(net: Trained, epoch: int, *, poison: bool) -> DataLoader[torch.Tensor]:
    """Of a pass; the ranks that compute a sample together read the same."""
    generator = torch.Generator().manual_seed(9)
    samples = [torch.randn(LENGTH, DIM, generator=generator) for _ in range(96)]
    samples[50] *= float("nan") if poison else 1.0
    number, count = place(net.data)
    sampler = DistributedSampler(samples, count, number, seed=3)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return DataLoader(samples, 12 // count, sampler=sampler)  # type: ignore[arg-type]


def train_epochs(out: Path, layout: str) -> Guard:
    """Three passes. The last rank runs out of memory, is asked to stop in an evaluation, is killed:
    in one start each."""
    net = Trained(layout)
    optimizer = torch.optim.AdamW(net.model.parameters(), lr=1e-2, foreach=False)
    rules = {**RULES, "every": 3, "clean_after": 2, "clip": None, "on_oom": "halve"}
    guard = Guard(out, model=net.model, optimizer=optimizer, **rules)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for epoch in range(3):
        for batch in guard.over(shuffled(net, epoch, poison=True)):
            number = guard._steps.in_hand[0]
            if is_last and (start, number) == (2, 18):
                os.kill(os.getpid(), signal.SIGKILL)
            total = torch.zeros(())
            for part, share in guard.parts(batch):
                if is_last and number >= FULL_AT and len(part) == len(batch):
                    raise torch.OutOfMemoryError("CUDA out of memory. (On purpose.)")
                total += share * net.backward(part, share=share)
                guard.log(rows=(float(len(part)), 1))
            if guard.ok(total):
                optimizer.step()
            optimizer.zero_grad()
            if number % 4 == 2:
                if is_last and (start, number) == (1, 14):
                    os.kill(os.getpid(), signal.SIGTERM)
                guard.check_stop()
                net.evaluate(torch.zeros(2, LENGTH, DIM))
    return guard


def bare(layout: str, skipped: list[Any]) -> str:
    """The loop without a guard that leaves out what that run skipped; its end's digest."""
    net = Trained(layout)
    optimizer = torch.optim.AdamW(net.model.parameters(), lr=1e-2, foreach=False)
    cpu = torch.device("cpu")
    state = LoopState([net.model], [optimizer], Ranks(cpu), cpu)
    read = [batch for epoch in range(3) for batch in shuffled(net, epoch, poison=False)]
    for number, batch in enumerate(read):
        if any(start <= number < stop for start, stop in skipped):
            continue
        cut = len(batch) // 2 if number >= FULL_AT else 0
        for part in (batch[:cut], batch[cut:]):
            if len(part):
                net.backward(part, share=len(part) / len(batch))
        optimizer.step()
        optimizer.zero_grad()
    return state_digest(state.tensors(), {})


def overflow(net: Trained, rank: int) -> None:
    """Of a gradient that is cut one rank's part, where a scaler scales."""
    grads: list[Any] = [parameter.grad for parameter in net.model.parameters()]
    cut = [
        grad
        for grad in grads
        if isinstance(grad, DTensor) and any(p.is_shard() for p in grad.placements)
    ]
    if net.line is None and dist.get_rank() == range(dist.get_world_size())[rank]:
        next(part for grad in cut if (part := grad.to_local()).numel()).view(-1)[0] = float("inf")


def update(
    guard: Guard,
    loss: torch.Tensor | None,
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if guard.ok(loss):
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


def with_ring(out: Path, layout: str) -> dict[str, Any]:
    """Some steps and a checkpoint, or the state that is there."""
    net = Trained(layout)
    optimizer = torch.optim.AdamW(net.model.parameters(), lr=1e-2, foreach=False)
    state = {"model": net.model, "optimizer": optimizer}
    with Ring(out, state, pipeline=net.line) as ring:
        is_new = ring.step == 0
        for batch in batches(net.data, ())[:4] if is_new else []:
            net.backward(batch)
            optimizer.step()
            optimizer.zero_grad()
        if is_new:
            ring.save(4)
        held = str([getattr(p, "_local_tensor", p).tolist() for p in net.model.parameters()])
        by_rank = [xxhash.xxh3_64_hexdigest(held.encode())]
        if dist.is_initialized():
            dist.all_gather_object(by_rank := by_rank * dist.get_world_size(), by_rank[0])
        return {"digest": ring.digest(), "step": ring.step, "held": by_rank}


def main() -> None:
    out, layout, *todo = sys.argv[1:]

    def run(name: str, skipped: list[Any]) -> dict[str, Any]:
        if name == "bare":
            return {"digest": bare(layout, skipped)}
        if name == "ring":
            return with_ring(Path(out) / name, layout)
        folder, is_told = Path(out) / ("poison" if name == "look" else name), "told" in name
        told = skipped if is_told else []
        if name == "epochs":
            guard = train_epochs(folder, layout)
        elif name.startswith("all"):
            guard = train_with_all(folder, layout, is_told=is_told, skip=told)
        else:
            guard = train(folder, layout, name, told)
        end = {"digest": guard.state_digest(), "skipped": guard.skipped}
        guard.close()
        own = xxhash.xxh3_64_hexdigest(torch.get_rng_state().numpy().tobytes())
        draws = [own] * (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_gather_object(draws, own)
        return end | {"resumed": guard.resumed_step, "draws": draws}

    with ranked() as rank:
        ends = in_turn(todo, run)
        if rank == 0:
            (Path(out) / f"{layout}.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main()
