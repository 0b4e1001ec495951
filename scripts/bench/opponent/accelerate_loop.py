"""Hugging Face Accelerate: its documented loop, with DDP or FSDP2, in BF16 or FP32.

On a CPU Accelerate leaves its FSDP plugin aside and trains with DistributedDataParallel, without a
word: there its own FSDP2 way is taken by telling its state so, and what came out is looked at.

With FSDP2 it reduces gradients in BF16 unless told otherwise, which halves what is sent and rounds
each sum. The other loops reduce in FP32, so it is told to as well; ``reduce_dtype`` says which.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from scripts.bench.fair import dtype_of
from scripts.bench.process import MeasureError
from scripts.bench.task import Task, build_loader, build_model, build_optimizer, build_schedule


def train(
    task: Task,
    device: torch.device,
    after_step: Callable[..., bool],
    *,
    fsdp: bool = False,
    reduce_dtype: torch.dtype = torch.float32,
) -> None:
    """See the package's docstring.

    Raises:
        MeasureError: Accelerate wraps the model in another way than it was told to.
    """
    plugin = None
    if fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            reshard_after_forward=True,
            mixed_precision_policy=MixedPrecisionPolicy(
                param_dtype=dtype_of(task.precision),
                reduce_dtype=reduce_dtype if task.is_bf16 else torch.float32,
            ),
        )
    accelerator = Accelerator(
        mixed_precision="bf16" if task.is_bf16 else "no",
        cpu=device.type == "cpu",
        fsdp_plugin=plugin,
    )
    if plugin is not None and not accelerator.is_fsdp2:
        # What AcceleratorState does for every kind of device but a CPU (accelerate 1.15).
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    num_micro = task.num_micro_batches(accelerator.num_processes)
    accelerator.gradient_accumulation_steps = num_micro
    plain = build_model(task, device)
    model, optimizer = accelerator.prepare(plain, build_optimizer(task, plain))
    if fsdp != isinstance(model, FSDPModule):
        raise MeasureError(f"Accelerate made a {type(model).__name__} where fsdp={fsdp} was asked")
    schedule = build_schedule(task, optimizer)
    batches = iter(
        build_loader(
            task,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            pin=device.type == "cuda",
        )
    )
    total = torch.zeros((), device=device)
    while True:
        with accelerator.accumulate(model):
            tokens = next(batches).to(device, non_blocking=True)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach() / num_micro
        if accelerator.sync_gradients:
            schedule.step()
            if after_step(total.clone()):
                return
            total.zero_()
