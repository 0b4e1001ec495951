"""Draws a replay: loss and gradient norm, the gate's limits, and the decisions."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from runner.system.error import ConfigError, MissingPackage
from runner.system.extras import lacking
from runner.tools.backtest.guard_replay import Decision, GuardReplay
from runner.tools.backtest.recording import RecordedRun

_COLOURS = {
    "discard": "tab:orange",
    "rollback": "tab:red",
    "rebaseline": "tab:purple",
    "halt": "black",
}
# More points than pixels only make it slow; each bin keeps its lowest and highest value.
_BINS = 3000
_TABLE_ROWS = 500


def plot(recording: RecordedRun, replay: GuardReplay, path: Path) -> None:
    """Write ``path`` (.png or .html); ``replay`` must have kept its limits.

    Raises:
        ConfigError: matplotlib is not installed, or the ending is unknown.
    """
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--plot {path}: must end in .png or .html")
    figure = _figure(recording, replay)
    if path.suffix == ".png":
        figure.savefig(path, dpi=110)
    else:
        path.write_text(_page(recording, replay.decisions, figure), encoding="utf-8")


def _figure(recording: RecordedRun, replay: GuardReplay) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingPackage(f"{lacking('--plot', 'plot')}, or leave --plot out") from None
    assert replay.limits is not None, "keep_limits=True"
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    curve = recording.curve
    loss_limits = [replay.limits[row].loss for row in sorted(replay.limits)]
    norm_limits = [replay.limits[row].grad_norm for row in sorted(replay.limits)]
    limit_steps = [curve.steps[row] for row in sorted(replay.limits)]
    _line(upper, curve.steps, curve.losses, color="tab:blue", label="loss")
    _band(upper, limit_steps, loss_limits)
    _line(lower, curve.steps, curve.grad_norms, color="tab:blue", label="grad norm")
    _band(lower, limit_steps, norm_limits)
    for axes, values in ((upper, curve.losses), (lower, curve.grad_norms)):
        _marks(axes, recording, replay.decisions, values)
        _view(axes, values)
        axes.grid(alpha=0.25)
    lower.set_yscale("log")
    for start, stop in replay.skipped:
        last = min(stop, len(curve.steps)) - 1
        for axes in (upper, lower):
            axes.axvspan(curve.steps[start], curve.steps[last], color="tab:red", alpha=0.12, lw=0)
    upper.set_ylabel("loss (nats)")
    lower.set_ylabel("grad norm")
    lower.set_xlabel("step")
    upper.set_title(f"{recording.path}: what the guard would have done", fontsize=10)
    upper.legend(loc="upper right", fontsize=8)
    return figure


def _line(axes: Any, steps: Sequence[int], values: Sequence[float], **style: Any) -> None:
    """Draw one line, with a gap where a restart goes back to an earlier step."""
    where, shown = _thinned(steps, values)
    begins = [0, *(at for at in range(1, len(where)) if where[at] < where[at - 1]), len(where)]
    for begin, end in pairwise(begins):
        axes.plot(where[begin:end], shown[begin:end], lw=0.7, **style)
        style.pop("label", None)


def _band(axes: Any, steps: Sequence[int], limits: Sequence[float]) -> None:
    """Shade the values above the limit, which are not applied."""
    finite = [(step, limit) for step, limit in zip(steps, limits, strict=True) if limit < math.inf]
    if finite:
        where, values = [step for step, _ in finite], [limit for _, limit in finite]
        _line(axes, where, values, color="tab:green", label="limit: above is not applied")


def _thinned(
    steps: Sequence[int], values: Sequence[float]
) -> tuple[Sequence[int], Sequence[float]]:
    size = len(steps) // _BINS
    if size < 2:
        return steps, values
    kept: list[int] = []
    for start in range(0, len(steps), size):
        rows = [r for r in range(start, min(start + size, len(steps))) if math.isfinite(values[r])]
        if rows:
            kept += sorted({min(rows, key=values.__getitem__), max(rows, key=values.__getitem__)})
    return [steps[row] for row in kept], [values[row] for row in kept]


def _marks(
    axes: Any, recording: RecordedRun, decisions: Sequence[Decision], values: Sequence[float]
) -> None:
    known = [value for value in values if math.isfinite(value)]
    top = max(known, default=1.0)
    for action, colour in _COLOURS.items():
        rows = [decision.row for decision in decisions if decision.action == action]
        if rows:
            axes.scatter(
                [recording.curve.steps[row] for row in rows],
                [values[row] if math.isfinite(values[row]) else top for row in rows],
                s=16,
                color=colour,
                label=f"{action} ({len(rows)})",
                zorder=3,
            )


def _view(axes: Any, values: Sequence[float]) -> None:
    known = [value for value in values if math.isfinite(value) and value > 0]
    if known and max(known) > min(known):
        margin = 0.05 * (max(known) - min(known))
        axes.set_ylim(max(min(known) - margin, min(known) * 0.8), max(known) + margin)


def _page(recording: RecordedRun, decisions: Sequence[Decision], figure: Any) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    data = base64.b64encode(picture.getvalue()).decode()
    rows = "\n".join(
        f"<tr><td>{recording.curve.steps[decision.row]}</td><td>{decision.action}</td>"
        f"<td>{decision.verdict}</td><td>{html.escape(decision.reason)}</td></tr>"
        for decision in decisions[:_TABLE_ROWS]
    )
    left_out = len(decisions) - _TABLE_ROWS
    more = f"<p>and {left_out} more: see --json</p>" if left_out > 0 else ""
    title = html.escape(recording.path)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif;margin:1em}td,th{padding:2px 10px;text-align:left}"
        "img{max-width:100%}</style>"
        f'<h1>{title}</h1><img alt="loss and grad norm" src="data:image/png;base64,{data}">'
        f"<table><tr><th>step</th><th>action</th><th>verdict</th><th>why</th></tr>{rows}</table>"
        f"{more}</html>\n"
    )
