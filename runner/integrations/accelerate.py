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

import torch

from runner.embed.loop.guard import Guard
from runner.integrations.batches import carried, unscale
from runner.system.error import ConfigError, lacking

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(lacking("runner.integrations.accelerate", "accelerate")) from error

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
        ConfigError: DeepSpeed or another engine that steps by itself.
    """
    kind = accelerator.distributed_type.name
    if kind not in _SUPPORTED:
        raise ConfigError(
            f"guard_prepared: the Accelerator runs {kind}, whose engine applies the update itself; "
            f"supported: {', '.join(_SUPPORTED)}"
        )
    guard = _PreparedGuard(
        out,
        model=model,
        optimizer=getattr(optimizer, "optimizer", optimizer),
        scheduler=carried(scheduler, accelerator.scaler),
        accumulate=accelerator.gradient_accumulation_steps,
        **settings,
    )
    guard.scaled = None if accelerator.scaler is None else (accelerator.scaler, optimizer)
    return guard


class _PreparedGuard(Guard):
    """A guard whose :meth:`ok` judges gradients without the loss scale of FP16."""

    scaled: tuple[torch.amp.GradScaler, Any] | None = None

    def ok(self, loss: torch.Tensor | float | None, *, tokens: int = 0) -> bool:
        if self.scaled is not None:
            unscale(*self.scaled)
        return super().ok(loss, tokens=tokens)
