"""Random generators around what is computed besides the training steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def same_randomness(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, numpy, torch and the device afterwards."""
    ours, theirs, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
