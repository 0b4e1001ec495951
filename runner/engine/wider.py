"""A step computed in a wider precision, by a second module tree that lives as long as it is wanted.

FSDP2 fixes the precision when a module is wrapped, and DeepSpeed's engines compute in BF16 only. So
the network is built once more, sharded anew, and given the weights of the engine that trains.
Narrowing casts in the model's own forward pass come to nothing in it: an operation that a model
does in FP16 by itself is seen in the wider type as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.engine.protocol import InitialValues, LocalSums, MicroStep, Watch


class Twin(Protocol):
    """The part of :class:`runner.engine.fsdp.FsdpEngine` that is needed."""

    @property
    def network(self) -> nn.Module: ...
    def initialise(self, values: InitialValues) -> None: ...
    def buffers(self) -> dict[str, torch.Tensor]: ...
    def accumulate(self, works: list[MicroStep]) -> LocalSums: ...
    def gradients(self) -> Mapping[str, torch.Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wider:
    """How a twin is made.

    Args:
        dtype: that it computes in.
        make: without weights; no collective.
    """

    dtype: torch.dtype
    make: Callable[[], Any]


class WiderTwin:
    """The twin of one engine; nothing of it is there until it is wanted."""

    def __init__(self) -> None:
        self._wider: Wider | None = None
        self._made: Twin | None = None

    def give(self, wider: Wider) -> None:
        """Say how it is made; without, there is none."""
        self._wider = wider

    @property
    def dtype(self) -> torch.dtype | None:
        """What it computes in; None where there is none."""
        return None if self._wider is None else self._wider.dtype

    def open(self) -> None:
        """Make it, unless it is there. No collective, and needs memory."""
        if self._made is None:
            assert self._wider is not None, "there is no wider precision"
            self._made = self._wider.make()

    def close(self) -> None:
        """Give its memory back."""
        self._made = None

    def accumulate(
        self,
        works: list[MicroStep],
        *,
        values: InitialValues,
        buffers: Mapping[str, torch.Tensor],
        watch: Watch,
    ) -> tuple[LocalSums, Mapping[str, torch.Tensor]]:
        """The sums of the step, and this rank's shards of its gradient. Collective.

        Args:
            values: of the engine that trains, as they are.
            buffers: its own.
        """
        self.open()
        assert self._made is not None
        self._made.initialise(values)
        for name, buffer in self._made.buffers().items():
            if name in buffers:
                buffer.copy_(buffers[name])
        with watch(self._made.network):
            sums = self._made.accumulate(works)
        return sums, self._made.gradients()


class NoNarrowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Casts of floating-point numbers to a narrower type than ``dtype`` are casts to ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and _is_narrower(wanted, self._dtype):
            is_float = isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
            if is_float:
                kwargs["dtype"] = self._dtype
        return func(*args, **kwargs)


def _is_narrower(dtype: torch.dtype | None, than: torch.dtype) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < than.itemsize
