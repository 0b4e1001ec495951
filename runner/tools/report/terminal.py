"""What a terminal shows of runs, from the same files as the page: one screen, and its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runner.system.units import duration, format_bytes
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.drawing import bounds, number
from runner.tools.report.episode import Episode, episodes, rank_list
from runner.tools.report.incident import INCIDENT_KINDS, notices, readings
from runner.tools.report.markup import plain, took, when
from runner.tools.report.run_reader import RunReader, RunStatus
from runner.tools.report.sections import medians_of, slowest
from runner.tools.report.side_files import GPU_QUANTITIES
from runner.tools.report.vitals import RUN_HEADS, Glance

_HEIGHT = 7  # lines of the chart
_EIGHTHS = " ▁▂▃▄▅▆▇█"
COLOURS = {"done": "green", "running": "cyan", "halted": "red", "failed": "red"}
_MOST = 5  # incidents, checkpoints
_MOST_ROWS = 500
_NARROW = 16  # characters; wider columns are cut first
_LEAST = 6
_IN_SENTENCE = ("loss", "held-out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table: ``detail`` is what there is to say of it, ``key`` stays as rows come."""

    key: str
    cells: tuple[str, ...]
    detail: str = ""
    is_red: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A table: its columns and rows, the newest first."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[Row]


def frame(run: RunReader, *, width: int) -> Group:
    """One screen for the run's current state.

    Args:
        width: of the terminal, in characters.
    """
    tables = [incidents(run), checkpoints(run)]
    return Group(*now_parts(run, width), *(_drawn(one, width) for one in tables if one.rows))


def now_parts(run: RunReader, width: int) -> list[RenderableType]:
    """State, numbers, loss, warnings, the slowest rank and the time, for so many characters."""
    now = RunStatus(run)
    parts: list[RenderableType] = [
        Panel(
            Text(plain(now.sentence())),
            title=Text(plain(run.run_dir.out.name or run.run_dir.out)),
            title_align="left",
            border_style=COLOURS.get(now.status, "yellow"),
        ),
        _numbers(now),
    ]
    found = episodes(run)
    if found:
        style = "red" if found[-1].clean_step is None else ""
        parts.append(Text(plain(f"Incident {len(found):,}: {found[-1].sentence()}"), style=style))
    rows = [row for row in run.fold.thinned.rows() if math.isfinite(row.loss) or not row.is_applied]
    if any(row.is_applied for row in rows):
        parts.append(_chart(rows, max(20, width - 14), run.unit))
    for line in [*notices(run.fold.lines), *readings(run.fold.lines)][-2:]:
        words = f"step {line.step:,}, {line.kind.replace('_', ' ')}: {line.reason}"
        parts.append(Text(plain(words), style="yellow"))
    if len(run.fold.ranks.own.names) > 1:
        parts.append(Text(slowest(run.fold.ranks.own)))
    return [*parts, _drawn(_time(run), width)]


def _numbers(now: RunStatus) -> Text:
    numbers = dict(now.numbers())
    rate = f"{now.counted}/s"
    speed = numbers.pop(rate, None)
    parts = [f"{name} {value}" for name, value in numbers.items() if name not in _IN_SENTENCE]
    if speed is not None:
        parts.insert(len(parts) - 4, f"{speed} {rate.replace('tokens', 'tok')}")
    return Text("  ".join(parts))


def _chart(rows: Sequence[AttemptRow], width: int, unit: str) -> Group:
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
    return Group(Text(f"loss, {unit}".removesuffix(", "), style="bold"), *lines)


def _cell(value: float | None, low: float, high: float, line: int) -> str:
    if value is None:
        return " "
    filled = min(1.0, max(0.02, (value - low) / (high - low))) * _HEIGHT - line
    return _EIGHTHS[int(min(1.0, max(0.0, filled)) * 8)]


def incidents(run: RunReader) -> Listing:
    """The incidents; opened, all that their journal lines say."""
    rows = [
        Row(
            key=str(one.number),
            cells=(
                str(one.number), when(one.group[0].time)[11:], f"{one.group[0].step:,}", one.deeds,
                one.verdict, rank_list(one.ranks()[:8]), one.cost(), one.recovered,
            ),
            detail=_card(one),
            is_red=True,
        )
        for one in reversed(episodes(run)[-_MOST_ROWS:])
    ]  # fmt: skip
    heads = ("", "when", "step", "what was done", "verdict", "ranks", "cost", "recovered")
    return Listing(title=f"incidents ({len(rows):,})", heads=heads, rows=rows)


def _card(one: Episode) -> str:
    lines = (
        f"{when(line.time)} {line.kind}, step {line.step:,}: {line.reason}\n"
        f"  {line.decision}{''.join(f'{chr(10)}  {name}' for name in line.sample_ids[:8])}"
        for line in one.lines[:100]
    )
    why = (f"Not so if: {cause}" for line in one.lines if (cause := line.cause.get("refutation")))
    return "\n\n".join([one.sentence(), *list(why)[:1], *lines])


def ranks(run: RunReader) -> Listing:
    """Each rank's median time of its own, its share of the others', and its GPU."""
    fold = run.fold.ranks
    medians = medians_of(fold.own)
    gpu = {name: values for name in GPU_QUANTITIES if (values := fold.newest.get(name))}
    rows = [
        Row(
            key=name,
            cells=(
                name, f"{number(medians[name])} s" if name in medians else "",
                *(_known(values.get(name, math.nan)) for values in gpu.values()),
            ),
        )
        for name in dict.fromkeys([*fold.own.names, *(rank for of in gpu.values() for rank in of)])
    ]  # fmt: skip
    units = (f"{what}, {unit}" for what, unit in (GPU_QUANTITIES[name] for name in gpu))
    return Listing(title="ranks", heads=("rank", "own time, median", *units), rows=rows)


def _known(value: float) -> str:
    return number(value) if value == value else ""


def checkpoints(run: RunReader) -> Listing:
    """The checkpoints on disk."""
    rows = [
        Row(
            key=str(one.serial),
            cells=(
                f"{one.step:,}", one.state.value, format_bytes(one.num_bytes),
                duration(max(0.0, run.clock() - one.time)),
            ),
        )
        for one in reversed(run.checkpoints())
    ]  # fmt: skip
    return Listing(title="the ring on disk", heads=("step", "state", "size", "age"), rows=rows)


def log(run: RunReader) -> Listing:
    """The newest lines of the journal."""
    first = max(0, len(run.fold.lines) - _MOST_ROWS)
    rows = [
        Row(
            key=str(place),
            cells=(when(one.time), f"{one.step:,}", one.kind, rank_list(one.ranks), one.reason),
            detail=f"{when(one.time)} {one.kind}, step {one.step:,}\n\n{one.reason}\n\n"
            f"{one.decision}",
            is_red=one.kind in INCIDENT_KINDS,
        )
        for place, one in enumerate(run.fold.lines[first:], start=first)
    ]
    return Listing(title="log", heads=("when", "step", "what", "ranks", "why"), rows=rows[::-1])


def _time(run: RunReader) -> Listing:
    whole, hour = run.time_spent(), run.last_hour() or {}
    total = sum(whole.values()) or 1.0
    rows = [
        Row(
            key=name,
            cells=(
                name.replace("_", " "), took(seconds), f"{seconds / total:.0%}",
                took(hour[name]) if name in hour else "",
            ),
        )
        for name, seconds in sorted(whole.items(), key=lambda one: -one[1])[:6]
        if seconds > 0
    ]  # fmt: skip
    heads = ("what", "in all", "share", "last hour")
    return Listing(title="where the time went", heads=heads, rows=rows)


def runs(glances: Sequence[Glance]) -> Listing:
    """A line for each run, as :data:`RUN_HEADS` names them; its key is the run's directory."""
    red = ("halted", "failed")
    rows = [Row(key=str(g.run_dir.out), cells=g.cells(), is_red=g.status in red) for g in glances]
    return Listing(title="runs", heads=RUN_HEADS, rows=rows)


def drawn_runs(glances: Sequence[Glance], width: int) -> Table:
    """The table of runs, for ``--once``."""
    return _drawn(runs(glances), width, most=len(glances))


def _drawn(listing: Listing, width: int, most: int = _MOST + 1) -> Table:
    """The newest rows of a listing; what is too wide is cut."""
    table = Table(
        title=listing.title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        padding=(0, 1, 0, 0),
    )
    rows = listing.rows[:most]
    for head, wide in zip(listing.heads, widths(listing.heads, rows, width), strict=True):
        table.add_column(Text(head, no_wrap=True, overflow="ellipsis"), width=wide, no_wrap=True)
    for row in rows:
        table.add_row(*cells_of(row))
    return table


def widths(heads: Sequence[str], rows: Sequence[Row], room: int) -> list[int]:
    """Of the columns, so that all are seen in a line of ``room`` characters if they can be.

    What is long is cut first: it is read in full where its row is opened.
    """
    wanted = [
        max(len(plain(text)) for text in [head, *(row.cells[place] for row in rows)])
        for place, head in enumerate(heads)
    ]
    found = list(wanted)
    for shortest in (_NARROW, _LEAST):
        cut = [place for place, length in enumerate(wanted) if length > shortest]
        while cut and sum(found) + 2 * len(found) > room:
            widest = max(cut, key=found.__getitem__)
            if found[widest] <= _LEAST:
                break
            found[widest] -= 1
    return found


def cells_of(row: Row) -> list[Text]:
    """The cells, on one line each, without anything that would control the terminal."""
    style = "red" if row.is_red else ""
    texts = (plain(cell).replace("\n", " ") for cell in row.cells)
    return [Text(text, style=style, no_wrap=True, overflow="ellipsis") for text in texts]
