"""A bare DeepSpeed loop, as its own tutorial has it: initialize, forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from runner.engine.zero import ZeroPlan, deepspeed_settings
from scripts.bench.task import Task, build_loader, build_model, build_optimizer, build_schedule


def train(task: Task, device: torch.device, after_step: Callable[..., bool], *, stage: int) -> None:
    """See the package's docstring. DeepSpeed clips and steps the schedule by itself."""
    # Not before: on the runner's side of the pair it is set up, its op for CPUs left uncompiled.
    import deepspeed

    num_micro = task.num_micro_batches(dist.get_world_size())
    plan = ZeroPlan(stage=stage, num_micro_batches=num_micro, extra={})
    model = build_model(task, device)
    begun = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(task, model)
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=build_schedule(task, optimizer),
        config=deepspeed_settings(plan) | {"gradient_clipping": task.clip},
        dist_init_required=False,
    )
    # It makes its FP32 weights from the BF16 ones: other losses from the second step on.
    for name, parameter in engine.module.named_parameters():
        deepspeed.utils.safe_set_full_fp32_param(parameter, begun[name])
    batches = iter(
        build_loader(
            task,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pin=device.type == "cuda",
        )
    )
    while True:
        total = torch.zeros((), device=device)
        for _ in range(num_micro):
            tokens = next(batches).to(device, non_blocking=True)
            logits = engine(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            total += loss.detach() / num_micro
        if after_step(total):
            return
