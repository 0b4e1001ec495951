"""Elements of any type as FP32 values ("lanes"): so the state digest of a user's loop counts them.

Checkpoints from before 0.1.0 stored them so as well; only these name a type as ``torch.float32``,
later ones as ``float32``. Version 0.2 is to read no such checkpoint and to refuse it in
:func:`is_type_of_lanes`: "the checkpoint is from before 0.1.0: load and save it with 0.1 first".
"""

from __future__ import annotations

import torch

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)


def encode(values: torch.Tensor) -> torch.Tensor:
    """FP32 1-D. Elements that are no floats become integers of up to 16 bits a lane."""
    flat = values.detach().contiguous().reshape(-1)
    if flat.dtype in _CONVERTED:
        return flat.float()
    if flat.dtype.itemsize == 1:
        return flat.view(torch.uint8).float()
    return (flat.view(torch.int16).to(torch.int32) & 0xFFFF).float()


def is_type_of_lanes(dtype: str) -> bool:
    """Whether the name of a type in ``train_state`` is of a checkpoint from before 0.1.0."""
    return dtype.startswith("torch.")


def lanes_per_element(dtype: torch.dtype) -> int:
    """Of one element of the type."""
    return 1 if dtype in _CONVERTED else max(1, dtype.itemsize // 2)


def decode(lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`encode`: 1-D, of ``dtype``."""
    if dtype in _CONVERTED:
        return lanes.to(dtype)
    if dtype.itemsize == 1:
        return lanes.to(torch.uint8).view(dtype)
    return lanes.to(torch.int32).to(torch.int16).view(dtype)
