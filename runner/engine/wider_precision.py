"""A step computed in a wider precision, by a second module tree that exists only while needed.

FSDP2 fixes the precision when a module is wrapped, and DeepSpeed's engines compute in BF16 only. So
the network is built a second time, sharded, and given the weights of the training engine. Narrowing
casts in the model's own forward pass are disabled in it: an operation that the model runs in FP16
runs in the wider type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from runner.engine.buffers import RunningBuffers
    from runner.engine.protocol import Engine, InitialValues, LocalSums, MicroStep, Watch


class WiderTwin:
    """The twin of one engine; it is built on first use.

    Attributes:
        dtype: the dtype that it computes in; None if none is configured.
    """

    dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self._make: Callable[[], Engine] | None = None
        self._twin: Engine | None = None

    def give(self, dtype: torch.dtype, make: Callable[[], Engine]) -> None:
        """Configure the twin; ``make`` builds it without weights, and is not collective."""
        self.dtype, self._make = dtype, make

    def open(self) -> None:
        """Build the twin unless it exists. Not collective; allocates memory."""
        if self._twin is None:
            assert self._make is not None, "there is no wider precision"
            self._twin = self._make()

    def close(self) -> None:
        """Free the twin's memory."""
        self._twin = None

    def accumulate(
        self,
        works: Sequence[MicroStep],
        *,
        values: InitialValues,
        running: RunningBuffers,
        watch: Watch,
    ) -> tuple[LocalSums, Mapping[str, torch.Tensor]]:
        """Compute the step's sums and this rank's shards of its gradient. Collective.

        Args:
            values: current weights of the training engine.
            running: buffers of the training engine; get what the twin makes of them.
        """
        self.open()
        assert self._twin is not None
        self._twin.initialise(values)
        self._twin.running.follow(running)
        with watch(self._twin.network):
            sums = self._twin.accumulate(works)
        self._twin.running.move_to(running)
        return sums, self._twin.gradients()


def widen_buffers(network: nn.Module, dtype: torch.dtype) -> None:
    """Have the network keep its buffers in the type that it computes in."""
    for module in network.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and _is_narrower(buffer.dtype, dtype):
                module._buffers[key] = buffer.to(dtype)


class NoNarrowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turns every floating-point cast to a type narrower than ``dtype`` into a cast to
    ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        target = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and _is_narrower(target, self._dtype):
            is_float = isinstance(args[0], torch.Tensor) and args[0].is_floating_point()
            if is_float:
                kwargs["dtype"] = self._dtype
        return func(*args, **kwargs)


def _is_narrower(dtype: torch.dtype | None, than: torch.dtype) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < than.itemsize
