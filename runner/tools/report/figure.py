"""Static figures: heat maps over time, charts with several lines, small curves of one number."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runner.system.parsing import json_text
from runner.tools.report.drawing import WIDTH, bounds, number, ticks
from runner.tools.report.formatting import cut
from runner.tools.report.heat import ABOVE, Picture
from runner.tools.report.markup import Html, join, tag

_ROWS_HEIGHT, _LEAST_ROW, _MOST_ROW = 220, 1.8, 20  # pixels
_LABEL = 15  # pixels that a row's label takes
_LABEL_CHARACTERS = 12
_MOST_DOTS = 200
_NAMES, _NUMBERS = 96, 48  # pixels to the left
_BELOW = 22  # pixels for the labels below a figure
_HEIGHT = 170
MOST_LINES = 8  # distinguishable combinations of colour and dash
Point = tuple[float, float]


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
    cells = tag(
        "image",
        href=picture.png(),
        x=0,
        y=0,
        width="100%",
        height=f"{whole:.1f}",
        preserveAspectRatio="none",
        cls="cells",
    )
    frame = tag("rect", x=0, y=0, width="100%", height=f"{whole:.1f}", cls="frame")
    return tag(
        "figure",
        tag("figcaption", title, tag("small", f" {unit}")),
        framed(
            [cells, frame, *_above(picture, height)],
            height=whole,
            left=_row_labels(picture.names, height),
            below=_look_labels(picture),
            title=description,
        ),
        _scale(picture),
        cls="heat",
        data_heat=_for_script(picture),
    )


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


def lines(title: str, unit: str, named: Sequence[Named], *, x_label: str) -> Html | None:
    """A few lines over the same axis, and which is which; None without a number."""
    named = [one for one in named if any(math.isfinite(y) for _, y in one.points)][:MOST_LINES]
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
        return 6 + (_HEIGHT - 12) * (1 - share)

    grid = [(up(value), number(value)) for value in ticks(scale, is_log=False)]
    shapes = [
        *(tag("path", d=f"M0 {y:.1f}H{WIDTH}", cls="grid") for y, _ in grid),
        *(
            tag("path", d=path(one.points, across, up), cls=f"curve line{place}")
            for place, one in enumerate(named)
        ),
    ]
    drawn = framed(
        [stretched(shapes, _HEIGHT)],
        height=_HEIGHT,
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
    drawn = tag(
        "svg",
        tag("title", f"{title}: {number(low)} to {number(high)}"),
        tag(
            "path",
            d=path(
                [(float(at), y) for at, (_, y) in enumerate(points)],
                lambda at: 2 + (width - 4) * at / last,
                lambda y: height - 4 - (height - 8) * (height_of(y) - height_of(low)) / span,
            ),
            cls="curve",
        ),
        viewBox=f"0 0 {width} {height}",
        preserveAspectRatio="none",
        role="img",
    )
    range_text = f"{number(low)} to {number(high)}{', log scale' if is_log else ''}"
    return tag(
        "figure",
        tag("figcaption", title, " ", tag("b", number(known[-1]))),
        drawn,
        tag("small", range_text),
    )
