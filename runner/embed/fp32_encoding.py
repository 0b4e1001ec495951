"""Encodes tensors of any dtype as FP32 values ("lanes"), which the ring stores, bit for bit.

FP32, BF16 and FP16 are converted, so that a checkpoint's proof sees their NaN and Inf. Other types
are stored as integers of up to 16 bits per lane, which FP32 represents exactly.
"""

from __future__ import annotations

import torch

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def lanes_per_element(dtype: torch.dtype) -> int:
    """FP32 lanes that one element of the dtype takes."""
    return 1 if dtype in _CONVERTED else max(1, dtype.itemsize // 2)


def encode(values: torch.Tensor) -> torch.Tensor:
    """FP32 [numel * lanes_per_element(dtype)]; a view if the tensor is FP32 and contiguous."""
    flat = values.detach().contiguous().reshape(-1)
    if flat.dtype in _CONVERTED:
        return flat.float()
    if flat.dtype.itemsize == 1:
        return flat.view(torch.uint8).float()
    return (flat.view(torch.int16).to(torch.int32) & 0xFFFF).float()


def decode(lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`encode`: a 1-D tensor of ``dtype``."""
    if dtype in _CONVERTED:
        return lanes.to(dtype)
    if dtype.itemsize == 1:
        return lanes.to(torch.uint8).view(dtype)
    return lanes.to(torch.int32).to(torch.int16).view(dtype)
