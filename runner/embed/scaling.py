"""Loss scalers (``torch.amp.GradScaler``) that the guard was given beside the schedulers.

An overflow is the scaler's own: it skips the optimizer's step and lowers its scale, as in a loop
without a guard. The guard lets such a step through and counts no update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from runner.policy.decision.signals import StepSignals

# A scale below this has been lowered by many overflows in a row: the gradients are not finite.
_LOWEST_SCALE = 1.0


class Scalers:
    """The enabled loss scalers among a guard's schedulers."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._scalers = [
            one for one in schedulers if isinstance(one, torch.amp.GradScaler) and one.is_enabled()
        ]

    def is_overflow(self, signals: StepSignals) -> bool:
        """Whether a scaler is to skip the step: gradients are Inf, the loss is finite."""
        return (
            bool(self._scalers)
            and math.isfinite(signals.loss)
            and math.isinf(signals.grad_norm)  # NaN comes from data
            and all(one.get_scale() >= _LOWEST_SCALE for one in self._scalers)
        )

    def forget_step(self) -> None:
        """Forget which gradients were unscaled, so that the next step can unscale its own."""
        for one in self._scalers:
            with contextlib.suppress(AssertionError):  # nothing was scaled yet
                one.update(one.get_scale())
