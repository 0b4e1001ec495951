"""Elements of a checkpoint's tensors: types by their names in a manifest, and bytes."""

from __future__ import annotations

import torch

from runner.checkpoint.manifest import ITEM_SIZES
from runner.checkpoint.protocol import SavedShard


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


def element_type(shard: SavedShard) -> torch.dtype:
    """The type of ``shard.local``, without making that tensor, which can be costly."""
    element = getattr(shard, "element_type", None)
    return element if isinstance(element, torch.dtype) else shard.local.dtype
