"""Computes shapes alone, on the meta device, where tensors have no values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class AnswersYes(TorchFunctionMode):
    """While it is entered, a tensor without values is true in a condition.

    Models test whether nothing is padded or packed (transformers: a mask's ``all()``), which is
    true of the usual batch.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **(kwargs or {}))
