"""Gates optimizers by a number on the device, so that the host need not wait for it.

torch's fused optimizers read ``found_inf``, the hook of ``torch.amp.GradScaler``: where it is 1
they leave parameters, moments and step counts as they are, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from runner.embed.loop.rollback_state import Scheduler
from runner.policy.decision.signals import StepSignals
from runner.system.error import ConfigError

_FOUND = "found_inf"
# A scale below this has been lowered by many overflows in a row: the gradients are not finite.
_LOWEST_SCALE = 1.0


def require_gated(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Scheduler]
) -> None:
    """
    Raises:
        ConfigError: an optimizer does not read ``found_inf``, or a loss scaler is in the loop.
    """
    for optimizer in optimizers:
        # Private in torch, by which GradScaler asks; tests/mechanism/test_guard_late.py pins it.
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigError(
                f"Guard: sync=False needs optimizers that the device can gate (found_inf): "
                f"torch's fused ones (fused=True: Adam, AdamW, SGD, Adagrad), and this is "
                f"{type(optimizer).__name__}; leave sync out"
            )
    if any(isinstance(scheduler, torch.amp.GradScaler) for scheduler in schedulers):
        raise ConfigError(
            "Guard: sync=False and a GradScaler: both gate the optimizer by found_inf, and "
            "the scaler waits for the device; leave sync out, or use BF16 or FP32 without it"
        )


class DeviceGate:
    """Withholds updates while :attr:`closed` is a tensor that is 1, by hooks of the optimizers.

    A ``found_inf`` that is set already is kept.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.closed: torch.Tensor | None = None
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.closed is not None:
            theirs = getattr(optimizer, _FOUND, None)
            both = self.closed if theirs is None else torch.maximum(self.closed, theirs)
            setattr(optimizer, _FOUND, both)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.closed is not None and hasattr(optimizer, _FOUND):
            delattr(optimizer, _FOUND)


class HostSide:
    """What a loop changes on the host with each update: schedulers, and the optimizers' options.

    Captured before an update that the device may withhold; restored if it has.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Scheduler]
    ) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._states = [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        self._options = [
            [
                {key: _copy(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in optimizers
        ]

    def restore(self) -> None:
        """As it was when this was made."""
        for scheduler, state in zip(self._schedulers, self._states, strict=True):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for key, value in options.items():
                    live = group.get(key)
                    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                        live.copy_(value)  # the scheduler holds this very tensor
                    else:
                        group[key] = value


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class Scalers:
    """The enabled loss scalers (``torch.amp.GradScaler``) among a guard's schedulers.

    An overflow is the scaler's own: it skips the optimizer's step and lowers its scale, as in a
    loop without a guard. The guard lets such a step through and counts no update.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._scalers = [
            scaler
            for scaler in schedulers
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
        ]

    def is_overflow(self, signals: StepSignals) -> bool:
        """Whether a scaler will skip the step: gradients are Inf, the loss is finite."""
        return (
            bool(self._scalers)
            and math.isfinite(signals.loss)
            and math.isinf(signals.grad_norm)  # NaN comes from data
            and all(scaler.get_scale() >= _LOWEST_SCALE for scaler in self._scalers)
        )

    def forget_step(self) -> None:
        """Forget which gradients were unscaled, so that the next step can unscale its own."""
        for scaler in self._scalers:
            with contextlib.suppress(AssertionError):  # nothing was scaled yet
                scaler.update(scaler.get_scale())
