"""The curves as the page's script takes them: columns of plain numbers, not finite ones null."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.report.rows import Row
from runner.report.run import Mark, RunReader
from runner.system.parsing import json_text

# What is drawn over the curves; discards are seen by their rows.
_DRAWN = frozenset({"rollback", "rebaseline", "halt", "start", "crash", "redo", "replica_mismatch"})
_MOST_MARKS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One of the charts: a field of :class:`Row` over attempts."""

    key: str
    title: str
    unit: str
    is_log: bool = False
    limit: str | None = None


CURVES = (
    Curve(key="loss", title="Loss", unit="nats per token", limit="loss_limit"),
    Curve(
        key="grad_norm",
        title="Gradient norm",
        unit="before clipping, log scale",
        is_log=True,
        limit="norm_limit",
    ),
    Curve(key="lr", title="Learning rate", unit=""),
    Curve(key="tokens_per_second", title="Tokens per second", unit=""),
)


def shown(rows: Sequence[Row]) -> list[Curve]:
    """The curves that have anything to draw."""
    return [
        curve
        for curve in CURVES
        if any(row.is_applied and _is_drawn(curve, getattr(row, curve.key)) for row in rows)
    ]


def _is_drawn(curve: Curve, value: float) -> bool:
    """A logarithmic scale has no place for 0."""
    return math.isfinite(value) and (value > 0 or not curve.is_log)


def columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows for the script: whole numbers as differences, what is not ordinary by place."""
    return {
        "attempt": _differences(row.attempt for row in rows),
        "step": _differences(row.step for row in rows),
        "loss": _numbers(row.loss for row in rows),
        "grad_norm": _numbers(row.grad_norm for row in rows),
        "lr": _numbers((row.lr if row.is_applied else math.nan for row in rows), digits=4),
        "tokens_per_second": _numbers((row.tokens_per_second for row in rows), digits=4),
        "loss_limit": _numbers((row.loss_limit for row in rows), digits=4),
        "norm_limit": _numbers((row.norm_limit for row in rows), digits=4),
        "odd": [
            [place, row.action, row.verdict]
            for place, row in enumerate(rows)
            if not row.is_applied or row.verdict != "Clean"
        ],
    }


def evaluations(rows: Sequence[Row]) -> list[list[Any]]:
    """Attempt, step and held-out loss."""
    return [[row.attempt, row.step, _short(row.eval_loss, 6)] for row in rows]


def marks_of(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """What is drawn over the curves, the newest where there are too many."""
    drawn = [mark for mark in marks if mark.line.kind in _DRAWN and is_news(mark)]
    return [
        {
            "attempt": mark.attempt,
            "back": mark.back_to,
            "kind": mark.line.kind,
            "step": mark.line.step,
            "words": mark.line.decision[:200],
        }
        for mark in drawn[-_MOST_MARKS:]
    ]


def data_of(run: RunReader) -> dict[str, Any]:
    """All that the script draws of a run."""
    return news_of(run, run.fold.thinned.rows())


def news_of(run: RunReader, rows: Sequence[Row]) -> dict[str, Any]:
    """What the script adds: these rows; all else as it is by now."""
    return {
        "generation": run.generation,
        "attempts": len(run.fold.places),
        "rows": columns(rows),
        "evaluations": evaluations(run.fold.evaluated.rows()),
        "marks": marks_of(run.marks()),
        "ring": ring_of(run),
    }


def ring_of(run: RunReader) -> list[dict[str, Any]]:
    """The checkpoints on disk at the attempts that made them."""
    found = []
    for one in run.checkpoints():
        attempt = run.fold.places.attempt_of(one.step)
        if attempt is not None:
            found.append({"attempt": attempt, "step": one.step, "state": one.state.value})
    return found


def script_json(tree: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: nothing in it ends the element or begins another."""
    told = json_text(tree, is_compact=True)
    return told.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def is_news(mark: Mark) -> bool:
    """All but the first start."""
    return mark.line.kind != "start" or mark.line.attempt_number > 1


def _differences(values: Iterable[int]) -> list[int]:
    made, before = [], 0
    for value in values:
        made.append(value - before)
        before = value
    return made


def _numbers(values: Iterable[float], *, digits: int = 6) -> list[float | int | None]:
    return [_short(value, digits) for value in values]


def _short(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
