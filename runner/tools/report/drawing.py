"""A curve as SVG, which is shown without the script and in print."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from runner.tools.report.curve import Curve, is_news
from runner.tools.report.markup import Html, join, tag
from runner.tools.report.rows import Row
from runner.tools.report.run import Mark

WIDTH, HEIGHT = 1000, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 8, 16, 26
_COLUMNS = 500
_LIMIT_COLUMNS = 250
_MOST_CROSSES = 400
# The scale is cut if all values span more than this many times the span of the lower 98 %.
_SPANS = 6.0


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


def drawing(
    curve: Curve,
    rows: Sequence[Row],
    marks: Sequence[Mark],
    *,
    evaluations: Sequence[Row] = (),
    ring: Sequence[Mapping[str, Any]] = (),
) -> Html:
    """Draw the whole run: the lowest and the highest value of each column of pixels.

    Args:
        evaluations: rows with a held-out loss; drawn only in the chart of the loss.
        ring: checkpoints as :func:`runner.tools.report.curve.ring_of` returns them; likewise.
    """
    applied = [row for row in rows if row.is_applied]
    is_loss = curve.key == "loss"
    held_out = [row.eval_loss for row in evaluations] if is_loss else []
    values = [*(getattr(row, curve.key) for row in applied), *held_out]
    scale = bounds(values, is_log=curve.is_log)
    assert scale is not None, "only curves with values are drawn"
    low, high = (math.log10(end) for end in scale) if curve.is_log else scale
    last = max(1, rows[-1].attempt)

    def across(attempt: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * attempt / last

    def up(value: float) -> float:
        height = math.log10(max(value, 1e-300)) if curve.is_log else value
        fraction = min(1.0, max(0.0, (height - low) / (high - low)))
        return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - fraction)

    return tag(
        "svg",
        tag("title", f"{curve.title} over all attempted steps"),
        *(_undone(mark, across) for mark in marks[-_MOST_CROSSES:]),
        *(_limit(rows, curve.limit, across, up) if curve.limit else []),
        *_rulers(curve, scale, rows, across, up),
        *(_over(mark, across) for mark in marks[-_MOST_CROSSES:]),
        tag("path", d=_lines(applied, marks, curve.key, across, up), cls="curve"),
        *(_evaluations(evaluations, across, up) if is_loss else []),
        *(_ring(ring, across) if is_loss else []),
        _crosses(curve, rows, across, up),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        cls=f"still {curve.key}",
        role="img",
    )


def _lines(
    rows: Sequence[Row],
    marks: Sequence[Mark],
    key: str,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> str:
    """One line for each stretch between two rollbacks."""
    ends = [mark.attempt for mark in marks if mark.line.kind == "rollback"]
    parts, at = [], 0
    for end in [*ends, rows[-1].attempt + 1]:
        begin = at
        while at < len(rows) and rows[at].attempt <= end:
            at += 1
        parts.append(_line(rows[begin:at], key, across, up))
    return "".join(parts)


def _line(
    rows: Sequence[Row], key: str, across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    """One path: first, lowest, highest and last value of each column."""
    spans: dict[int, list[float]] = {}
    step = (WIDTH - _LEFT - _RIGHT) / _COLUMNS
    for row in rows:
        value = getattr(row, key)
        if math.isfinite(value):
            spans.setdefault(int((across(row.attempt) - _LEFT) / step), []).append(up(value))
    points = []
    for column, heights in spans.items():
        x = _LEFT + column * step
        points.append(f"{x:.1f} {heights[0]:.1f}")
        if len(heights) > 1:
            points += [f"{x:.1f} {max(heights):.1f}", f"{x:.1f} {min(heights):.1f}"]
            points.append(f"{x:.1f} {heights[-1]:.1f}")
    return f"M{'L'.join(points)}" if points else ""


def _undone(mark: Mark, across: Callable[[float], float]) -> Html:
    if mark.line.kind != "rollback" or mark.back_to is None:
        return Html("")
    x = across(mark.back_to)
    width = max(1.0, across(mark.attempt) - x)
    height = HEIGHT - _TOP - _BOTTOM
    return tag("rect", x=f"{x:.1f}", y=_TOP, width=f"{width:.1f}", height=height, cls="undone")


def _limit(
    rows: Sequence[Row], key: str, across: Callable[[float], float], up: Callable[[float], float]
) -> list[Html]:
    """The band of values that the gate refuses: all above the lowest limit of each column."""
    spans: dict[int, float] = {}
    step = (WIDTH - _LEFT - _RIGHT) / _LIMIT_COLUMNS
    for row in rows:
        value = getattr(row, key)
        if math.isfinite(value):
            column = int((across(row.attempt) - _LEFT) / step)
            spans[column] = min(value, spans.get(column, value))
    # A column of rows without a limit ends the band; a column without rows does not.
    known = {int((across(row.attempt) - _LEFT) / step) for row in rows}
    bands, open_ = [], []
    for column in sorted(known):
        if column in spans:
            open_.append((_LEFT + column * step, up(spans[column])))
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


def _evaluations(
    rows: Sequence[Row], across: Callable[[float], float], up: Callable[[float], float]
) -> list[Html]:
    """The held-out loss: a line, and a circle at each evaluation where there is room."""
    known = [row for row in rows if math.isfinite(row.eval_loss)]
    if not known:
        return []
    points = [(across(row.attempt), up(row.eval_loss)) for row in known]
    line = tag("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), cls="evaluated")
    circles, last_x = [], -math.inf
    for x, y in points:
        if x - last_x >= 12:
            circles.append(tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.4, cls="evaluation-at"))
            last_x = x
    return [line, *circles]


def _ring(ring: Sequence[Mapping[str, Any]], across: Callable[[float], float]) -> list[Html]:
    """A triangle at each checkpoint on disk that is not tainted."""
    bottom = HEIGHT - _BOTTOM
    return [
        tag(
            "path",
            d=f"M{across(one['attempt']):.1f} {bottom - 9}l5 9h-10z",
            cls=f"at-{_safe(one['state'])}",
        )
        for one in ring[-_MOST_CROSSES:]
        if one["state"] != "tainted"
    ]


def _crosses(
    curve: Curve,
    rows: Sequence[Row],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> Html:
    odd = [row for row in rows if not row.is_applied][-_MOST_CROSSES:]
    if curve.key not in ("loss", "grad_norm"):
        return Html("")
    crosses, redone = [], []
    for row in odd:
        value = getattr(row, curve.key)
        x, y = across(row.attempt), up(value) if math.isfinite(value) else _TOP
        if row.action == "redo":  # a circular arrow, open at the upper right
            redone.append(f"M{x + 4:.1f} {y - 2:.1f}a4.6 4.6 0 1 0 1 3m-1 -3v-5m0 5h-5")
        else:
            crosses.append(f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8")
    return join(
        tag("path", d="".join(shapes), cls=name)
        for shapes, name in ((crosses, "cross"), (redone, "redone"))
        if shapes
    )


def _over(mark: Mark, across: Callable[[float], float]) -> Html:
    x = across(mark.attempt)
    if mark.line.kind == "rollback" and mark.back_to is not None:
        back = across(mark.back_to)
        curve = f"M{x:.1f} {_TOP + 16}Q{(x + back) / 2:.1f} {_TOP - 14} {back:.1f} {_TOP + 16}"
        return tag("path", d=f"{curve}l5 -7m-5 7l8 -2", cls="arc")
    if mark.line.kind in ("start", "crash", "rebaseline", "halt") and is_news(mark):
        bottom = HEIGHT - _BOTTOM
        return tag("path", d=f"M{x:.1f} {_TOP}V{bottom}", cls=f"over {_safe(mark.line.kind)}")
    return Html("")


def _safe(kind: str) -> str:
    return kind if kind.isalpha() else "other"


def _rulers(
    curve: Curve,
    scale: tuple[float, float],
    rows: Sequence[Row],
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> list[Html]:
    shapes = []
    for value in ticks(scale, is_log=curve.is_log):
        y = up(value)
        shapes.append(tag("path", d=f"M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}", cls="grid"))
        shapes.append(
            tag("text", number(value), x=_LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end", cls="tick")
        )
    for row in _spread(rows):
        x = across(row.attempt)
        end = "start" if x < _LEFT + 20 else "end" if x > WIDTH - 40 else "middle"
        shapes.append(
            tag("text", f"{row.step:,}", x=f"{x:.1f}", y=HEIGHT - 8, text_anchor=end, cls="tick")
        )
    return shapes


def _spread(rows: Sequence[Row], count: int = 8) -> Iterable[Row]:
    """About ``count`` rows at about equal distances."""
    last = rows[-1].attempt
    chosen: dict[int, Row] = {}
    for row in rows:
        chosen.setdefault(count * row.attempt // max(1, last), row)
    return chosen.values()


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


def bar(parts: Sequence[tuple[str, float]], title: str) -> Html:
    """A bar of shares of a whole, side by side; each part's name is its CSS class."""
    whole = sum(amount for _, amount in parts) or 1.0
    shapes, x = [], 0.0
    for name, amount in parts:
        width = WIDTH * amount / whole
        if width > 0:
            shapes.append(
                tag(
                    "rect",
                    tag("title", f"{name.replace('_', ' ')} {amount / whole:.1%}"),
                    x=f"{x:.2f}",
                    y=0,
                    width=f"{width:.2f}",
                    height=26,
                    cls=f"kind {name}",
                )
            )
        x += width
    return tag(
        "svg",
        tag("title", title),
        join(shapes),
        viewBox=f"0 0 {WIDTH} 26",
        preserveAspectRatio="none",
        cls="bar",
        role="img",
    )
