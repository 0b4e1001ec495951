"""Lets a network under autocast on a CPU mix FP32 activations with weights in BF16.

Owns the few operations that CUDA's autocast brings to one type and the CPU's leaves alone: there
they raise "mixed dtype". A network with buffers in FP32 meets them as soon as its weights are BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.library import Library
from torch.utils import _pytree as pytree

_KEY: Final = "AutocastCPU"
_OPERATIONS: Final = (
    *("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm"),
    *("addcdiv", "addcmul", "bilinear", "cross", "dot", "scatter_add", "index_add"),
)


@cache
def mix_types() -> Library:
    """Have these operations compute in the widest type of their arguments, under CPU autocast.

    Where all have one type nothing changes. Once for each process; the library must be kept.
    """
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _OPERATIONS:
        packet = getattr(torch.ops.aten, name)
        call = partial(_in_one_type, packet)
        library.impl(name, call, _KEY)  # type: ignore[no-untyped-call]
    return library


def _in_one_type(operation: Callable[..., Any], *args: Any, **more: Any) -> Any:
    types = {leaf.dtype for leaf in pytree.tree_leaves((args, more)) if _is_float(leaf)}
    if len(types) > 1:
        widest = torch.float64 if torch.float64 in types else torch.float32
        args, more = pytree.tree_map(
            lambda leaf: leaf.to(widest) if _is_float(leaf) else leaf, (args, more)
        )
    with torch.autocast("cpu", enabled=False):
        return operation(*args, **more)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
