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


def require_gated(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """
    Raises:
        ConfigError: an optimizer does not read ``found_inf``.
    """
    for optimizer in optimizers:
        # Private in torch, by which GradScaler asks; tests/mechanism/test_guard_late.py pins it.
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ConfigError(
                f"Guard: sync=False needs optimizers that the device can gate (found_inf): "
                f"torch's fused ones (fused=True: Adam, AdamW, SGD, Adagrad), and this is "
                f"{type(optimizer).__name__}; leave sync out"
            )


class DeviceGate:
    """Withholds updates while :attr:`closed` is a tensor that is 1, by hooks of the optimizers.

    A ``found_inf`` that is set already, by a loss scaler, withholds them as well.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.closed: torch.Tensor | None = None
        self._theirs: dict[int, torch.Tensor | None] = {}
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.closed is not None:
            theirs = self._theirs[id(optimizer)] = getattr(optimizer, _FOUND, None)
            both = self.closed if theirs is None else torch.maximum(self.closed, theirs)
            setattr(optimizer, _FOUND, both)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.closed is None:
            return
        theirs = self._theirs.pop(id(optimizer))
        if theirs is None:
            delattr(optimizer, _FOUND)
        else:
            setattr(optimizer, _FOUND, theirs)  # the scaler deletes it


class HostSide:
    """What a loop changes on the host with each update: schedulers, and the optimizers' options.

    Captured before an update that the device may withhold; restored if it has.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[Scheduler]
    ) -> None:
        self._optimizers, self._schedulers = optimizers, schedulers
        self._states = [_state_of(scheduler) for scheduler in schedulers]
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


def _state_of(scheduler: Scheduler) -> dict[str, Any]:
    """A copy of its state, which a scaler's own ``state_dict`` would wait for the device for."""
    scale = getattr(scheduler, "_scale", None)  # of a scaler that is enabled
    if not isinstance(scheduler, torch.amp.GradScaler) or scale is None:
        return copy.deepcopy(scheduler.state_dict())
    return {
        "scale": scale.clone(),
        "growth_factor": scheduler.get_growth_factor(),
        "backoff_factor": scheduler.get_backoff_factor(),
        "growth_interval": scheduler.get_growth_interval(),
        "_growth_tracker": _copy(scheduler._growth_tracker),
    }


class Scalers:
    """The enabled loss scalers (``torch.amp.GradScaler``) among a guard's schedulers.

    An overflow is the scaler's own: it skips the optimizer's step and lowers its scale, as in a
    loop without a guard. The guard lets such a step through and counts no update. A gradient that
    stays non-finite at any scale is no overflow.
    """

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self._scalers = [
            scaler
            for scaler in schedulers
            if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
        ]

    def agree(self, grad_norm: torch.Tensor) -> None:
        """Let all optimizers on all ranks skip a step that one is to skip. Waits for nothing.

        torch 2.13 shares what a rank finds in its parts of DTensors only along those dimensions of
        a mesh that cut the first gradient: other ranks would update, and the scales part.

        Args:
            grad_norm: of all gradients, the same on all ranks.
        """
        for scaler in self._scalers:
            for state in scaler._per_optimizer_states.values():
                for found in state["found_inf_per_device"].values():
                    found.copy_(torch.maximum(found, (~grad_norm.isfinite()).to(found)))

    def scales(self) -> list[torch.Tensor | float]:
        """The scale of each, as it is now; waits for nothing."""
        return [
            scaler.get_scale() if scaler._scale is None else scaler._scale.clone()
            for scaler in self._scalers
        ]

    def is_overflow(self, signals: StepSignals, scales: Sequence[torch.Tensor | float]) -> bool:
        """Whether a scaler skips the step: gradients are Inf or NaN, the loss is finite.

        Args:
            scales: those with which the step was computed. Waits for the device.
        """
        return (
            bool(self._scalers)
            and math.isfinite(signals.loss)
            and not math.isfinite(signals.grad_norm)  # a norm's backward makes NaN of Inf
            and all(float(scale) >= _LOWEST_SCALE for scale in scales)
        )

    def forget_step(self) -> None:
        """Forget which gradients were unscaled, so that the next step can unscale its own."""
        for scaler in self._scalers:
            with contextlib.suppress(AssertionError):  # nothing was scaled yet
                scaler.update(scaler.get_scale())
