"""Logits of a network from elsewhere that need not be held whole.

The network's head returns a :class:`DeferredLogits` in place of ``[B, T, V]`` where that would be
large. A forward that hands it on untouched has its loss computed in parts; whatever else it does
with it (scales, caps, cuts, casts) gets the real tensor first. So values never depend on it. Must
not know the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeferredLogits:
    """Stands for the output of an ``nn.Linear``, which is computed at the first other use.

    Args:
        hidden: the layer's input, ``[B, T, dim]``.
    """

    def __init__(self, hidden: Tensor, head: nn.Linear) -> None:
        self._hidden = hidden
        self._head = head
        self._whole: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self._hidden.shape[:-1], self._head.out_features])

    def parts(self) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Input, weight and bias of the layer, of one dtype; None if the tensor exists already."""
        weight, bias = self._head.weight, self._head.bias
        # As autocast does with the layer.
        return None if self._whole is not None else (self._hidden.to(weight.dtype), weight, bias)

    def whole(self) -> Tensor:
        """The logits ``[B, T, V]``."""
        if self._whole is None:
            self._whole = F.linear(self._hidden, self._head.weight, self._head.bias)
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map(_real, (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)


def _real(value: Any) -> Any:
    return value.whole() if isinstance(value, DeferredLogits) else value


def _through(name: str) -> Callable[..., Any]:
    def call(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.whole(), name)(*map(_real, args))

    return call


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul"),
    *("rmatmul", "neg", "getitem", "setitem", "len", "iter", "bool", "eq", "ne", "lt", "le", "gt"),
    *("ge", "iadd", "isub", "imul", "itruediv", "abs", "float", "array"),
):
    setattr(DeferredLogits, f"__{_name}__", _through(f"__{_name}__"))


def defer_logits(head: nn.Linear, is_wanted: Callable[[Tensor, Tensor], bool]) -> None:
    """Have a head return :class:`DeferredLogits` where ``is_wanted(hidden, weight)``."""
    head.forward = partial(_forward, head, is_wanted)  # type: ignore[method-assign]


def _forward(head: nn.Linear, is_wanted: Callable[[Tensor, Tensor], bool], hidden: Tensor) -> Any:
    if hidden.dim() == 3 and is_wanted(hidden, head.weight):
        return DeferredLogits(hidden, head)
    return F.linear(hidden, head.weight, head.bias)


def head_of(
    network: nn.Module, vocab_size: int, units: Sequence[nn.Module] = ()
) -> nn.Linear | None:
    """The layer that makes logits, if it is known and is a plain ``nn.Linear``.

    What ``get_output_embeddings()`` gives, or else the only layer with ``vocab_size`` outputs. Not
    one inside of a unit that is gathered by itself, whose weights are gone when it has returned.
    """
    method = getattr(network, "get_output_embeddings", None)
    try:
        module = method() if callable(method) else None
    except (NotImplementedError, AttributeError):
        module = None
    if module is None:
        linear = [m for m in network.modules() if isinstance(m, nn.Linear)]
        heads = [layer for layer in linear if layer.out_features == vocab_size]
        module = heads[0] if len(heads) == 1 else None
    is_inside = any(module is inner for unit in units for inner in unit.modules())
    if type(module) is not nn.Linear or "forward" in vars(module) or is_inside:
        return None
    # DeepSpeed's stage 3 frees the weight when the layer has returned.
    is_freed = any(hasattr(parameter, "ds_id") for parameter in module.parameters())
    return None if is_freed else module
