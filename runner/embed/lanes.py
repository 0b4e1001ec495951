"""Tensors of any type as FP32 lanes, which is what the ring holds, and back, bit for bit.

Floating point of 32 bits or fewer that FP32 can hold is converted, so that a checkpoint's proof
sees its NaN and Inf; everything else goes 16 bits a lane, as whole numbers that FP32 has exactly.
"""

from __future__ import annotations

import torch

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def lanes_of(dtype: torch.dtype) -> int:
    """Lanes that one element takes."""
    return 1 if dtype in _CONVERTED else max(1, dtype.itemsize // 2)


def encode(values: torch.Tensor) -> torch.Tensor:
    """FP32 1-D, ``numel * lanes_of(dtype)``; a view where the type is FP32 already."""
    flat = values.detach().contiguous().reshape(-1)
    if flat.dtype in _CONVERTED:
        return flat.float()
    if flat.dtype.itemsize == 1:
        return flat.view(torch.uint8).float()
    return (flat.view(torch.int16).to(torch.int32) & 0xFFFF).float()


def decode(lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1-D of ``dtype``: the inverse of :func:`encode`."""
    if dtype in _CONVERTED:
        return lanes.to(dtype)
    if dtype.itemsize == 1:
        return lanes.to(torch.uint8).view(dtype)
    return lanes.to(torch.int32).to(torch.int16).view(dtype)
