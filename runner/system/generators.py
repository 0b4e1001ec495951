"""Keeps the generators that draw random numbers for a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_generators(*devices: torch.device) -> Iterator[None]:
    """Restore Python's, NumPy's and torch's generators afterwards, and those of CUDA devices."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
