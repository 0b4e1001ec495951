"""The curves in the form that the page's script reads: columns of numbers, null if not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.system.parsing import json_text
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.run_reader import Mark, RunReader

# Journal kinds drawn over the curves; a discard shows in the row of its step.
_DRAWN_KINDS = frozenset(
    {"rollback", "rebaseline", "halt", "start", "crash", "redo", "replica_mismatch"}
)
_MOST_MARKS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One chart: a field of :class:`AttemptRow` over attempts."""

    key: str
    title: str
    unit: str
    is_log: bool = False
    limit: str | None = None


CURVES = (
    Chart(key="loss", title="Loss", unit="nats per token", limit="loss_limit"),
    Chart(
        key="grad_norm",
        title="Gradient norm",
        unit="before clipping, log scale",
        is_log=True,
        limit="norm_limit",
    ),
    Chart(key="lr", title="Learning rate", unit=""),
    Chart(key="tokens_per_second", title="Tokens per second", unit=""),
)


def shown(rows: Sequence[AttemptRow]) -> list[Chart]:
    """The curves that have at least one value to draw."""
    return [
        curve
        for curve in CURVES
        if any(row.is_applied and _is_drawn(curve, getattr(row, curve.key)) for row in rows)
    ]


def _is_drawn(curve: Chart, value: float) -> bool:
    """Whether the value can be drawn: finite, and positive on a logarithmic scale."""
    return math.isfinite(value) and (value > 0 or not curve.is_log)


def columns(rows: Sequence[AttemptRow]) -> dict[str, Any]:
    """Rows for the script: integers as differences, unusual steps listed by row index."""
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
            [index, row.action, row.verdict]
            for index, row in enumerate(rows)
            if not row.is_applied or row.verdict != "Clean"
        ],
    }


def evaluations(rows: Sequence[AttemptRow]) -> list[list[Any]]:
    """Attempt, step and held-out loss of each evaluation."""
    return [[row.attempt, row.step, _short(row.eval_loss, 6)] for row in rows]


def marks_of(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """The marks drawn over the curves; only the newest if there are too many."""
    drawn = [mark for mark in marks if mark.line.kind in _DRAWN_KINDS and is_news(mark)]
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
    """Everything that the script draws for a run."""
    return news_of(run, run.fold.thinned.rows())


def news_of(run: RunReader, rows: Sequence[AttemptRow]) -> dict[str, Any]:
    """The update that the script applies: new rows, and the current state of everything else."""
    return {
        "generation": run.generation,
        "attempts": len(run.fold.attempts),
        "rows": columns(rows),
        "evaluations": evaluations(run.fold.evaluated.rows()),
        "marks": marks_of(run.marks()),
        "ring": ring_of(run),
    }


def ring_of(run: RunReader) -> list[dict[str, Any]]:
    """The checkpoints on disk at the attempts that made them."""
    points = []
    for one in run.checkpoints():
        attempt = run.fold.attempts.attempt_of(one.step)
        if attempt is not None:
            points.append({"attempt": attempt, "step": one.step, "state": one.state.value})
    return points


def script_json(tree: Mapping[str, Any]) -> str:
    """JSON that is safe in a script element: it cannot close the element or open another."""
    text = json_text(tree, is_compact=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def is_news(mark: Mark) -> bool:
    """Whether the mark is worth drawing: every kind except the run's first start."""
    return mark.line.kind != "start" or mark.line.attempt_number > 1


def _differences(values: Iterable[int]) -> list[int]:
    differences, before = [], 0
    for value in values:
        differences.append(value - before)
        before = value
    return differences


def _numbers(values: Iterable[float], *, digits: int = 6) -> list[float | int | None]:
    return [_short(value, digits) for value in values]


def _short(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
