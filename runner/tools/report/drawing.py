"""Everything that is drawn on the page, as SVG that is shown without the script and in print.

Curves of a run with its marks, charts with several lines, small curves of one number, heat maps,
bars of shares; and the same curves as columns of numbers, for the script. The colours of heat maps
are those of ``page.css``; they can be distinguished with red-green blindness, and on light and dark
backgrounds.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from runner.system.parsing import json_text
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.episode import Episode, episodes
from runner.tools.report.markup import Html, cut, figure, join, legend, tag
from runner.tools.report.run_reader import RunReader
from runner.tools.report.side_files import ValueGrid

WIDTH, HEIGHT = 1000, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 16, 26
_COLUMNS = 500
_MOST_NUMBERS = 40
_MOST_MARKS = 2000
MOST_INCIDENTS = 300
_STEP_LABELS = 8
# The scale is cut if all values span more than this many times the span of the lower 98 %.
_SPANS = 6.0
_ROWS_HEIGHT, _LEAST_ROW, _MOST_ROW = 220, 1.8, 20  # pixels
_MOST_ROWS = 128
_LABEL = 15  # pixels that a row's label takes
_LABEL_CHARACTERS = 12
_MOST_DOTS = 200
_NAMES = 96  # pixels to the left
_BELOW = 22  # pixels for the labels below a figure
MOST_LINES = 8  # distinguishable combinations of colour and dash
# The quantiles at which the scale starts and ends; values far above have a colour of their own.
_LOW_SHARE, _HIGH_SHARE = 0.01, 0.98
_FAR = 0.35  # share of the scale's length above its end
NONE, ABOVE = 0, 255
_COLOURS = 32  # of the scale; page.css has them
Point = tuple[float, float]


# -- the curves of a run, for the script -----------------------------------------------------


class Chart(NamedTuple):
    """One chart: a field of :class:`AttemptRow` over attempts."""

    key: str
    title: str
    unit: str = ""
    is_log: bool = False


CURVES = (
    Chart("loss", "Loss"),
    Chart("grad_norm", "Gradient norm", "before clipping, log scale", is_log=True),
    Chart("lr", "Learning rate"),
    Chart("tokens_per_second", "Tokens per second"),  # or samples
)
# Journal kinds drawn over the curves; a discard shows in the row of its step.
_DRAWN_KINDS = ("start", "crash", "rebaseline", "halt", "rollback", "redo", "replica_mismatch")


def shown(rows: Sequence[AttemptRow], counted: str) -> list[Chart]:
    """The curves that have at least one value to draw: positive on a logarithmic scale.

    ``counted`` is what the speed is of, tokens or samples.
    """
    applied = [row for row in rows if row.is_applied]
    has_speed = any(row.tokens_per_second > 0 for row in applied)
    return [
        curve._replace(title=curve.title.replace("Tokens", counted.capitalize()))
        for curve in CURVES
        if bounds((getattr(row, curve.key) for row in applied), is_log=curve.is_log)
        and (has_speed or curve.key != "tokens_per_second")
    ]


def data_of(run: RunReader, rows: Sequence[AttemptRow] | None = None) -> dict[str, Any]:
    """What the script draws for a run: ``rows`` (all), and the current state of the rest."""
    marks = [mark for mark in run.marks() if mark.line.kind in _DRAWN_KINDS and mark.is_news]
    return {
        "generation": run.generation,
        "counted": run.counted,
        "attempts": len(run.fold.attempts),
        "rows": _columns(run.fold.thinned.rows() if rows is None else rows),
        "means": [[_short(value, 5) for value in column] for column in run.fold.thinned.means()],
        "evaluations": evaluations(run),
        "marks": [
            {
                "attempt": mark.attempt,
                "back": mark.back_to,
                "kind": mark.line.kind,
                "step": mark.line.step,
                "words": mark.line.decision[:200],
            }
            for mark in marks[-_MOST_MARKS:]
        ],
        "incidents": [
            [one.number, *one.attempts, one.sentence(), " ".join(one.kinds)]
            for one in episodes(run)[-MOST_INCIDENTS:]
            if one.attempts
        ],
        "ring": ring_of(run),
    }


def _columns(rows: Sequence[AttemptRow]) -> dict[str, Any]:
    """Integers as differences, null for what is not finite, unusual steps by row index."""
    plain = ("tokens_per_second", "loss_limit", "norm_limit")
    return {
        "attempt": _differences(row.attempt for row in rows),
        "step": _differences(row.step for row in rows),
        "loss": [_short(row.loss, 6) for row in rows],
        "grad_norm": [_short(row.grad_norm, 6) for row in rows],
        "lr": [_short(row.lr if row.is_applied else math.nan, 4) for row in rows],
        **{name: [_short(getattr(row, name), 4) for row in rows] for name in plain},
        "odd": [
            [index, row.action, row.verdict]
            for index, row in enumerate(rows)
            if not row.is_applied or row.verdict != "Clean"
        ],
    }


def evaluations(run: RunReader) -> list[list[Any]]:
    """Attempt, step and held-out loss of each evaluation."""
    rows = run.fold.evaluated.rows()
    return [[row.attempt, row.step, _short(row.eval_loss, 6)] for row in rows]


def ring_of(run: RunReader) -> list[dict[str, Any]]:
    """The checkpoints on disk at the attempts that made them."""
    stored = ((one, run.fold.attempts.attempt_of(one.step)) for one in run.checkpoints())
    return [
        {"attempt": attempt, "step": one.step, "state": one.state.value}
        for one, attempt in stored
        if attempt is not None
    ]


def script_json(tree: Mapping[str, Any]) -> str:
    """JSON that is safe in a script element: it cannot close the element or open another."""
    text = json_text(tree, is_compact=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _differences(values: Iterable[int]) -> list[int]:
    return [value - before for before, value in pairwise((0, *values))]


def _short(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


# -- scales ----------------------------------------------------------------------------------


def bounds(values: Iterable[float], *, is_log: bool) -> tuple[float, float] | None:
    """The scale of a chart: all values except outliers that would flatten the rest."""
    known = sorted(
        math.log10(value) if is_log else value
        for value in values
        if math.isfinite(value) and (value > 0 or not is_log)
    )
    if not known:
        return None
    low, high = known[0], known[-1]
    usual = known[min(len(known) - 1, int(0.98 * len(known)))]
    if usual > low and high - low > _SPANS * (usual - low):
        high = usual + (usual - low) * 0.5
    if high <= low:
        low, high = low - max(1e-9, abs(low) * 0.05), high + max(1e-9, abs(high) * 0.05)
    room = 0.05 * (high - low)
    low, high = low - (room if is_log or low - room > 0 or low <= 0 else low), high + room
    return (10**low, 10**high) if is_log else (low, high)


def ticks(scale: tuple[float, float], *, is_log: bool) -> list[float]:
    """About four round numbers on a scale."""
    low, high = scale
    for digits in ((1,), (1, 2, 5)) if is_log else ():
        powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        found = [digit * 10.0**power for power in powers for digit in digits]
        inside = [value for value in found if low <= value <= high]
        if len(inside) >= 2:
            return inside[:: max(1, len(inside) // 5)]
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def number(value: float) -> str:
    """A number on an axis: 0.003, 1.2, 17k."""
    for unit, size, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4), ("", 1.0, 1e3)):
        if abs(value) >= least:
            return f"{value / size:.0f}" if not unit else f"{value / size:.3g}{unit}"
    return f"{value:.3g}" if abs(value) >= 1e-3 or not value else f"{value:.1e}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plane:
    """Where points lie, in pixels from the upper left; values beyond the scale lie on its edge.

    ``first`` to ``last`` lie between ``left`` and ``right``, the scale between ``bottom`` and
    ``top``.
    """

    first: float
    last: float
    scale: tuple[float, float]
    is_log: bool = False
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    top: float = _TOP
    bottom: float = HEIGHT - _BOTTOM

    def x(self, place: float) -> float:
        share = (place - self.first) / max(1e-9, self.last - self.first)
        return self.left + (self.right - self.left) * share

    def y(self, value: float) -> float:
        low, high = self.scale
        if self.is_log:
            low, high, value = (math.log10(max(one, 1e-300)) for one in (low, high, value))
        share = (value - low) / max(1e-12, high - low)
        return self.top + (self.bottom - self.top) * (1 - min(1.0, max(0.0, share)))

    def at(self, place: float, value: float) -> str:
        return f"{self.x(place):.1f} {self.y(value):.1f}"

    def path(self, points: Iterable[Point]) -> str:
        """The SVG path through the points; a value that is not finite leaves a gap."""
        commands, is_open = [], False
        for place, value in points:
            if math.isfinite(value):
                commands.append(f"{'L' if is_open else 'M'}{self.at(place, value)}")
            is_open = math.isfinite(value)
        return "".join(commands)

    def rulers(self, places: Iterable[tuple[float, str]]) -> list[Html]:
        """Lines at round numbers, and labels below at some places."""
        shapes = []
        for value in ticks(self.scale, is_log=self.is_log):
            y = self.y(value)
            line = tag("path", d=f"M{self.left} {y:.1f}H{self.right}", cls="grid")
            shapes += [line, _tick(number(value), self.left - 6, y + 4, "end")]
        for place, words in places:
            x = self.x(place)
            anchor = "start" if x < _LEFT + 20 else "end" if x > WIDTH - 40 else "middle"
            shapes.append(_tick(words, x, HEIGHT - 8, anchor))
        return shapes


def _tick(words: str, x: float, y: float, anchor: str) -> Html:
    return tag("text", words, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor, cls="tick")


# -- curves of a run -------------------------------------------------------------------------


def drawing(run: RunReader, curve: Chart, found: Sequence[Episode]) -> Html:
    """The applied steps of the whole run and its numbered incidents, for paper and no script."""
    rows = run.fold.thinned.rows()
    applied = [row for row in rows if row.is_applied]
    scale = bounds((getattr(row, curve.key) for row in applied), is_log=curve.is_log)
    assert scale is not None, "only curves with values are drawn"
    last = max(1, rows[-1].attempt)
    plane = _Plane(first=0, last=last, scale=scale, is_log=curve.is_log)
    steps = {_STEP_LABELS * row.attempt // last: row for row in reversed(rows)}
    places = [(plane.x(one.attempts[0]), one.number) for one in found if one.attempts]
    places = places[-_MOST_NUMBERS:]
    # The line starts again after a rollback.
    ends = [mark.attempt + 0.5 for mark in run.marks() if mark.line.kind == "rollback"]
    points: list[Point] = []
    for _, column in groupby(applied, key=lambda row: _COLUMNS * row.attempt // last):
        known = [(row.attempt, getattr(row, curve.key)) for row in column]
        known = [point for point in known if math.isfinite(point[1])] or known[:1]
        points += {min(known, key=itemgetter(1)), max(known, key=itemgetter(1))}
    path = plane.path(sorted([*points, *((end, math.nan) for end in ends)]))
    return svg(
        f"{curve.title} over all attempted steps",
        *plane.rulers((row.attempt, f"{row.step:,}") for row in steps.values()),
        tag("path", d="".join(f"M{x:.1f} {_TOP}V{plane.bottom}" for x, _ in places), cls="marked"),
        *(_tick(str(number), x, _TOP - 4, "middle") for x, number in places),
        tag("path", d=path, cls="curve"),
        height=HEIGHT,
        cls=f"still {curve.key}",
        preserveAspectRatio=None,
    )


# -- lines -----------------------------------------------------------------------------------


def lines(
    title: str, unit: str, named: Mapping[str, Sequence[Point]], *, x_label: str, cls: str = ""
) -> Html | None:
    """Named lines over the same axis, and which is which; None without a finite number."""
    drawn = {name: points for name, points in named.items() if any(y == y for _, y in points)}
    if not cls:
        drawn = dict(list(drawn.items())[:MOST_LINES])
    finite = [point for points in drawn.values() for point in points if point[1] == point[1]]
    scale = bounds([y for _, y in finite], is_log=False)
    if scale is None:
        return None
    first, last = min(x for x, _ in finite), max(x for x, _ in finite)
    plane = _Plane(first=first, last=last, scale=scale)
    # Steps and positions are whole numbers.
    places = [first]
    if last > first:
        places = [x for x in ticks((first, last), is_log=False) if x == round(x)]
    shapes = [
        tag("path", d=plane.path(points), cls=f"curve line{place % MOST_LINES}")
        for place, points in enumerate(drawn.values())
    ]
    rulers = plane.rulers((x, f"{x:,.0f}") for x in places)
    picture = svg(title, *rulers, *shapes, height=HEIGHT, cls="still", preserveAspectRatio=None)
    signs = legend((sign(place), name) for place, name in enumerate(drawn))
    return figure(title, f"{unit}, over {x_label}", picture, signs, cls=cls or None)


def sign(place: int) -> Html:
    """A short piece of a line in its colour and dash."""
    piece = tag("path", d="M0 4H30", cls=f"curve line{place % MOST_LINES}")
    return tag(
        "svg", piece, viewBox="0 0 30 8", width=30, height=8, cls="piece", aria_hidden="true"
    )


def small(title: str, values: Sequence[float]) -> Html | None:
    """A small curve of one number over time, with its extremes; None without a finite value."""
    # Some are measured at few of the inspections: the line joins those.
    points = [(place, value) for place, value in enumerate(values) if value == value]
    known = [value for _, value in points]
    if not known:
        return None
    caption = tag("figcaption", title, " ", tag("b", number(known[-1])))
    if len(known) < 2:
        return tag("figure", caption)
    low, high = min(known), max(known)
    is_log = low > 0 and high > 30 * low
    plane = _Plane(
        first=0, last=max(1, len(values) - 1), scale=(low, high), is_log=is_log,
        left=2, right=298, top=4, bottom=60,
    )  # fmt: skip
    range_text = f"{number(low)} to {number(high)}"
    curve = tag("path", d=plane.path(points), cls="curve")
    drawn = svg(f"{title}: {range_text}", curve, height=64, width=300)
    return tag("figure", caption, drawn, tag("small", range_text + ", log scale" * is_log))


# -- figures ---------------------------------------------------------------------------------


def svg(title: str, *shapes: object, height: int, width: int = WIDTH, **attributes: object) -> Html:
    """A drawing with a tooltip, as wide as the page lets it be."""
    frame = {"viewBox": f"0 0 {width} {height}", "preserveAspectRatio": "none"}
    return tag("svg", tag("title", title), *shapes, **(frame | attributes), role="img")


def bar(title: str, shapes: Iterable[Html], height: int = 26) -> Html:
    """Rectangles side by side."""
    return svg(title, *shapes, height=height, cls="bar")


def piece(start: float, width: float, height: int, cls: str, tooltip: str | None = None) -> Html:
    """A rectangle of a bar."""
    title = tag("title", tooltip) if tooltip else None
    return tag("rect", title, x=f"{start:.2f}", y=0, width=f"{width:.2f}", height=height, cls=cls)


def shares(parts: Mapping[str, float], title: str) -> Html:
    """A bar of shares of a whole, side by side; each part's name is its CSS class."""
    whole = sum(parts.values()) or 1.0
    shapes, x = [], 0.0
    for name, amount in parts.items():
        width = WIDTH * amount / whole
        if width > 0:
            tooltip = f"{name.replace('_', ' ')} {amount / whole:.1%}"
            shapes.append(piece(x, width, 26, f"kind {name}", tooltip))
        x += width
    return bar(title, shapes)


class Label(NamedTuple):
    """A label beside or below a figure.

    ``at``: pixels from the top for a label at the left, a share of the width for one below.
    ``is_minor``: shown only where the figure is wide. ``full``: the tooltip.
    """

    at: float
    text: str
    is_minor: bool = False
    full: str | None = None


def framed(
    *plane: Html, height: float, left: Sequence[Label], below: Sequence[Label], title: str
) -> Html:
    """A figure of fixed height: a wider screen stretches only the plane.

    Args:
        plane: the shapes; their x coordinates are shares of the width.
    """
    whole = math.ceil(height) + (_BELOW if below else 6)
    texts = (
        tag(
            "text", one.text, tag("title", one.full) if one.full else None,
            x=_NAMES - 6, y=f"{one.at:.1f}", text_anchor="end", cls="tick",
        )
        for one in left
    )  # fmt: skip
    ends = (
        tag(
            "text", one.text, x=f"{100 * one.at:.2f}%", y=whole - 5,
            text_anchor="start" if one.at < 0.02 else "end" if one.at > 0.95 else "middle",
            cls="tick wide" if one.is_minor else "tick",
        )
        for one in below
    )  # fmt: skip
    return tag(
        "div",
        tag("svg", *texts, width=_NAMES, height=whole, cls="names", aria_hidden="true"),
        tag("svg", tag("title", title), *plane, *ends, height=whole, cls="plane", role="img"),
        cls="framed",
    )


def stretched(shapes: Iterable[Html], size: tuple[int, float], **attributes: object) -> Html:
    """Shapes drawn on ``size`` units, stretched to the width of the plane and so many pixels."""
    box = {"viewBox": f"0 0 {size[0]} {size[1]:g}", "height": f"{size[1]:g}"} | attributes
    return tag("svg", *shapes, **box, preserveAspectRatio="none", width="100%")


# -- heat maps -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A grid in colours: ``places`` holds the colour index of each cell, row by row.

    An index is :data:`NONE`, :data:`ABOVE`, or from 1 at ``low`` to 254 at ``high``, linear in the
    logarithm if ``is_log``. Many rows are merged, ``names`` are those that are left.
    """

    grid: ValueGrid
    names: list[str]
    low: float
    high: float
    is_log: bool
    places: bytes

    @property
    def has_above(self) -> bool:
        return ABOVE in self.places


def picture(grid: ValueGrid) -> Picture | None:
    """The picture of a grid; None if it holds no finite value."""
    names, cells = list(grid.names), np.array(grid.cells())
    size = math.ceil(len(names) / _MOST_ROWS)
    if size > 1:  # merge neighbouring rows, keeping the highest value
        groups = [names[at : at + size] for at in range(0, len(names), size)]
        names = [f"{group[0]} to {group[-1]}" if group[1:] else group[0] for group in groups]
        cells = np.fmax.reduceat(cells, range(0, len(cells), size), axis=0)
    known = np.sort(cells[np.isfinite(cells)])
    if not len(known):
        return None
    is_log = bool(known[0] >= 0 and known[len(known) // 2] > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        placed = np.log(cells) if is_log else cells
        scaled = np.log(known[known > 0]) if is_log else known
    low, high = (float(scaled[int(at * (len(scaled) - 1))]) for at in (_LOW_SHARE, _HIGH_SHARE))
    if scaled[-1] <= high + _FAR * (high - low):
        high = float(scaled[-1])
    if high - low < 1e-6:
        low, high = low - 0.05, high + 0.05
    share = (placed - low) / (high - low)
    colours = np.where(share > 1 + _FAR, ABOVE, 1 + np.rint(253 * np.clip(share, 0, 1)))
    places = np.where(np.isnan(cells), NONE, colours).astype(np.uint8).tobytes()
    if is_log:
        low, high = math.exp(low), math.exp(high)
    return Picture(grid=grid, names=names, low=low, high=high, is_log=is_log, places=places)


def heat(picture: Picture, title: str, unit: str) -> Html:
    """A heat map of rows over inspections; the script shows the value under the pointer."""
    steps, rows = picture.grid.steps, len(picture.names)
    height = _row_height(rows)
    frame = tag("rect", x=0, y=0, width="100%", height=f"{rows * height:.1f}", cls="cells frame")
    data = {
        "names": picture.names,
        "steps": steps,
        "width": picture.grid.width,
        "low": float(f"{picture.low:.6g}"),
        "high": float(f"{picture.high:.6g}"),
        "log": picture.is_log,
        "cells": base64.b64encode(picture.places).decode(),
    }
    return figure(
        title,
        unit,
        framed(
            _cells(picture, rows * height),
            frame,
            *_above(picture, height),
            height=rows * height,
            left=_row_labels(picture.names),
            below=_step_labels(picture.grid),
            title=f"{title}: {rows} rows over {len(steps)} columns, from step {steps[0]:,}",
        ),
        _scale(picture),
        cls="heat",
        data_heat=json_text(data, is_compact=True),
    )


def _row_height(rows: int) -> float:
    return min(_MOST_ROW, max(_LEAST_ROW, _ROWS_HEIGHT / rows))


def _row_labels(names: Sequence[str]) -> list[Label]:
    """The names that have room beside their rows."""
    height = _row_height(len(names))
    stride = 1 if height >= _LABEL else math.ceil((_LABEL + 2) / height)
    return [
        Label(max(10.0, (at + 0.5) * height + 4.5), cut(name, _LABEL_CHARACTERS), full=name)
        for at, name in enumerate(names)
        if at % stride == 0
    ]


def histograms(title: str, rows: Mapping[str, Sequence[float]]) -> Html:
    """Absolute values by row, on one logarithmic scale.

    Args:
        rows: by name the quantiles 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, and the largest;
            not all are 0.
    """
    stride = math.ceil(len(rows) / _MOST_ROWS)
    names, values = list(rows)[::stride], list(rows.values())[::stride]
    height = _row_height(len(names))
    high = max(map(max, values))
    low = max(high * 1e-8, min(value for row in values for value in row if value > 0))
    room = 0.01 + 0.02 * math.log10(high / low)
    ends = math.log10(low) - room, math.log10(high) + room
    scale = 10 ** ends[0], 10 ** ends[1]
    plane = _Plane(first=ends[0], last=ends[1], scale=scale, left=0, right=WIDTH)

    def x(value: float) -> str:
        return f"{plane.x(math.log10(max(low, value))):.0f}"

    rows_at = [((at + 0.5) * height, [*map(x, row)]) for at, row in enumerate(values)]
    paths = {
        "thin": (f"M{row[0]} {y:.1f}H{row[7]}" for y, row in rows_at),
        "half": (f"M{row[2]} {y:.1f}H{row[4]}" for y, row in rows_at),
        "most": (f"M{row[8]} {y - height / 3:.1f}v{height / 1.5:.1f}" for y, row in rows_at),
    }
    shapes = [tag("path", d="".join(one), cls=f"spread {name}") for name, one in paths.items()]
    drawn = framed(
        stretched(shapes, (WIDTH, height * len(names))),
        height=height * len(names),
        left=_row_labels(names),
        below=[Label(plane.x(math.log10(v)) / WIDTH, number(v)) for v in ticks(scale, is_log=True)],
        title=title,
    )
    remark = "absolute, log scale: the middle half, 1 to 99.9 %, and the largest, a tick"
    return figure(title, remark, drawn)


def _cells(picture: Picture, height: float) -> Html:
    """The cells of each colour as one path; neighbours in a row that look alike are one piece."""
    columns = len(picture.grid.steps)
    pieces: dict[str, list[str]] = {}
    for row in range(len(picture.names)):
        colours = map(_colour, picture.places[row * columns : (row + 1) * columns])
        at = 0
        for colour, cells in groupby(colours):
            count = len(list(cells))
            pieces.setdefault(colour, []).append(f"M{at} {row}h{count}")
            at += count
    pieces.pop("", None)
    return stretched(
        (tag("path", d="".join(one), cls=colour) for colour, one in sorted(pieces.items())),
        (columns, height),
        viewBox=f"0 -0.5 {columns} {len(picture.names)}",
        height=f"{height:.1f}",
        cls="map",
    )


def _colour(place: int) -> str:
    """The CSS class of a cell; empty for a cell without a value."""
    if place in (NONE, ABOVE):
        return "above" if place else ""
    return f"c{(place - 1) * _COLOURS // (ABOVE - 1)}"


def _above(picture: Picture, height: float) -> list[Html]:
    """A dot on each value far above the scale: visible without colour and in narrow cells."""
    columns = len(picture.grid.steps)
    indices = [at for at, place in enumerate(picture.places) if place == ABOVE]
    return [
        tag(
            "circle",
            cx=f"{100 * (at % columns + 0.5) / columns:.2f}%",
            cy=f"{(at // columns + 0.5) * height:.1f}",
            r=3.2,
            cls="spike",
        )
        for at in indices[:_MOST_DOTS]
    ]


def _step_labels(grid: ValueGrid) -> list[Label]:
    columns = len(grid.steps)
    places = sorted({round(at * (columns - 1) / 4) for at in range(5)})
    return [
        Label(
            (at + 0.5) / columns if columns < 12 else at / (columns - 1),
            f"{grid.last_step if at == columns - 1 else grid.steps[at]:,}",
            is_minor=index % 2 == 1,
        )
        for index, at in enumerate(places)
    ]


def _scale(picture: Picture) -> Html:
    """The legend of the colours."""
    above = join([tag("span", cls="above"), "far above"]) if picture.has_above else None
    return tag(
        "p",
        tag("span", number(picture.low)),
        tag("span", cls="ramp"),
        tag("span", number(picture.high)),
        tag("span", above) if above else None,
        tag("span", "log scale" if picture.is_log else "linear scale"),
        cls="scale",
    )
