"""Types of a checkpoint's elements: their names in a manifest, sizes, and what finite means.

A manifest names only types other than FP32; without such types its format is the older one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

FLOAT32: Final = "float32"
# Bytes of an element by torch's name of its type.
ITEM_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        FLOAT32: 4,
        "float64": 8,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "uint8": 1,
        "int8": 1,
        "bool": 1,
        "int16": 2,
        "uint16": 2,
        "int32": 4,
        "uint32": 4,
        "int64": 8,
        "uint64": 8,
    }
)


def name_of(dtype: torch.dtype) -> str:
    """The type's name in a manifest.

    Raises:
        ValueError: checkpoints cannot hold elements of this type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_SIZES:
        raise ValueError(f"{dtype}: a checkpoint holds {', '.join(ITEM_SIZES)}")
    return name


def dtype_of(name: str) -> torch.dtype:
    """Inverse of :func:`name_of`; ``name`` must be in :data:`ITEM_SIZES`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_finite(values: torch.Tensor) -> bool:
    """Whether no element is NaN or Inf; integers are always finite."""
    if not values.is_floating_point():
        return True
    wide = values.float() if values.dtype.itemsize == 1 else values
    return bool(torch.isfinite(wide).all())


def as_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, little endian; a view if the tensor is contiguous."""
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`as_bytes`: a 1-D tensor over ``data``. Do not write to it."""
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
