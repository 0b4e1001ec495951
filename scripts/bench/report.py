"""Rows of results, to JSON and to a Markdown table. Plain numbers; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.bench.ratio import Ratio

HEAD = ("measured", "against", "ratio", "10-90 %", "ours", "theirs", "aim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison. ``ours`` and ``theirs`` are medians in ``unit``; ``aim`` is of the ratio."""

    what: str
    against: str
    ratio: Ratio | None = None
    ours: float | None = None
    theirs: float | None = None
    unit: str = "s"
    aim: float | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "against": self.against,
            "ratio": None if self.ratio is None else self.ratio.to_json(),
            "ours": self.ours,
            "theirs": self.theirs,
            "unit": self.unit,
            "aim": self.aim,
            "detail": dict(self.detail),
        }


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
    """A number for people: 0.00123 s is 1.23 ms."""
    if value is None:
        return ""
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    if unit == "s":
        return f"{value:.3g} s"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
