"""The frozen linear layers of a model, held in 4 or 8 bits by bitsandbytes (``model.quantize``).

The weights are no parameters: engines neither shard, save nor reduce them. Every rank holds them
whole, and makes each one wide while it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.model.quantised import digest_tensors
from runner.system.error import ConfigError, imported

INT8: Final = "int8"
_BLOCK: Final = 64  # elements of one scale, QLoRA's


@dataclass(frozen=True, slots=True)
class Held:
    """One weight; ``state``: scales of its rows (INT8), or bitsandbytes' state of its blocks."""

    data: Tensor
    state: Any

    @classmethod
    def of(cls, weight: Tensor, kind: str) -> Held:
        """Of a weight [out, in] FP32, on the device where it lies."""
        functional = _functional(kind)
        if kind == INT8:
            data, scales, _ = functional.int8_vectorwise_quant(weight.half())
            return cls(data, scales)
        made = functional.quantize_4bit(
            weight, blocksize=_BLOCK, compress_statistics=True, quant_type=kind
        )
        return cls(*made)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in]."""
        functional = _functional(INT8)
        if isinstance(self.state, Tensor):
            made: Tensor = functional.int8_vectorwise_dequant(self.data, self.state)
        else:
            made = functional.dequantize_4bit(self.data, self.state)
        return made.to(dtype)

    def digest(self) -> str:
        """XXH3-128 of what decides the weight. Waits for the device."""
        is_rows = isinstance(self.state, Tensor)
        parts = {"scales": self.state} if is_rows else self.state.as_dict(packed=True)
        return digest_tensors([("data", self.data), *sorted(parts.items())])


def _functional(kind: str) -> Any:
    return imported("bitsandbytes.functional", f"model.quantize={kind}", "quantised")


class QuantisedLinear(nn.Module):
    """In place of a frozen ``nn.Linear``, whose bias it keeps.

    Attributes:
        held: its weight; None: nothing yet, on the meta device.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.held: Held | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.out_features, self.in_features

    def wide(self, like: Tensor) -> Tensor:
        """The weight in the type of ``like``."""
        if self.held is None:
            assert like.is_meta, "the weight was not given"
            return like.new_empty(self.shape)
        return self.held.wide(like.dtype)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """``x @ weight.T``; the wide weight is made again in backward, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.wide(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.wide(grad), None


def quantise(network: nn.Module, setting: str, *, skip: tuple[nn.Module | None, ...]) -> None:
    """Replace the frozen linear layers.

    Args:
        setting: that asks for it, for messages.
        skip: layers to leave, such as the output head.

    Raises:
        ConfigError: there is none.
    """
    found = [
        (name, module)
        for name, module in network.named_modules()
        if type(module) is nn.Linear and not module.weight.requires_grad and module not in skip
    ]
    for name, module in found:
        owner, _, own = name.rpartition(".")
        setattr(network.get_submodule(owner), own, QuantisedLinear(module))
    if not found:
        raise ConfigError(
            f"{setting}: the model has no frozen nn.Linear to quantise; leave the setting out"
        )


def quantised_layers(network: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """The layers by name."""
    for name, module in network.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name, module
