"""What the runner is held against: each file is one loop, as a competent person writes it.

Each has ``train(task, device, after_step)``: it trains until ``after_step(loss)`` is true. The
process group exists already. Only ``bare`` is also a program of its own. DeepSpeed is
imported when it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from scripts.bench.task import Task

# Module, and what its train() is told.
_KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bare-fsdp": ("bare", {"kind": "fsdp"}),
    "bare-ddp": ("bare", {"kind": "ddp"}),
    "zero1": ("deepspeed", {"stage": 1}),
    "zero2": ("deepspeed", {"stage": 2}),
    "zero3": ("deepspeed", {"stage": 3}),
}
NAMES = tuple(_KNOWN)


def train(name: str, task: Task, device: torch.device, after_step: Callable[..., bool]) -> None:
    """Train as ``name`` does until ``after_step(mean loss on this rank)`` is true."""
    module, arguments = _KNOWN[name]
    importlib.import_module(f"{__name__}.{module}").train(task, device, after_step, **arguments)
