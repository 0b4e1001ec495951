"""Counts CUDA calls that make the host wait, with torch's own sync debug mode. Not run yet."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import torch

_WORDS = "synchronizing CUDA operation"
_STEPS = 10


class SyncCount:
    """Lets both loops take some steps more when all is measured, and counts.

    Args:
        after_step: the one of :class:`scripts.bench.turns.Turns`.
        passenger: takes one step of the other loop.
    """

    def __init__(self, after_step: Callable[..., bool], passenger: Callable[[], object]) -> None:
        self._after_step = after_step
        self._passenger = passenger
        self._left = 0
        self._catcher: contextlib.AbstractContextManager[list[warnings.WarningMessage] | None]
        self._seen: list[warnings.WarningMessage] = []
        self.per_step: dict[str, float] = {}

    def after_step(self, loss: torch.Tensor | None = None) -> bool:
        """As of ``Turns``; true some steps later."""
        if not self._left:
            if self._after_step(loss):
                self._left = _STEPS
                self._begin()
            return False
        self._left -= 1
        if self._left:
            return False
        self.per_step["theirs"] = self._end()
        self._begin()
        for _ in range(_STEPS):
            self._passenger()
        self.per_step["ours"] = self._end()
        return True

    def _begin(self) -> None:
        torch.cuda.synchronize()
        self._catcher = warnings.catch_warnings(record=True)
        seen = self._catcher.__enter__()
        assert seen is not None
        self._seen = seen
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def _end(self) -> float:
        torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)
        return sum(_WORDS in str(warning.message) for warning in self._seen) / _STEPS
