"""Fused AdamW with a gate and a divisor, as every engine uses it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def make_state(optimizer: torch.optim.Optimizer, tensors: Iterable[torch.Tensor]) -> None:
    """Create the moments before the first step: a checkpoint at step 0 and a load need them."""
    for tensor in tensors:
        optimizer.state[tensor] = {
            "step": torch.zeros((), dtype=torch.float32, device=tensor.device),
            "exp_avg": torch.zeros_like(tensor),
            "exp_avg_sq": torch.zeros_like(tensor),
        }


def set_gate(
    optimizer: torch.optim.Optimizer, *, skip: torch.Tensor, grad_scale: torch.Tensor
) -> None:
    """Have the next step divide gradients by ``grad_scale``, or change nothing if ``skip`` is 1.

    These are the hooks of torch.amp.GradScaler, which only the fused kernels honour: parameters,
    moments and step counts stay bit-identical. Multiplying by zero would not do: 0 * NaN is NaN.
    """
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
