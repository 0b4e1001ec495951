"""Keeps random generators unchanged by computation outside the training steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


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
