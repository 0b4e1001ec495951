"""Several runs side by side: a row each, and their losses over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runner.system.units import duration
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.chart_data import evaluations
from runner.tools.report.drawing import Named, lines, sign
from runner.tools.report.markup import Html, join, table, tag
from runner.tools.report.run_reader import RunReader
from runner.tools.report.run_status import RunStatus, run_status

_POINTS = 600


def comparison(runs: Sequence[RunReader]) -> Html:
    """A table with one row per run, their losses, and the settings that differ."""
    now = [run_status(run) for run in runs]
    names = [run.run_dir.out.name or str(run.run_dir.out) for run in runs]
    named = list(zip(names, runs, strict=True))
    rows = [
        _row(index, name, one) for index, (name, one) in enumerate(zip(names, now, strict=True))
    ]
    heads = [
        "", "run", "status", "step", "loss", "held-out", "goodput", "wall", "discarded",
        "rollbacks", "restarts",
    ]  # fmt: skip
    return tag(
        "section",
        tag("h2", "Side by side"),
        table(heads, rows),
        lines(
            "Loss",
            "nats per token",
            [Named(name=name, points=_applied_points(run)) for name, run in named],
            x_label="applied steps",
            cls="chart compare",
        ),
        _differences(runs, names),
        cls="compare",
    )


def comparison_data(runs: Sequence[RunReader], names: Sequence[str]) -> dict[str, Any]:
    """The lines of the common chart; each holds a few hundred applied steps."""
    points = [[[step, _plain(loss)] for step, loss in _applied_points(run)] for run in runs]
    return {
        "names": list(names),
        "lines": points,
        "evaluations": [evaluations(run.fold.evaluated.rows()[-2000:]) for run in runs],
    }


def _row(index: int, name: str, now: RunStatus) -> list[object]:
    return [
        sign(index),
        name,
        now.status,
        f"{now.step:,}",
        "" if now.loss is None else f"{now.loss:.4f}",
        "" if now.eval_loss is None else f"{now.eval_loss:.4f}",
        f"{now.goodput:.0%}",
        duration(now.wall_seconds),
        f"{now.discards:,}",
        f"{now.rollbacks:,}",
        f"{now.restarts:,}",
    ]


def _applied_points(run: RunReader) -> list[tuple[int, float]]:
    """Step and loss of applied steps: the lowest and the highest loss of each column."""
    kept: dict[int, AttemptRow] = {}
    for row in run.fold.thinned.rows():
        if row.is_applied and math.isfinite(row.loss):
            kept[row.step] = row  # a later attempt at a step replaces one that was undone
    last = max(kept, default=1)
    columns: dict[int, list[tuple[int, float]]] = {}
    for step in sorted(kept):
        columns.setdefault(_POINTS * step // (last + 1), []).append((step, kept[step].loss))
    points = set()
    for column in columns.values():
        points |= {
            min(column, key=lambda point: point[1]),
            max(column, key=lambda point: point[1]),
        }
    return sorted(points)


def _differences(runs: Sequence[RunReader], names: Sequence[str]) -> Html | None:
    settings = [run.settings() for run in runs]
    keys = [key for key in dict.fromkeys(k for one in settings for k in one) if key != "out"]
    rows = [
        [key, *("-" if one.get(key) is None else str(one[key])[:200] for one in settings)]
        for key in keys
        if len({repr(one.get(key)) for one in settings}) > 1
    ]
    if not rows:
        return tag("p", "Their settings are the same.", cls="note")
    return join([tag("h3", "Settings that differ"), table(["key", *names], rows)])


def _plain(loss: float) -> float:
    return float(f"{loss:.6g}")
