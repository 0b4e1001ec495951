"""A step's numbers, agreed by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.train.host_numbers import HostNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedStep:
    """A step that the gate has decided on, and the host not yet.

    Attributes:
        step: number of the update that it makes.
        batches: half-open range of the batches it was computed from.
        numbers: FP64; the sums over ranks, this rank's own loss, then the mean loss, the gradient
            norm and the gate as the device computed them.
        grad_norm: FP64 scalar on the device.
        closed: FP32 scalar on the device; 1: the update must not be applied.
        identity: what must be alike on all ranks.
        jobs: the ring's jobs whose progress is in ``numbers``.
        began: of the step, by the monotonic clock.
    """

    step: int
    batches: tuple[int, int]
    numbers: HostNumbers
    grad_norm: torch.Tensor
    closed: torch.Tensor
    identity: Mapping[str, Any]
    jobs: Sequence[int]
    began: float


def on_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """FP64 on ``device``, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    # Only a copy from pinned memory does not wait.
    pinned = torch.tensor(numbers, dtype=torch.float64, pin_memory=True)
    return pinned.to(device, non_blocking=True)
