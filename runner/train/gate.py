"""The gate: whether the device withholds this step's update.

Decided on the device, from the sums that all ranks agreed on: the host is not asked, and nothing
waits. How an optimizer obeys it stands in :mod:`runner.engine.optimizer`.
"""

from __future__ import annotations

import sys

import torch

from runner.policy.decision.signals import Bounds, Limits
from runner.train.packed import CLOSED, LOSS_PER_TOKEN, NONFINITE, STOP, UNREADABLE

_LARGEST = sys.float_info.max


def is_closed(
    packed: torch.Tensor,
    loss: torch.Tensor,
    norm: torch.Tensor,
    bounds: Bounds,
    *,
    is_guarded: bool,
    before: torch.Tensor | None,
) -> torch.Tensor:
    """True where the update must not be applied; a bool scalar on the device.

    The limits are arguments of the comparisons' kernels: nothing is copied for them.

    Args:
        packed: FP64, the sums of :mod:`runner.train.packed`.
        loss, norm: FP64 scalars on the device: loss per token, gradient norm before clipping.
        is_guarded: False lets every step pass whose samples could be read.
        before: the numbers of the step before where the host has not read them. The gate stays
            closed when that step was not applied, or says that a rank is asked to stop.
    """
    closed = packed[UNREADABLE] > 0
    if before is not None:
        closed = closed | (before[CLOSED] > 0) | (before[STOP] > 0)
    if not is_guarded:
        return closed
    bounded = is_within(bounds.usual, loss, norm)
    if before is not None:
        was_low = before[LOSS_PER_TOKEN] <= bounds.high
        bounded = torch.where(was_low, bounded, is_within(bounds.again, loss, norm))
    return ~(bounded & (packed[NONFINITE] == 0)) | closed


def is_within(limits: Limits, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Finite, and at or below both: NaN and Inf are not below the largest number."""
    low_enough = (loss <= min(limits.loss, _LARGEST)) & (norm <= min(limits.grad_norm, _LARGEST))
    return low_enough & (loss >= -_LARGEST)  # a norm is not negative
