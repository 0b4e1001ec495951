"""The squared gradient norm, computed the same way by every engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Elements that one FP32 sum of squares on a CPU takes in. Tried: off by 5e-7 where they differ,
# by 2.3e-5 where all are equal and every addition rounds the same way.
_PIECE = 1 << 15


def squared_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of all squares, FP64 scalar on ``device``; does not wait for the device.

    A tree: FP32 within a piece, FP64 above. One long FP32 sum on a CPU loses small terms (0.5 % of
    the norm at 2^26 elements); FP64 throughout takes four times as long there.

    Args:
        gradients: FP32, any shapes, on one device, which need not be ``device``.
    """
    pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(pieces, 2))
    return norms.to(device).double().square().sum()


def _pieces(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # CUDA's own kernel adds up in a tree.
    if gradient.is_cuda or gradient.numel() <= _PIECE:
        return (gradient,)
    return torch.split(gradient.reshape(-1), _PIECE)
