"""Draws a replay: loss and gradient norm, the gate's limits, and the decisions."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.system.error import ConfigError, MissingPackage, lacking
from runner.tools.backtest.guard_replay import Decision, GuardReplay
from runner.tools.backtest.recording import RecordedRun
from runner.tools.reading.curve import Floats, Ints
from runner.tools.report.markup import Html, note, table, tag

_COLOURS = {
    "discard": "tab:orange",
    "rollback": "tab:red",
    "rebaseline": "tab:purple",
    "halt": "black",
}
# More points than pixels only make it slow; each bin keeps its lowest and highest value.
_BINS = 3000
_TABLE_ROWS = 500
_LIMIT = "limit: above is not applied"
_STYLE = (
    "<style>body{font:14px sans-serif;margin:1em}td,th{padding:2px 10px;text-align:left}"
    "img{max-width:100%}</style>"
)


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
    curve = recording.curve
    steps, limits = np.array(curve.steps), sorted(replay.limits.items())
    limit_steps = steps[[row for row, _ in limits]]
    shown = (
        ("loss", np.array(curve.losses), [limit.loss for _, limit in limits]),
        ("grad norm", np.array(curve.grad_norms), [limit.grad_norm for _, limit in limits]),
    )
    all_axes = figure.subplots(2, 1, sharex=True)
    for axes, (label, values, bounds) in zip(all_axes, shown, strict=True):
        _line(axes, steps, values, color="tab:blue", label=label)
        _line(axes, limit_steps, np.array(bounds), color="tab:green", label=_LIMIT)
        _marks(axes, steps, replay.decisions, values)
        known = values[np.isfinite(values) & (values > 0)]
        if len(known) and known.max() > known.min():
            margin = 0.05 * (known.max() - known.min())
            axes.set_ylim(max(known.min() - margin, known.min() * 0.8), known.max() + margin)
        axes.grid(alpha=0.25)
        for start, stop in replay.skipped:
            last = min(stop, len(steps)) - 1
            axes.axvspan(steps[start], steps[last], color="tab:red", alpha=0.12, lw=0)
    upper, lower = all_axes
    lower.set_yscale("log")
    upper.set_ylabel("loss")
    lower.set_ylabel("grad norm")
    lower.set_xlabel("step")
    upper.set_title(f"{recording.path}: what the guard would have done", fontsize=10)
    upper.legend(loc="upper right", fontsize=8)
    return figure


def _line(axes: Any, steps: Ints, values: Floats, **style: Any) -> None:
    """Draw one line, with a gap where a restart goes back to an earlier step."""
    rows = np.flatnonzero(np.isfinite(values))
    if len(rows) > 2 * _BINS:
        bins = np.array_split(rows, _BINS)
        extremes = [(one[values[one].argmin()], one[values[one].argmax()]) for one in bins]
        rows = np.unique(extremes)
    for part in np.split(rows, np.flatnonzero(np.diff(steps[rows]) < 0) + 1):
        if len(part):
            axes.plot(steps[part], values[part], lw=0.7, **style)
            style.pop("label", None)


def _marks(axes: Any, steps: Ints, decisions: Sequence[Decision], values: Floats) -> None:
    known = values[np.isfinite(values)]
    top = known.max() if len(known) else 1.0
    for action, colour in _COLOURS.items():
        rows = [decision.row for decision in decisions if decision.action == action]
        if rows:
            heights = np.where(np.isfinite(values[rows]), values[rows], top)
            label = f"{action} ({len(rows)})"
            axes.scatter(steps[rows], heights, s=16, color=colour, label=label, zorder=3)


def _page(recording: RecordedRun, decisions: Sequence[Decision], figure: Any) -> str:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    data = base64.b64encode(picture.getvalue()).decode()
    steps = recording.curve.steps
    rows = (
        (steps[one.row], one.action, one.verdict, one.reason) for one in decisions[:_TABLE_ROWS]
    )
    left_out = len(decisions) - _TABLE_ROWS
    body = tag(
        "body",
        tag("h1", recording.path),
        Html(f'<img alt="loss and grad norm" src="data:image/png;base64,{data}">'),
        table(["step", "action", "verdict", "why"], rows),
        note(f"and {left_out} more: see --json") if left_out > 0 else None,
    )
    head = tag("head", Html('<meta charset="utf-8">'), tag("title", recording.path), Html(_STYLE))
    return f"<!doctype html>{tag('html', head, body, lang='en')}\n"
