"""Ratios of pairs, and their spread. Plain numbers; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_RESAMPLES = 2000
_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of the first of each pair to the second.

    ``low`` and ``high`` are the 10th and 90th percentile of the pairs: how much single pairs
    differ. ``interval`` is a 95 % bootstrap interval of the median: how well the median is known.
    ``of_totals`` is the ratio of the sums: it sees what is rare and dear, and every outlier.
    """

    pairs: int
    median: float
    low: float
    high: float
    interval: tuple[float, float]
    of_totals: float

    def to_json(self) -> dict[str, Any]:
        return {
            "pairs": self.pairs,
            "median": round(self.median, 5),
            "p10": round(self.low, 5),
            "p90": round(self.high, 5),
            "median_95": [round(end, 5) for end in self.interval],
            "of_totals": round(self.of_totals, 5),
        }


def paired(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The ratio over ``pairs`` of positive numbers.

    Raises:
        ValueError: no pair, or a number that is not finite and positive.
    """
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    if not len(table) or not np.isfinite(table).all() or (table <= 0).any():
        raise ValueError(f"pairs of finite positive numbers are needed, not {list(pairs)[:4]}")
    ratios = table[:, 0] / table[:, 1]
    low, middle, high = np.percentile(ratios, [10, 50, 90])
    first, second = table.sum(axis=0)
    return Ratio(
        pairs=len(ratios),
        median=float(middle),
        low=float(low),
        high=float(high),
        interval=_median_interval(ratios),
        of_totals=float(first / second),
    )


def grouped(pairs: Sequence[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """The sums of each ``size`` consecutive pairs; a remainder is left out.

    For what happens once in so many blocks: a median over single blocks would not see it.
    """
    if size < 1:
        raise ValueError(f"size={size}: at least 1 is needed")
    whole = len(pairs) - len(pairs) % size
    return [
        (sum(a for a, _ in pairs[at : at + size]), sum(b for _, b in pairs[at : at + size]))
        for at in range(0, whole, size)
    ]


def _median_interval(ratios: np.ndarray) -> tuple[float, float]:
    """Bootstrap (Efron 1979), percentile method; the same for the same numbers."""
    generator = np.random.default_rng(0)
    drawn = generator.choice(ratios, size=(_RESAMPLES, len(ratios)), replace=True)
    tail = 100 * (1 - _SHARE) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return float(low), float(high)
