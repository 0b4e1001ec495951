"""Ratios of pairs and their spread; rows of results, to JSON and to Markdown. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

HEAD = ("measured", "against", "ratio", "10-90 %", "ours", "theirs", "aim")
_RESAMPLES = 2000
_SHARE = 0.95

Pairs = Sequence[tuple[float, float]]


def ratio(pairs: Pairs) -> dict[str, Any]:
    """Of the first of each pair to the second.

    ``p10`` and ``p90`` are percentiles of the pairs: how much single pairs differ. ``median_95``
    is a bootstrap interval of the median: how well the median is known. ``of_totals`` is the ratio
    of the sums: it sees what is rare and dear, and every outlier.

    Raises:
        ValueError: no pair, or a number that is not finite and positive.
    """
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    if not len(table) or not np.isfinite(table).all() or (table <= 0).any():
        raise ValueError(f"pairs of finite positive numbers are needed, not {list(pairs)[:4]}")
    ratios = table[:, 0] / table[:, 1]
    low, middle, high = np.percentile(ratios, [10, 50, 90])
    ours, theirs = table.sum(axis=0)
    return {
        "pairs": len(ratios),
        "median": round(float(middle), 5),
        "p10": round(float(low), 5),
        "p90": round(float(high), 5),
        "median_95": [round(end, 5) for end in _median_interval(ratios)],
        "of_totals": round(float(ours / theirs), 5),
    }


def grouped(pairs: Pairs, size: int) -> list[tuple[float, float]]:
    """The sums of each ``size`` consecutive pairs; a remainder is left out.

    For what happens once in so many blocks: a median over single blocks would not see it.
    """
    whole = len(pairs) // size * size
    sums = np.array(pairs[:whole]).reshape(-1, size, 2).sum(axis=1)
    return [(float(ours), float(theirs)) for ours, theirs in sums]


def _median_interval(ratios: np.ndarray) -> tuple[float, float]:
    """Bootstrap (Efron 1979), percentile method; the same for the same numbers."""
    generator = np.random.default_rng(0)
    drawn = generator.choice(ratios, size=(_RESAMPLES, len(ratios)), replace=True)
    tail = 100 * (1 - _SHARE) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [tail, 100 - tail])
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. ``ours`` and ``theirs`` are median seconds; ``aim`` is of the ratio."""

    what: str
    against: str
    ratio: Mapping[str, Any]
    ours: float
    theirs: float
    aim: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"unit": "s", **asdict(self)}


def compared(what: str, against: str, pairs: Pairs, aim: float | None = None, **detail: Any) -> Row:
    """A row of (ours, theirs) seconds."""
    return Row(
        what=what,
        against=against,
        ratio=ratio(pairs),
        ours=statistics.median(ours for ours, _ in pairs),
        theirs=statistics.median(theirs for _, theirs in pairs),
        aim=aim,
        detail=detail,
    )


def markdown(measurements: Iterable[Mapping[str, Any]]) -> str:
    """The table of everything measured, from the JSON's ``measurements``."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for measurement in measurements:
        lines += [_line(_cells(row)) for row in measurement["rows"]]
        lines += [
            _line([measurement["name"], f"not measured: {why}", *[""] * 5])
            for why in measurement.get("failed", ())
        ]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> Sequence[str]:
    ratio, unit = row["ratio"], row["unit"]
    return (
        row["what"],
        row["against"],
        "" if ratio is None else f"{ratio['median']:.3f}",
        "" if ratio is None else f"{ratio['p10']:.3f} to {ratio['p90']:.3f}",
        amount(row["ours"], unit),
        amount(row["theirs"], unit),
        "" if row["aim"] is None else f"{row['aim']:g}",
    )


def amount(value: float | None, unit: str) -> str:
    """A number for people: 0.00123 s is 1.23 ms. Older results have other units, too."""
    if value is None:
        return ""
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
