"""Checksums of the gradients that this rank computes by itself, before ranks are summed.

Owns hooks on parameters, for one computation. A reduced gradient is everybody's: a rank that is
a little wrong disappears in it. What autograd hands to a parameter is still this rank's alone,
whole, on every engine: FSDP2 reduces it afterwards, and DeepSpeed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from runner.health.checks import sum_of_words

_FACTOR = 0x3F58476D1CE4E5B9  # odd: no micro-batch's checksum is lost


class OwnGradients:
    """Listens to the backward passes of ``network`` inside of :meth:`over`."""

    def __init__(self, network: nn.Module) -> None:
        # A hook inside of a compiled block would have it compiled anew.
        compiled = [name for name, module in network.named_modules() if _is_compiled(module)]
        self._compiled = tuple(f"{name}." for name in compiled)
        self._modules = {
            name: module
            for name, module in network.named_modules()
            if not f"{name}.".startswith(self._compiled)
        }
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        # The tensors themselves: an id alone could be another's by the next micro-batch.
        self._known: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def over(self) -> Iterator[None]:
        """Listen; what was heard before is forgotten."""
        self._sums, self._squares = {}, {}
        # A shard is no leaf of the graph: its whole parameter is there from its module's forward
        # pass on. Parents too, for some use the parameters of modules that they never call.
        self._handles = [
            module.register_forward_pre_hook(partial(self._at_module, name))
            for name, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles, self._known = [], {}

    def checksums(self) -> dict[str, int]:
        """Of each parameter that got a gradient, one that changes with any bit. Waits."""
        return _on_host(self._sums)

    def norms(self) -> dict[str, float]:
        """Of each parameter that got a gradient, its norm over all micro-batches. Waits."""
        return {name: square**0.5 for name, square in _on_host(self._squares).items()}

    def _at_module(self, prefix: str, module: nn.Module, inputs: object) -> None:
        for name, parameter in module.named_parameters(prefix):
            is_whole = not isinstance(parameter, DTensor) and parameter.requires_grad
            if not is_whole or id(parameter) in self._known or name.startswith(self._compiled):
                continue
            self._known[id(parameter)] = parameter
            heard = partial(self._at_gradient, name)
            self._handles.append(parameter.register_hook(heard))  # type: ignore[no-untyped-call]

    def _at_gradient(self, name: str, gradient: Tensor) -> None:
        if gradient.layout is not torch.strided or not gradient.is_floating_point():
            return
        checksum = sum_of_words(gradient)
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        if name in self._sums:
            checksum = self._sums[name] * _FACTOR + checksum
            square = self._squares[name] + square
        self._sums[name], self._squares[name] = checksum, square


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _on_host(numbers: dict[str, Tensor]) -> dict[str, Any]:
    """By name in order, with one wait."""
    names = sorted(numbers)
    values = torch.stack([numbers[name] for name in names]).tolist() if names else []
    return dict(zip(names, values, strict=True))
