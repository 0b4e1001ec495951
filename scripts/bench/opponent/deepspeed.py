"""A bare DeepSpeed loop, as its own tutorial has it: initialize, forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from runner.engine.zero import ZeroPlan, build_module, deepspeed_settings
from runner.model.decoder import Decoder
from scripts.bench.task import Task, build_loader


def train(task: Task, device: torch.device, after_step: Callable[..., bool], *, stage: int) -> None:
    """See the package's docstring. Its weights are its own: only its speed is compared."""
    import deepspeed

    num_micro = task.num_micro_batches(dist.get_world_size())
    plan = ZeroPlan(stage=stage, num_micro_batches=num_micro, extra={})
    module: Any = build_module(lambda: Decoder(task.shape), plan, device)
    module.reset_buffers(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=task.lr, fused=True)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        config=deepspeed_settings(plan) | {"gradient_clipping": task.clip},
        dist_init_required=False,
    )
    batches = iter(build_loader(task, rank=dist.get_rank(), world_size=dist.get_world_size()))
    while True:
        for _ in range(num_micro):
            tokens = next(batches).to(device)
            logits = engine(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
        if after_step():
            return
