"""The guard in a script that uses Accelerate.

>>> from runner.integrations.accelerate import guard_prepared  # doctest: +SKIP
>>> guard = guard_prepared(accelerator, "runs/a", model=model, optimizer=opt)  # doctest: +SKIP
>>> for batch in guard.over(loader):  # doctest: +SKIP
...     with accelerator.accumulate(model):
...         loss = loss_fn(model(batch), batch)
...         accelerator.backward(loss)
...         if accelerator.sync_gradients and guard.ok(loss):
...             opt.step(); sched.step()
...         if accelerator.sync_gradients:
...             opt.zero_grad()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from runner.embed.loop.guard import Guard
from runner.system.error import ConfigError

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


def guard_prepared(
    accelerator: Accelerator,
    out: str | Path,
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    **settings: Any,
) -> Guard:
    """A guard for objects that ``accelerator.prepare`` returned.

    Args:
        settings: those of :class:`runner.Guard`; ``accumulate`` comes from the Accelerator.

    Raises:
        ConfigError: DeepSpeed or another engine that steps by itself, or FP16 loss scaling.
    """
    kind = accelerator.distributed_type.name
    if kind not in _SUPPORTED:
        raise ConfigError(
            f"guard_prepared: the Accelerator runs {kind}, whose engine applies the update itself; "
            f"supported: {', '.join(_SUPPORTED)}"
        )
    if accelerator.scaler is not None:
        raise ConfigError(
            f"guard_prepared: mixed_precision={accelerator.mixed_precision}: its loss scaling "
            "overflows on purpose; use bf16"
        )
    return Guard(
        out,
        model=model,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        scheduler=scheduler,
        accumulate=accelerator.gradient_accumulation_steps,
        **settings,
    )
