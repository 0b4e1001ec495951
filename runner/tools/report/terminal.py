"""One screen of a terminal about a run, from the same files as the page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runner.system.units import duration, format_bytes
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.drawing import bounds, number
from runner.tools.report.incident import REMARK_KINDS, group_incidents, notices, readings, verdicts
from runner.tools.report.markup import plain, took
from runner.tools.report.run_reader import RunReader, RunStatus
from runner.tools.report.sections import slowest

_HEIGHT = 7  # lines of the chart
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLOURS = {"done": "green", "running": "cyan", "halted": "red", "failed": "red"}
_MOST = 5  # incidents, checkpoints
_IN_SENTENCE = ("loss", "held-out")


def frame(run: RunReader, *, width: int) -> Group:
    """The screen for the run's current state.

    Args:
        width: of the terminal, in characters.
    """
    now = RunStatus(run)
    parts: list[RenderableType] = [
        Panel(
            Text(plain(now.sentence())),
            title=Text(plain(run.run_dir.out.name or run.run_dir.out)),
            title_align="left",
            border_style=_COLOURS.get(now.status, "yellow"),
        ),
        _numbers(now),
    ]
    rows = [row for row in run.fold.thinned.rows() if math.isfinite(row.loss) or not row.is_applied]
    if any(row.is_applied for row in rows):
        parts.append(_chart(rows, max(20, width - 14)))
    parts += _incidents(run, width)
    if len(run.fold.ranks.own.names) > 1:
        parts.append(Text(slowest(run.fold.ranks.own)))
    parts.append(_time(run))
    parts += _ring(run)
    return Group(*parts)


def _numbers(now: RunStatus) -> Text:
    numbers = dict(now.numbers())
    speed = numbers.pop("tokens/s", None)
    parts = [f"{name} {value}" for name, value in numbers.items() if name not in _IN_SENTENCE]
    if speed is not None:
        parts.insert(len(parts) - 4, f"{speed} tok/s")
    return Text("  ".join(parts))


def _chart(rows: Sequence[AttemptRow], width: int) -> Group:
    """The highest loss of each column over all attempted steps; a cross is a step not applied."""
    last = rows[-1].attempt
    highest: list[float | None] = [None] * width
    odd = [False] * width
    for row in rows:
        at = min(width - 1, width * row.attempt // (last + 1))
        if not row.is_applied:
            odd[at] = True
        else:
            highest[at] = max(row.loss, highest[at] or row.loss)
    for at in range(1, width):  # a column without an applied step continues the line
        highest[at] = highest[at - 1] if highest[at] is None else highest[at]
    scale = bounds([row.loss for row in rows if row.is_applied], is_log=False)
    assert scale is not None, "there is an applied loss"
    low, high = scale
    lines = [Text(" " * 9 + "".join("x" if one else " " for one in odd), style="red")]
    for line in range(_HEIGHT - 1, -1, -1):
        label = number(low + (high - low) * (line + 1) / _HEIGHT) if line % 3 == 0 else ""
        cells = "".join(_cell(value, low, high, line) for value in highest)
        lines.append(Text(f"{label:>8} ").append(cells, style="cyan"))
    first, end = f"{rows[0].step:,}", f"{rows[-1].step:,}"
    ruler = f"{first}{end:>{max(1, width - len(first))}}"
    lines.append(Text(f"{'step':>8} {ruler}", style="dim"))
    return Group(Text("loss, nats per token", style="bold"), *lines)


def _cell(value: float | None, low: float, high: float, line: int) -> str:
    if value is None:
        return " "
    filled = min(1.0, max(0.02, (value - low) / (high - low))) * _HEIGHT - line
    return _EIGHTHS[int(min(1.0, max(0.0, filled)) * 8)]


def _incidents(run: RunReader, width: int) -> list[RenderableType]:
    incidents = group_incidents(run.fold.lines)
    warnings = [*notices(run.fold.lines), *readings(run.fold.lines)]
    if not incidents and not warnings:
        return []
    table = _table(f"incidents ({len(incidents):,})", "step", "what", "ranks", "why", "done")
    width_left = max(20, width - 42)
    for group in incidents[-_MOST:]:
        line = next(line for line in reversed(group) if line.kind not in REMARK_KINDS)
        verdict = next(iter(verdicts(group)), None)
        why = line.reason if verdict is None else f"{verdict['cause']}: {verdict.get('why')}"
        ranks = ",".join(map(str, line.ranks[:8]))
        cells = _cut(why, 0.6 * width_left), _cut(line.decision, 0.4 * width_left)
        _add(table, f"{group[0].step:,}", line.kind, ranks, *cells)
    for line in warnings[-2:]:
        cells = _cut(line.reason, 0.6 * width_left), _cut(line.decision, 0.4 * width_left)
        _add(table, f"{line.step:,}", line.kind, "", *cells)
    return [table]


def _cut(text: str, most: float) -> str:
    shown = plain(text)
    return shown if len(shown) <= most else f"{shown[: int(most) - 1]}…"


def _time(run: RunReader) -> Table:
    whole, hour = run.time_spent(), run.last_hour()
    table = _table("where the time went", "what", "in all", "share", "last hour")
    total = sum(whole.values()) or 1.0
    for name, seconds in sorted(whole.items(), key=lambda one: -one[1])[:6]:
        if seconds > 0:
            late = took(hour.get(name, 0.0)) if hour else ""
            _add(table, name.replace("_", " "), took(seconds), f"{seconds / total:.0%}", late)
    return table


def _ring(run: RunReader) -> list[RenderableType]:
    checkpoints = run.checkpoints()
    if not checkpoints:
        return []
    table = _table("the ring on disk", "step", "state", "size", "age")
    for one in reversed(checkpoints[-_MOST:]):
        age = duration(max(0.0, run.clock() - one.time))
        _add(table, f"{one.step:,}", one.state.value, format_bytes(one.num_bytes), age)
    return [table]


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="ellipsis", no_wrap=True)
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(plain(cell).replace("\n", " ")) for cell in cells))
