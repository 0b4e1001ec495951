"""Evaluates a network, and leaves each of its modules in the mode in which it was.

Owns the only calls of ``eval()`` in this package: a module may be kept in evaluation mode by its
owner (a frozen encoder), and ``train()`` on the whole network would begin to train it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Every module is in evaluation mode inside, and in its own mode afterwards.

    FSDP2 keeps the root's parameters gathered after a forward pass without a backward pass; they
    are dropped at the end, because weights that are loaded later would not reach them.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        reshard(network)


def in_evaluation(copy: nn.Module) -> nn.Module:
    """Put a copy, which nobody trains, into evaluation mode for good."""
    return copy.eval()


def reshard(network: nn.Module) -> None:
    """Drop the gathered parameters of FSDP2, so that ``parameters()`` gives the shards.

    Not collective.
    """
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and the device afterwards."""
    python_state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
