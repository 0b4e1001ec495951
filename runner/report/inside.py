"""Sections of what is inside: layers over time, loss by position and by source, ranks over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from runner.report.drawing import number
from runner.report.figure import Named, heat, lines, small
from runner.report.heat import Grid, picture
from runner.report.markup import Html, table, tag
from runner.report.run import RunReader
from runner.report.side import LAYER_QUANTITIES

T = TypeVar("T")
_SHOWN_LAYERS = 4  # quantities at once; the others are folded away
_MOST_SMALL = 12
_MOST_ROWS = 128
_PROFILES = 5
_UNIT = "nats per token"
_ALIKE = 1.12  # ranks that differ by less need no picture
_MOST_SOURCES = 40
_MODEL_WORDS = {
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
    """Heat maps of the layers, a row each, and the numbers of the whole model."""
    fold = run.sides.layers
    order = [*(name for name in LAYER_QUANTITIES if name in fold.grids)]
    order += [name for name in fold.grids if name not in LAYER_QUANTITIES]
    drawn = []
    for name in order:
        shown = picture(fold.grids[name], most_rows=_MOST_ROWS)
        if shown is not None:
            title = LAYER_QUANTITIES.get(name, name)
            drawn.append(heat(shown, title[:1].upper() + title[1:], "by layer, over looks"))
    numbers = _model_numbers(fold.model)
    if not drawn and not numbers:
        return None
    more = drawn[_SHOWN_LAYERS:]
    note = "A row is a layer, a column one or more looks into the model, labelled by step; a cell "
    note += "shows its farthest value, so that no single look is lost."
    return tag(
        "section",
        tag("h3", "Layers over time"),
        tag("p", note, cls="note") if drawn else None,
        *drawn[:_SHOWN_LAYERS],
        tag("details", tag("summary", f"{len(more)} more of each layer"), *more) if more else None,
        tag("div", *numbers, cls="smalls") if numbers else None,
        cls="layers",
    )


def _model_numbers(grid: Grid) -> list[Html]:
    made: list[Html] = []
    for name, row in zip(grid.names, grid.cells(), strict=True):
        if len(made) >= _MOST_SMALL:
            break
        points = [(float(step), value) for step, value in zip(grid.steps, row, strict=True)]
        drawn = small(_MODEL_WORDS.get(name, name), points)
        if drawn is not None:
            made.append(drawn)
    return made


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
        "Early and late in the run", "nats per token", profiles, x_words="positions of a sequence"
    )
    if drawn is None:
        return None
    words = "A right model is better the more it has read: the lines fall to the right. A jump "
    words += "says where documents are packed, masked or cut."
    return tag(
        "section",
        tag("h3", "Loss by position"),
        tag("p", words, cls="note"),
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
        lines("Held-out loss", _UNIT, _by_source(fold.losses), x_words="steps"),
        lines("Training loss", f"{_UNIT}, means", _by_source(fold.trained), x_words="steps"),
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
    """Ranks over time: who was slow, and whether its device was."""
    fold = run.sides.ranks
    drawn = []
    for grid, title in (
        (fold.own, "Own time of a step: data and Python before its first collective"),
        (fold.device, "One fixed computation on each device"),
    ):
        shown = picture(grid, most_rows=_MOST_ROWS) if len(grid.names) > 1 else None
        if shown is not None and shown.high <= _ALIKE * shown.low and not shown.has_above:
            words = f"{title}: about {number(shown.high)} s on all, all along."
            drawn.append(tag("p", words, cls="note"))
        elif shown is not None:
            drawn.append(heat(shown, title, "seconds, by rank, over looks"))
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
    """Whose median is the highest, in words."""
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


def _spread(some: Sequence[T], count: int) -> list[T]:
    if len(some) <= count:
        return list(some)
    return [some[round(at * (len(some) - 1) / (count - 1))] for at in range(count)]
