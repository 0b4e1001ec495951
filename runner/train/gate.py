"""The gate: whether the device withholds this step's update.

The device decides, from the sums that all ranks agreed on, so that nothing waits for the host.
:mod:`runner.engine.optimizer` has how an optimizer obeys it.
"""

from __future__ import annotations

import sys

import torch

from runner.policy.decision.signals import Bounds, Limits
from runner.train.agreed_step import CLOSED, LOSS_PER_TOKEN, NONFINITE, STOP, UNREADABLE

_LARGEST = sys.float_info.max


def is_closed(
    packed: torch.Tensor,
    loss: torch.Tensor,
    norm: torch.Tensor,
    bounds: Bounds | None,
    *,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """True where the update must not be applied; a bool scalar on the device.

    The limits are kernel arguments, so that nothing is copied.

    Args:
        packed: FP64, the sums of :mod:`runner.train.agreed_step`.
        loss, norm: FP64 scalars on the device: loss per token, gradient norm before clipping.
        bounds: None applies every step whose samples could be read.
        before: the previous step's numbers, if the host has not read them. The gate stays closed if
            that step was not applied, or carries a stop request.
    """
    closed = packed[UNREADABLE] > 0
    if before is not None:
        closed = closed | (before[CLOSED] > 0) | (before[STOP] > 0)
    if bounds is None:
        return closed
    bounded = is_within(bounds.usual, loss, norm)
    if before is not None:
        was_low = before[LOSS_PER_TOKEN] <= bounds.high
        bounded = torch.where(was_low, bounded, is_within(bounds.after_high, loss, norm))
    return ~(bounded & (packed[NONFINITE] == 0)) | closed


def is_within(limits: Limits, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Whether both are finite and within the limits: NaN and Inf exceed the largest number."""
    low_enough = (loss <= min(limits.loss, _LARGEST)) & (norm <= min(limits.grad_norm, _LARGEST))
    return low_enough & (loss >= -_LARGEST)  # a norm is not negative
