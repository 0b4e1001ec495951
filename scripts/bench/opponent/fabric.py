"""Lightning Fabric: its own loop, DistributedDataParallel, bf16-mixed or FP32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric

from scripts.bench.task import Task, build_loader, build_model, build_optimizer, build_schedule


def train(task: Task, device: torch.device, after_step: Callable[..., bool]) -> None:
    """See the package's docstring."""
    fabric = Fabric(
        accelerator=device.type,
        devices=dist.get_world_size(),
        strategy="ddp",
        precision="bf16-mixed" if task.is_bf16 else "32-true",
    )
    fabric.launch()
    plain = build_model(task, device)
    model, optimizer = fabric.setup(plain, build_optimizer(task, plain))
    schedule = build_schedule(task, optimizer)
    loader = build_loader(
        task, rank=fabric.global_rank, world_size=fabric.world_size, pin=device.type == "cuda"
    )
    batches = iter(fabric.setup_dataloaders(loader, use_distributed_sampler=False))
    num_micro = task.num_micro_batches(fabric.world_size)
    while True:
        total = torch.zeros((), device=device)
        for number in range(1, num_micro + 1):
            tokens = next(batches)
            with fabric.no_backward_sync(model, enabled=number < num_micro):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                fabric.backward(loss / num_micro)
            total += loss.detach() / num_micro
        fabric.clip_gradients(model, optimizer, max_norm=task.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if after_step(total):
            return
