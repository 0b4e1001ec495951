"""Everything that is drawn on the page, as SVG that is shown without the script and in print.

Curves of a run with its marks, charts with several lines, small curves of one number, heat maps,
bars of shares. The colours of heat maps are those of ``page.css``; they can be distinguished with
red-green blindness, and on light and dark backgrounds.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from runner.system.parsing import json_text
from runner.tools.report.attempts import AttemptRow
from runner.tools.report.chart_data import Chart, is_news
from runner.tools.report.formatting import cut
from runner.tools.report.grid import Grid
from runner.tools.report.markup import Html, join, tag
from runner.tools.report.run_reader import Mark

WIDTH, HEIGHT = 1000, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 16, 26
_COLUMNS = 500
_LIMIT_COLUMNS = 250
_MOST_CROSSES = 400
# The scale is cut if all values span more than this many times the span of the lower 98 %.
_SPANS = 6.0
_ROWS_HEIGHT, _LEAST_ROW, _MOST_ROW = 220, 1.8, 20  # pixels
_LABEL = 15  # pixels that a row's label takes
_LABEL_CHARACTERS = 12
_MOST_DOTS = 200
_NAMES, _NUMBERS = 96, 48  # pixels to the left
_BELOW = 22  # pixels for the labels below a figure
_LINES_HEIGHT = 170
MOST_LINES = 8  # distinguishable combinations of colour and dash
# The quantiles at which the scale starts and ends; values far above have a colour of their own.
_LOW_SHARE, _HIGH_SHARE = 0.01, 0.98
_FAR = 0.35  # share of the scale's length above its end
NONE, ABOVE = 0, 255
_COLOURS = 32  # of the scale; page.css has them
Point = tuple[float, float]


# -- scales ----------------------------------------------------------------------------------


def bounds(values: Sequence[float], *, is_log: bool) -> tuple[float, float] | None:
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
    if is_log:
        first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
        tens = [10.0**power for power in range(first, last + 1)]
        if len(tens) >= 2:
            return tens[:: max(1, len(tens) // 5)]
        return [low * (high / low) ** (index / 3) for index in range(4)]
    rough = (high - low) / 4
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step) + 1)]


def number(value: float) -> str:
    """A number on an axis: 0.003, 1.2, 17k."""
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.3g}{unit}"
    if abs(value) >= 1e3:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"


# -- curves of a run -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where attempts and values lie, in pixels; ``low`` and ``high`` in decades if ``is_log``."""

    low: float
    high: float
    last: int
    is_log: bool

    def x(self, attempt: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * attempt / self.last

    def y(self, value: float) -> float:
        height = math.log10(max(value, 1e-300)) if self.is_log else value
        fraction = min(1.0, max(0.0, (height - self.low) / (self.high - self.low)))
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - fraction)


def drawing(
    curve: Chart,
    rows: Sequence[AttemptRow],
    marks: Sequence[Mark],
    *,
    evaluations: Sequence[AttemptRow] = (),
    ring: Sequence[Mapping[str, Any]] = (),
) -> Html:
    """Draw the whole run: the lowest and the highest value of each column of pixels.

    Args:
        evaluations: rows with a held-out loss; drawn only in the chart of the loss.
        ring: checkpoints as :func:`runner.tools.report.chart_data.ring_of` returns them; likewise.
    """
    applied = [row for row in rows if row.is_applied]
    if curve.key != "loss":
        evaluations, ring = (), ()
    values = [
        *(getattr(row, curve.key) for row in applied),
        *(row.eval_loss for row in evaluations),
    ]
    scale = bounds(values, is_log=curve.is_log)
    assert scale is not None, "only curves with values are drawn"
    low, high = (math.log10(end) for end in scale) if curve.is_log else scale
    plane = _Plane(low, high, max(1, rows[-1].attempt), curve.is_log)
    marks_shown = marks[-_MOST_CROSSES:]
    return svg(
        f"{curve.title} over all attempted steps",
        *(_undone(mark, plane) for mark in marks_shown),
        *(_limit(rows, curve.limit, plane) if curve.limit else []),
        *_rulers(scale, rows, plane),
        *(_over(mark, plane) for mark in marks_shown),
        tag("path", d=_lines(applied, marks, curve.key, plane), cls="curve"),
        *_evaluations(evaluations, plane),
        *_ring(ring, plane),
        _crosses(curve, rows, plane),
        height=HEIGHT,
        cls=f"still {curve.key}",
        preserveAspectRatio=None,
    )


def _lines(
    rows: Sequence[AttemptRow],
    marks: Sequence[Mark],
    key: str,
    plane: _Plane,
) -> str:
    """One line for each stretch between two rollbacks."""
    ends = [mark.attempt for mark in marks if mark.line.kind == "rollback"]
    parts, at = [], 0
    for end in [*ends, rows[-1].attempt + 1]:
        begin = at
        while at < len(rows) and rows[at].attempt <= end:
            at += 1
        parts.append(_line(rows[begin:at], key, plane))
    return "".join(parts)


def _line(
    rows: Sequence[AttemptRow],
    key: str,
    plane: _Plane,
) -> str:
    """One path: first, lowest, highest and last value of each column."""
    spans: dict[int, list[float]] = {}
    step = (WIDTH - _LEFT - _RIGHT) / _COLUMNS
    for row in rows:
        value = getattr(row, key)
        if math.isfinite(value):
            spans.setdefault(int((plane.x(row.attempt) - _LEFT) / step), []).append(plane.y(value))
    points = []
    for column, heights in spans.items():
        x = _LEFT + column * step
        points.append(f"{x:.1f} {heights[0]:.1f}")
        if len(heights) > 1:
            points += [f"{x:.1f} {max(heights):.1f}", f"{x:.1f} {min(heights):.1f}"]
            points.append(f"{x:.1f} {heights[-1]:.1f}")
    return f"M{'L'.join(points)}" if points else ""


def _undone(mark: Mark, plane: _Plane) -> Html:
    if mark.line.kind != "rollback" or mark.back_to is None:
        return Html("")
    x = plane.x(mark.back_to)
    width = max(1.0, plane.x(mark.attempt) - x)
    height = HEIGHT - _TOP - _BOTTOM
    return tag("rect", x=f"{x:.1f}", y=_TOP, width=f"{width:.1f}", height=height, cls="undone")


def _limit(
    rows: Sequence[AttemptRow],
    key: str,
    plane: _Plane,
) -> list[Html]:
    """The band of values that the gate refuses: all above the lowest limit of each column."""
    spans: dict[int, float] = {}
    step = (WIDTH - _LEFT - _RIGHT) / _LIMIT_COLUMNS
    for row in rows:
        value = getattr(row, key)
        if math.isfinite(value):
            column = int((plane.x(row.attempt) - _LEFT) / step)
            spans[column] = min(value, spans.get(column, value))
    # A column of rows without a limit ends the band; a column without rows does not.
    known = {int((plane.x(row.attempt) - _LEFT) / step) for row in rows}
    bands, open_ = [], []
    for column in sorted(known):
        if column in spans:
            open_.append((_LEFT + column * step, plane.y(spans[column])))
        elif open_:
            bands += _band(open_)
            open_ = []
    return [*bands, *_band(open_)]


def _band(points: Sequence[tuple[float, float]]) -> list[Html]:
    if not points:
        return []
    edge = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    area = f"M{points[0][0]:.1f} {_TOP}L{edge}L{points[-1][0]:.1f} {_TOP}Z"
    return [tag("path", d=area, cls="limit"), tag("path", d=f"M{edge}", cls="limit-edge")]


def _evaluations(rows: Sequence[AttemptRow], plane: _Plane) -> list[Html]:
    """The held-out loss: a line, and a circle at each evaluation where there is room."""
    known = [row for row in rows if math.isfinite(row.eval_loss)]
    if not known:
        return []
    points = [(plane.x(row.attempt), plane.y(row.eval_loss)) for row in known]
    line = tag("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), cls="evaluated")
    circles, last_x = [], -math.inf
    for x, y in points:
        if x - last_x >= 12:
            circles.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.4, cls="evaluation-at"))
            last_x = x
    return [line, *circles]


def _ring(ring: Sequence[Mapping[str, Any]], plane: _Plane) -> list[Html]:
    """A triangle at each checkpoint on disk that is not tainted."""
    bottom = HEIGHT - _BOTTOM
    return [
        tag(
            "path",
            d=f"M{plane.x(one['attempt']):.1f} {bottom - 9}l5 9h-10z",
            cls=f"at-{_safe(one['state'])}",
        )
        for one in ring[-_MOST_CROSSES:]
        if one["state"] != "tainted"
    ]


def _crosses(
    curve: Chart,
    rows: Sequence[AttemptRow],
    plane: _Plane,
) -> Html:
    odd = [row for row in rows if not row.is_applied][-_MOST_CROSSES:]
    if curve.key not in ("loss", "grad_norm"):
        return Html("")
    crosses, redone = [], []
    for row in odd:
        value = getattr(row, curve.key)
        x, y = plane.x(row.attempt), plane.y(value) if math.isfinite(value) else _TOP
        if row.action == "redo":  # a circular arrow, open at the upper right
            redone.append(f"M{x + 4:.1f} {y - 2:.1f}a4.6 4.6 0 1 0 1 3m-1 -3v-5m0 5h-5")
        else:
            crosses.append(f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8")
    return join(
        tag("path", d="".join(shapes), cls=name)
        for shapes, name in ((crosses, "cross"), (redone, "redone"))
        if shapes
    )


def _over(mark: Mark, plane: _Plane) -> Html:
    x = plane.x(mark.attempt)
    if mark.line.kind == "rollback" and mark.back_to is not None:
        back = plane.x(mark.back_to)
        curve = f"M{x:.1f} {_TOP + 16}Q{(x + back) / 2:.1f} {_TOP - 14} {back:.1f} {_TOP + 16}"
        return tag("path", d=f"{curve}l5 -7m-5 7l8 -2", cls="arc")
    if mark.line.kind in ("start", "crash", "rebaseline", "halt") and is_news(mark):
        bottom = HEIGHT - _BOTTOM
        return tag("path", d=f"M{x:.1f} {_TOP}V{bottom}", cls=f"over {_safe(mark.line.kind)}")
    return Html("")


def _safe(kind: str) -> str:
    return kind if kind.isalpha() else "other"


def _rulers(
    scale: tuple[float, float],
    rows: Sequence[AttemptRow],
    plane: _Plane,
) -> list[Html]:
    shapes = []
    for value in ticks(scale, is_log=plane.is_log):
        y = plane.y(value)
        shapes.append(tag("path", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", cls="grid"))
        shapes.append(
            tag("text", number(value), x=_LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end", cls="tick")
        )
    for row in _spread(rows):
        x = plane.x(row.attempt)
        end = "start" if x < _LEFT + 20 else "end" if x > WIDTH - 40 else "middle"
        shapes.append(
            tag("text", f"{row.step:,}", x=f"{x:.1f}", y=HEIGHT - 8, text_anchor=end, cls="tick")
        )
    return shapes


def _spread(rows: Sequence[AttemptRow], count: int = 8) -> Iterable[AttemptRow]:
    """About ``count`` rows at about equal distances."""
    last = rows[-1].attempt
    chosen: dict[int, AttemptRow] = {}
    for row in rows:
        chosen.setdefault(count * row.attempt // max(1, last), row)
    return chosen.values()


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


def shares(parts: Sequence[tuple[str, float]], title: str) -> Html:
    """A bar of shares of a whole, side by side; each part's name is its CSS class."""
    whole = sum(amount for _, amount in parts) or 1.0
    shapes, x = [], 0.0
    for name, amount in parts:
        width = WIDTH * amount / whole
        if width > 0:
            tooltip = f"{name.replace('_', ' ')} {amount / whole:.1%}"
            shapes.append(piece(x, width, 26, f"kind {name}", tooltip))
        x += width
    return bar(title, shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A named line of a figure; points are in the order of ``x``, and a NaN leaves a gap."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label beside or below a figure.

    Attributes:
        at: pixels from the top for a label at the left, a share of the width for one below.
        text: what is printed.
        is_minor: shown only where the figure is wide.
        full: the tooltip.
    """

    at: float
    text: str
    is_minor: bool = False
    full: str | None = None


def framed(
    plane: Sequence[Html],
    *,
    height: float,
    left: Sequence[Label],
    below: Sequence[Label],
    title: str,
    names: bool = True,
) -> Html:
    """A figure of fixed height: a wider screen stretches only the plane.

    Args:
        plane: the shapes; their x coordinates are shares of the width.
        names: whether the labels at the left are names, which need more room than numbers.
    """
    width = _NAMES if names else _NUMBERS
    whole = math.ceil(height) + (_BELOW if below else 6)
    texts = (
        tag(
            "text", one.text, tag("title", one.full) if one.full else None,
            x=width - 6, y=f"{one.at:.1f}", text_anchor="end", cls="tick",
        )
        for one in left
    )  # fmt: skip
    ends = (
        tag(
            "text",
            one.text,
            x=f"{100 * one.at:.2f}%",
            y=whole - 5,
            text_anchor="start" if one.at < 0.02 else "end" if one.at > 0.95 else "middle",
            cls="tick wide" if one.is_minor else "tick",
        )
        for one in below
    )
    return tag(
        "div",
        tag("svg", *texts, width=width, height=whole, cls="names", aria_hidden="true"),
        tag("svg", tag("title", title), *plane, *ends, height=whole, cls="plane", role="img"),
        cls="framed",
    )


def stretched(shapes: Sequence[Html], height: float) -> Html:
    """Shapes drawn on 1000 units of width, stretched to the width of the plane."""
    return tag(
        "svg",
        *shapes,
        viewBox=f"0 0 {WIDTH} {height:g}",
        preserveAspectRatio="none",
        height=f"{height:g}",
        width="100%",
    )


def heat(picture: Picture, title: str, unit: str) -> Html:
    """A heat map of rows over inspections; the script shows the value under the pointer."""
    rows, columns = len(picture.names), len(picture.steps)
    height = min(_MOST_ROW, max(_LEAST_ROW, _ROWS_HEIGHT / rows))
    whole = rows * height
    description = f"{title}: {rows} rows over {columns} columns, from step {picture.steps[0]:,}"
    frame = tag("rect", x=0, y=0, width="100%", height=f"{whole:.1f}", cls="cells frame")
    return tag(
        "figure",
        tag("figcaption", title, tag("small", f" {unit}")),
        framed(
            [_cells(picture, whole), frame, *_above(picture, height)],
            height=whole,
            left=_row_labels(picture.names, height),
            below=_look_labels(picture),
            title=description,
        ),
        _scale(picture),
        cls="heat",
        data_heat=_for_script(picture),
    )


def _cells(picture: Picture, height: float) -> Html:
    """The cells of each colour as one path; neighbours in a row that look alike are one piece."""
    columns = len(picture.steps)
    pieces: dict[str, list[str]] = {}
    for row in range(len(picture.names)):
        colours = map(_colour, picture.places[row * columns : (row + 1) * columns])
        at = 0
        for colour, cells in groupby(colours):
            count = len(list(cells))
            pieces.setdefault(colour, []).append(f"M{at} {row}h{count}")
            at += count
    pieces.pop("", None)
    return tag(
        "svg",
        *(tag("path", d="".join(one), cls=colour) for colour, one in sorted(pieces.items())),
        viewBox=f"0 -0.5 {columns} {len(picture.names)}",
        preserveAspectRatio="none",
        width="100%",
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
    columns = len(picture.steps)
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


def _row_labels(names: Sequence[str], height: float) -> list[Label]:
    stride = 1 if height >= _LABEL else math.ceil((_LABEL + 2) / height)
    return [
        Label(at=max(10.0, (at + 0.5) * height + 4.5), text=cut(name, _LABEL_CHARACTERS), full=name)
        for at, name in enumerate(names)
        if at % stride == 0
    ]


def _look_labels(picture: Picture) -> list[Label]:
    columns = len(picture.steps)
    columns_shown = sorted({round(at * (columns - 1) / 4) for at in range(5)})
    return [
        Label(
            at=(at + 0.5) / columns if columns < 12 else at / (columns - 1),
            text=f"{picture.last_step if at == columns - 1 else picture.steps[at]:,}",
            is_minor=index % 2 == 1,
        )
        for index, at in enumerate(columns_shown)
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


def _for_script(picture: Picture) -> str:
    return json_text(
        {
            "names": list(picture.names),
            "steps": list(picture.steps),
            "width": picture.width,
            "low": float(f"{picture.low:.6g}"),
            "high": float(f"{picture.high:.6g}"),
            "log": picture.is_log,
            "cells": base64.b64encode(picture.places).decode(),
        },
        is_compact=True,
    )


def lines(
    title: str, unit: str, named: Sequence[Named], *, x_label: str, cls: str | None = None
) -> Html | None:
    """Lines over the same axis, and which is which; None without a number."""
    named = [one for one in named if any(math.isfinite(y) for _, y in one.points)]
    if cls is None:
        named = named[:MOST_LINES]
    points = [point for one in named for point in one.points if math.isfinite(point[1])]
    scale = bounds([y for _, y in points], is_log=False)
    if scale is None:
        return None
    low, high = scale
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def across(x: float) -> float:
        return WIDTH * (x - first) / max(1e-9, last - first)

    def up(y: float) -> float:
        share = min(1.0, max(0.0, (y - low) / (high - low)))
        return 6 + (_LINES_HEIGHT - 12) * (1 - share)

    grid = [(up(value), number(value)) for value in ticks(scale, is_log=False)]
    shapes = [
        *(tag("path", d=f"M0 {y:.1f}H{WIDTH}", cls="grid") for y, _ in grid),
        *(
            tag("path", d=path(one.points, across, up), cls=f"curve line{place % MOST_LINES}")
            for place, one in enumerate(named)
        ),
    ]
    drawn = framed(
        [stretched(shapes, _LINES_HEIGHT)],
        height=_LINES_HEIGHT,
        left=[Label(at=y + 4, text=words) for y, words in grid],
        below=_whole_labels(first, last),
        title=title,
        names=False,
    )
    return tag(
        "figure",
        tag("figcaption", title, tag("small", f" {unit}, over {x_label}")),
        drawn,
        key([one.name for one in named]),
        cls=cls,
    )


def _whole_labels(first: float, last: float) -> list[Label]:
    """Labels at integers: steps and positions are whole numbers."""
    if last <= first:
        return [Label(at=0.0, text=f"{first:,.0f}")]
    values = [value for value in ticks((first, last), is_log=False) if value == round(value)]
    return [
        Label(at=(value - first) / (last - first), text=f"{value:,.0f}", is_minor=index % 2 == 1)
        for index, value in enumerate(values)
    ]


def key(names: Sequence[str]) -> Html:
    """The legend: the name of each line."""
    return tag(
        "ul",
        *(tag("li", sign(index), name) for index, name in enumerate(names)),
        cls="legend",
    )


def sign(place: int) -> Html:
    """A short piece of a line in its colour and dash."""
    piece = tag("path", d="M0 4H30", cls=f"curve line{place % MOST_LINES}")
    return tag(
        "svg", piece, viewBox="0 0 30 8", width=30, height=8, cls="piece", aria_hidden="true"
    )


def path(
    points: Sequence[Point], across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    """The SVG path through the points; a value that is not finite leaves a gap."""
    commands, is_open = [], False
    for x, y in points:
        if math.isfinite(y):
            commands.append(f"{'L' if is_open else 'M'}{across(x):.1f} {up(y):.1f}")
        is_open = math.isfinite(y)
    return "".join(commands)


def small(title: str, points: Sequence[Point]) -> Html | None:
    """A small curve of one number over time, with its extremes; None without a finite value."""
    known = [y for _, y in points if math.isfinite(y)]
    if not known:
        return None
    low, high = min(known), max(known)
    is_log = low > 0 and high > 30 * low
    width, height = 300, 64

    def height_of(value: float) -> float:
        return math.log(value) if is_log else value

    if len(known) < 2:
        return tag("figure", tag("figcaption", title, " ", tag("b", number(known[-1]))))
    span = max(1e-12, height_of(high) - height_of(low))
    last = max(1, len(points) - 1)
    drawn = svg(
        f"{title}: {number(low)} to {number(high)}",
        tag(
            "path",
            d=path(
                [(float(at), y) for at, (_, y) in enumerate(points)],
                lambda at: 2 + (width - 4) * at / last,
                lambda y: height - 4 - (height - 8) * (height_of(y) - height_of(low)) / span,
            ),
            cls="curve",
        ),
        height=height,
        width=width,
    )
    range_text = f"{number(low)} to {number(high)}{', log scale' if is_log else ''}"
    return tag(
        "figure",
        tag("figcaption", title, " ", tag("b", number(known[-1]))),
        drawn,
        tag("small", range_text),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A grid in colours: ``places`` holds the colour index of each cell, row by row.

    A column stands for ``width`` inspections. An index is :data:`NONE`, :data:`ABOVE`, or from 1 at
    ``low`` to 254 at ``high``, linear in the logarithm if ``is_log``.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]
    last_step: int
    width: int
    low: float
    high: float
    is_log: bool
    places: bytes

    @property
    def has_above(self) -> bool:
        return ABOVE in self.places


def picture(grid: Grid, *, most_rows: int = 128) -> Picture | None:
    """The picture of a grid; None if it holds no finite value."""
    names, cells = _join_rows(grid.names, grid.cells(), most_rows)
    known = sorted(value for row in cells for value in row if math.isfinite(value))
    if not known:
        return None
    is_log = known[0] >= 0 and known[len(known) // 2] > 0
    placed = [math.log(value) for value in known if value > 0] if is_log else known
    low, high = (
        placed[int(_LOW_SHARE * (len(placed) - 1))],
        placed[int(_HIGH_SHARE * (len(placed) - 1))],
    )
    if placed[-1] <= high + _FAR * (high - low):
        high = placed[-1]
    if high - low < 1e-6:
        low, high = low - 0.05, high + 0.05
    places = bytearray()
    for row in cells:
        for value in row:
            places.append(_place(value, low, high, is_log=is_log))
    ends = (math.exp(low), math.exp(high)) if is_log else (low, high)
    return Picture(
        names=tuple(names),
        steps=tuple(grid.steps),
        last_step=grid.last_step,
        width=grid.width,
        low=ends[0],
        high=ends[1],
        is_log=is_log,
        places=bytes(places),
    )


def _place(value: float, low: float, high: float, *, is_log: bool) -> int:
    if not math.isfinite(value):
        return NONE
    placed = (math.log(value) if value > 0 else low) if is_log else value
    share = (placed - low) / (high - low)
    if share > 1 + _FAR:
        return ABOVE
    return 1 + round(253 * min(1.0, max(0.0, share)))


def _join_rows(
    names: Sequence[str], cells: Sequence[Sequence[float]], most_rows: int
) -> tuple[list[str], list[list[float]]]:
    """Merge neighbouring rows into at most ``most_rows``, keeping the highest value."""
    size = math.ceil(len(names) / most_rows) if names else 1
    if size == 1:
        return list(names), [list(row) for row in cells]
    labels, joined = [], []
    for at in range(0, len(names), size):
        group = list(names[at : at + size])
        labels.append(group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}")
        joined.append([_highest(column) for column in zip(*cells[at : at + size], strict=True)])
    return labels, joined


def _highest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)
