"""Sections on the model and the ranks: layers, loss by position and source, rank times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from runner.tools.report.drawing import Named, heat, lines, number, picture, small
from runner.tools.report.grid import Grid
from runner.tools.report.markup import Html, table, tag
from runner.tools.report.run_reader import RunReader
from runner.tools.report.side_files import LAYER_QUANTITIES

T = TypeVar("T")
_SHOWN_LAYERS = 4  # quantities shown at once; the others are collapsed
_MOST_SMALL = 12
_MOST_ROWS = 128
_PROFILES = 5
_UNIT = "nats per token"
_ALIKE = 1.12  # ranks whose times differ by a smaller factor need no picture
_MOST_SOURCES = 40
_MODEL_LABELS = {
    "grad_ratio": "largest gradient of a layer / median",
    "grad_first_to_last": "gradient, first / last layers",
    "weight_norm": "weight norm",
    "update_ratio": "update / weights",
    "residual_rms": "residual stream, RMS",
    "attention_logit": "largest attention logit",
    "logsumexp": "logsumexp of the logits, mean",
    "logsumexp_max": "logsumexp of the logits, largest",
    "adam_rms": "RMS of g/sqrt(v), Adam",
    "clip_share": "share of clipped steps",
}


def layers(run: RunReader) -> Html | None:
    """Heat maps with one row per layer, and the numbers of the whole model."""
    fold = run.sides.layers
    names = [*(name for name in LAYER_QUANTITIES if name in fold.grids)]
    names += [name for name in fold.grids if name not in LAYER_QUANTITIES]
    drawn = []
    for name in names:
        shown = picture(fold.grids[name], most_rows=_MOST_ROWS)
        if shown is not None:
            title = LAYER_QUANTITIES.get(name, name)
            drawn.append(heat(shown, title[:1].upper() + title[1:], "by layer, over inspections"))
    numbers = _model_numbers(fold.model)
    if not drawn and not numbers:
        return None
    hidden_figures = drawn[_SHOWN_LAYERS:]
    note = (
        "A row is a layer, a column one or more inspections of the model, labelled by step; a cell "
    )
    note += "shows its most unusual value, so that no single inspection is lost."
    return tag(
        "section",
        tag("h3", "Layers over time"),
        tag("p", note, cls="note") if drawn else None,
        *drawn[:_SHOWN_LAYERS],
        tag("details", tag("summary", f"{len(hidden_figures)} more of each layer"), *hidden_figures)
        if hidden_figures
        else None,
        tag("div", *numbers, cls="smalls") if numbers else None,
        cls="layers",
    )


def _model_numbers(grid: Grid) -> list[Html]:
    figures: list[Html] = []
    for name, row in zip(grid.names, grid.cells(), strict=True):
        if len(figures) >= _MOST_SMALL:
            break
        points = [(float(step), value) for step, value in zip(grid.steps, row, strict=True)]
        drawn = small(_MODEL_LABELS.get(name, name), points)
        if drawn is not None:
            figures.append(drawn)
    return figures


def position(run: RunReader) -> Html | None:
    """The loss along the sequence, early and late in the run."""
    fold = run.sides.layers
    some = _spread(fold.profiles, _PROFILES)
    profiles = []
    for step, profile in reversed(some):
        width = fold.positions / len(profile)
        points = [((at + 0.5) * width, loss) for at, loss in enumerate(profile)]
        profiles.append(Named(name=f"step {step:,}", points=points))
    drawn = lines(
        "Early and late in the run", "nats per token", profiles, x_label="positions of a sequence"
    )
    if drawn is None:
        return None
    note = (
        "A healthy model predicts better the more context it has: the lines fall to the right. A "
    )
    note += "jump shows where documents are packed, masked or cut."
    return tag(
        "section",
        tag("h3", "Loss by position"),
        tag("p", note, cls="note"),
        drawn,
        cls="position",
    )


def source(run: RunReader) -> Html | None:
    """Held-out loss and samples of each source of a mixture."""
    fold = run.fold.sources
    names = list(dict.fromkeys([*fold.samples, *fold.newest]))
    if not names:
        return None
    whole = sum(fold.samples.values()) or 1
    rows = [
        [
            name,
            f"{fold.samples.get(name, 0):,}",
            f"{fold.samples.get(name, 0) / whole:.1%}",
            f"{fold.newest[name]:.4f}" if name in fold.newest else "",
        ]
        for name in names[:_MOST_SOURCES]
    ]
    more = len(names) - _MOST_SOURCES
    return tag(
        "section",
        tag("h3", "Loss by source"),
        lines("Held-out loss", _UNIT, _by_source(fold.losses), x_label="steps"),
        lines("Training loss", f"{_UNIT}, means", _by_source(fold.trained), x_label="steps"),
        table(["source", "samples in attempted steps", "share", "held-out loss"], rows),
        tag("p", f"and {more:,} more sources", cls="note") if more > 0 else None,
        cls="source",
    )


def _by_source(grid: Grid) -> list[Named]:
    return [
        Named(name=name, points=list(zip(map(float, grid.steps), row, strict=True)))
        for name, row in zip(grid.names, grid.means(), strict=True)
    ]


def ranks(run: RunReader) -> Html | None:
    """Times of the ranks: which rank was slow, and whether its device was."""
    fold = run.sides.ranks
    drawn = []
    for grid, title in (
        (fold.own, "Own time of a step: data and Python before its first collective"),
        (fold.device, "One fixed computation on each device"),
    ):
        shown = picture(grid, most_rows=_MOST_ROWS) if len(grid.names) > 1 else None
        if shown is not None and shown.high <= _ALIKE * shown.low and not shown.has_above:
            sentence = f"{title}: about {number(shown.high)} s on all ranks, the whole time."
            drawn.append(tag("p", sentence, cls="note"))
        elif shown is not None:
            drawn.append(heat(shown, title, "seconds, by rank, over inspections"))
    if not drawn:
        return None
    return tag(
        "section",
        tag("h3", "Ranks over time"),
        tag("p", slowest(fold.own), cls="note"),
        *drawn,
        cls="ranks",
    )


def slowest(grid: Grid) -> str:
    """A sentence about the rank with the highest median; empty without values."""
    medians = {}
    for name, row in zip(grid.names, grid.cells(), strict=True):
        known = sorted(value for value in row if value == value)
        if known:
            medians[name] = known[len(known) // 2]
    if not medians:
        return ""
    usual = sorted(medians.values())[len(medians) // 2]
    name, most = max(medians.items(), key=lambda one: one[1])
    return f"Slowest: {name}, {number(most)} s; the median {number(usual)} s."


def _spread(items: Sequence[T], count: int) -> list[T]:
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]
