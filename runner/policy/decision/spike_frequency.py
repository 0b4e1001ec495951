"""Counts spikes of the loss over a long time: many transient ones suggest the rate is too high."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

_WINDOW = 1000  # losses
_LEAST = 200  # losses before one is judged
_SIGMAS = 7.0
_SHARE = 0.001
_STATE = ("sum", "squares", "num", "spikes", "is_high", "is_told")


class SpikeScore:
    """The spike score of OLMo 2 (arXiv 2501.00656): the share of losses that lie 7 standard
    deviations above the mean of the last 1,000.

    A non-finite loss counts as a spike; only finite ones enter the mean.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._sum = self._squares = 0.0
        self._num = self._spikes = 0
        self._is_high = self._is_told = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, f"_{name}") for name in _STATE} | {"losses": [*self._losses]}

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`."""
        self._losses = deque(state["losses"], maxlen=_WINDOW)
        for name in _STATE:
            setattr(self, f"_{name}", state[name])

    def note(self, loss: float) -> float | None:
        """Record a step's loss; returns the share, once, when it is too high in two windows in a
        row."""
        self._num += 1
        is_spike = self._is_spike(loss)
        self._spikes += is_spike
        if not is_spike:
            self._add(loss)
        if self._num < _WINDOW:
            return None
        share, was_high = self._spikes / self._num, self._is_high
        self._is_high = share > _SHARE
        self._num = self._spikes = 0
        if not (self._is_high and was_high) or self._is_told:
            return None
        self._is_told = True
        return share

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(self._losses) < _LEAST:
            return False
        mean = self._sum / len(self._losses)
        variance = max(0.0, self._squares / len(self._losses) - mean * mean)
        return loss > mean + _SIGMAS * math.sqrt(variance)

    def _add(self, loss: float) -> None:
        if len(self._losses) == _WINDOW:
            oldest = self._losses[0]
            self._sum -= oldest
            self._squares -= oldest * oldest
        self._losses.append(loss)
        self._sum += loss
        self._squares += loss * loss
