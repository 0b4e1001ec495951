"""The sections of the page but for incidents; a section without data is left out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import median, median_high
from typing import Any

from runner.policy.retention.records import State
from runner.system.units import duration, format_bytes
from runner.tools.report.attempts import AttemptIndex, AttemptRow
from runner.tools.report.drawing import (
    WIDTH,
    Label,
    Point,
    bar,
    drawing,
    framed,
    heat,
    histograms,
    lines,
    number,
    picture,
    piece,
    shares,
    shown,
    sign,
    small,
    stretched,
)
from runner.tools.report.episode import Episode, command
from runner.tools.report.incident import CHANGE_KINDS, Line, ints, list_of
from runner.tools.report.markup import (
    Html,
    details,
    figure,
    join,
    legend,
    note,
    section,
    status_class,
    table,
    tag,
    took,
    when,
)
from runner.tools.report.run_reader import RunReader, RunStatus
from runner.tools.report.side_files import (
    GPU_QUANTITIES,
    LAYER_QUANTITIES,
    TIERS,
    TierCopy,
    ValueGrid,
)

_MOST_RANGES = 100
_MOST_METRICS = 64
_STRIP = 22
_TIME_LABELS = {
    "productive": "steps that count",
    "recomputed": "steps that had to be computed again",
    "discarded": "discarded steps",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "rollback": "rollback",
    "restart": "restart, including down time",
    "data_wait": "waiting for data",
    "other": "start-up and everything else",
}
_LEGEND = {
    "curve": "applied steps",
    "cross": "not applied",
    "redo": "computed again",
    "arc": "rollback, back to",
    "start": "restart",
    "rebaseline": "new baseline",
    "halt": "halt",
    "limit": "gate's limit: above is not applied",
    "undone": "undone by a rollback",
    "eval": "held-out loss",
    "proven": "proven checkpoint on disk",
}
_SHOWN_LAYERS = 2  # quantities shown at once; the others are collapsed
_MOST_SMALL = 14
_PROFILES = 5
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
    "noise_scale": "gradient noise scale, tokens",
    "grad_noise": "gradient noise of a token",
    "grad_signal": "true gradient, squared norm",
    "expert_balance": "least even router: 0 collapsed, 1 even",
}
_MOST_BARS = 250
_SHOWN_ROWS, _MOST_ROWS = 10, 60
_LANE = 84
_STATE_LABELS = {
    State.committed: "whole, not proven yet",
    State.clean: "proven",
    State.tainted: "not to be used",
}
_POINTS = 600  # of a run that is compared


_BADGES = {
    "running": "\u25b6 running",
    "starting": "\u25b6 starting",
    "silent": "\u26a0 silent",
    "halted": "\u25a0 halted",
    "failed": "\u2716 failed",
    "done": "\u2714 done",
    "preempted": "\u23f8 preempted",
}


def head(run: RunReader, now: RunStatus, found: Sequence[Episode], place: int) -> Html:
    """How the run is, what happened last, what to do, and its numbers."""
    losses = dict(now.numbers())
    loss = "".join(f"; {name} {losses[name]}" for name in ("loss", "held-out") if name in losses)
    words, again = now.to_do(), command(run)
    copy = tag("button", "copy", type="button", cls="copy", hidden=True)
    line = tag("p", tag("code", again), " ", copy, cls="command") if words and again else None
    tiles = (
        tag("div", tag("dt", name), tag("dd", value))
        for name, value in losses.items()
        if name not in ("loss", "held-out")
    )
    damaged = run.num_damaged
    happened = tag("p", "No incident so far.")
    if found:
        last = f"#{found[-1].anchor(place)}"
        link = tag("a", f"Incident {len(found):,}", href=last)
        happened = tag("p", link, f": {found[-1].sentence()}")
    return join(
        [
            tag(
                "div",
                tag("p", badge(now.status), f" {now.when()} ", tag("b", f"{now.state()}{loss}.")),
                happened,
                tag("p", f"To do: {words or 'nothing.'}"),
                line,
                tag("p", now.safety(), cls="note"),
                cls=f"state {status_class(now.status)}",
            ),
            tag("dl", *tiles, cls="tiles"),
            note(f"{damaged:,} lines could not be read; they are left out.") if damaged else None,
        ]
    )


def badge(status: str) -> Html:
    """A run's status, with its sign and colour."""
    word = tag("strong", _BADGES.get(status, status), cls="badge status")
    return tag("span", word, cls=status_class(status))


def where_time_went(run: RunReader, now: RunStatus) -> Html | None:
    """How the time was spent: in total, and in the last hour."""
    whole = run.time_spent()
    if sum(whole.values()) <= 0:
        return None
    spans = {f"In all: {duration(now.wall_seconds)}": whole}
    heads = ["", "what", "in all", "share"]
    if (hour := run.last_hour()) is not None:
        spans["In the last hour"] = hour
        heads += ["last hour", "share"]
    bars = (
        tag("figure", tag("figcaption", title), shares(spent, title))
        for title, spent in spans.items()
    )
    rows = [
        [
            tag("span", cls=f"key {name}"),
            _TIME_LABELS.get(name, name),
            *(cell for spent in spans.values() for cell in _amount(spent, name)),
        ]
        for name in whole
        if any(spent.get(name, 0) > 0 for spent in spans.values())
    ]
    kept = (name for name in whole if whole[name] > 0)
    return section(
        "time",
        "Where the time went",
        *bars,
        legend((f"key {name}", _TIME_LABELS.get(name, name)) for name in kept),
        details("In numbers", table(heads, rows)),
    )


def _amount(spent: Mapping[str, float], name: str) -> list[str]:
    seconds, whole = spent.get(name, 0.0), sum(spent.values()) or 1.0
    share = seconds / whole
    return [took(seconds), f"{share:.1%}" if share >= 0.001 or not seconds else "< 0.1%"]


def curves(run: RunReader, found: Sequence[Episode], number: int) -> Html | None:
    """The charts: static ones, which the script replaces."""
    drawn_curves = shown(run.fold.thinned.rows(), run.counted)
    if not drawn_curves:
        return None
    figures = [
        figure(
            curve.title,
            run.unit if curve.key == "loss" else curve.unit,
            drawing(run, curve, found),
            cls="chart",
            data_curve=curve.key,
        )
        for curve in drawn_curves
    ]
    words = "Over attempted steps, labelled by step; a step that was tried again appears twice."
    return section(
        "curves",
        "Curves",
        tag("p", "Point at a chart to read its numbers.", cls="readout", hidden=True),
        figures[0],
        tag("div", cls="controls", hidden=True),
        legend_of(run),
        note(words),
        *figures[1:],
        data_run=number,
    )


def legend_of(run: RunReader) -> Html:
    """The legend of the curves, for the signs that occur."""
    rows = run.fold.thinned.rows()
    present = {"curve"} | {mark.line.kind for mark in run.marks()} & {"rebaseline", "halt"}
    present |= {"redo" if row.action == "redo" else "cross" for row in rows if not row.is_applied}
    for is_present, names in (
        (run.fold.history.rollbacks, ("arc", "undone")),
        (run.fold.history.num_starts > 1, ("start",)),
        (any(row.loss_limit == row.loss_limit for row in rows), ("limit",)),
        (run.fold.eval_loss is not None, ("eval",)),
        (any(one.state is State.clean for one in run.checkpoints()), ("proven",)),
    ):
        present |= set(names) if is_present else set()
    return legend((f"sign {name}", text) for name, text in _LEGEND.items() if name in present)


# -- the stream ------------------------------------------------------------------------------


def stream(run: RunReader) -> Html | None:
    """How much of the stream of samples was read, and which ranges are skipped."""
    cursor, settings = run.fold.cursor, run.settings()
    configured = [ints(pair) for pair in list_of(settings.get("data.skip"))]
    skips = [(pair[0], pair[1]) for pair in configured if len(pair) == 2]
    ranges = sorted([*run.fold.history.ledger, *skips])
    if not cursor:
        return None
    skipped = sum(stop - start for start, stop in ranges)
    end = max([cursor, *(stop for _, stop in ranges)])
    planned = max(end, _planned(settings) + skipped)
    count = f"{len(ranges):,} range{'' if len(ranges) == 1 else 's'}"
    of = f" of about {planned:,}" if planned > end else ""
    lost = f"{skipped:,} skipped for good in {count}" if ranges else "none skipped"
    rows = [[f"{start:,}", f"{stop - 1:,}", f"{stop - start:,}"] for start, stop in ranges]
    more = len(rows) - _MOST_RANGES
    skipped_rows = details(
        f"skipped: {count}",
        table(["from", "to", "samples"], rows[:_MOST_RANGES]),
        note(f"and {more:,} more in the journal") if more > 0 else None,
    )
    keys = {
        "read": "read",
        "skipped": "skipped for good" if ranges else "",
        "to-come": "to come" if planned > end else "",
        "streamed": "in the stream",
        "held": "held out",
    }
    return section(
        "stream",
        "The stream",
        _strip(planned, cursor, ranges),
        tag("p", f"{cursor:,} positions read or skipped{of}; {lost}."),
        *_held_out(settings),
        legend((f"key {name}", label) for name, label in keys.items() if label),
        skipped_rows if rows else None,
    )


def _planned(settings: Mapping[str, Any]) -> int:
    """The positions that the whole run reads; 0 if unknown."""
    steps, size = settings.get("steps"), settings.get("batch.global_size")
    if type(steps) is not int or type(size) is not int or min(steps, size) < 0:
        return 0
    return min(steps * size, 1 << 60)


def _held_out(settings: Mapping[str, Any]) -> list[Html]:
    """The samples that are held out of the stream, as a share of all."""
    if settings.get("data.val_path"):
        return [note("The held-out loss is computed on separate files (data.val_path).")]
    share = settings.get("data.held_out")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
        return []
    width = max(3.0, WIDTH * share)
    pieces = [
        piece(0, WIDTH - width, _STRIP, "streamed"),
        piece(WIDTH - width, width, _STRIP, "held"),
    ]
    drawn = bar(f"All samples: {share:.2%} held out", pieces, _STRIP)
    return [drawn, tag("p", f"{share:.2%} of all samples are held out of the stream.")]


def _strip(end: int, cursor: int, ranges: Sequence[tuple[int, int]]) -> Html:
    parts = [piece(0, WIDTH * cursor / end, _STRIP, "read", f"read up to {cursor:,}")]
    # Wide enough to see, but many of them must not cover the part that was read.
    least_width = max(0.6, min(4.0, 250 / max(1, len(ranges))))
    for start, stop in ranges[-2000:]:
        width = max(least_width, WIDTH * (stop - start) / end)
        x = min(WIDTH * start / end, WIDTH - width)
        parts.append(piece(x, width, _STRIP, "skipped", f"skipped {start:,} to {stop - 1:,}"))
    return bar("The stream of samples: read and skipped", parts, _STRIP)


# -- the model and the ranks -----------------------------------------------------------------


def layers(run: RunReader) -> Html | None:
    """Heat maps with one row per layer, and the numbers of the whole model."""
    fold = run.fold.layers
    drawn = []
    for name in dict.fromkeys([*LAYER_QUANTITIES, *fold.grids]):
        if name in fold.grids and (shown := picture(fold.grids[name])) is not None:
            title = LAYER_QUANTITIES.get(name, name)
            drawn.append(heat(shown, title[:1].upper() + title[1:], "by layer, over inspections"))
    rows = zip(fold.model.names, fold.model.cells(), strict=True)
    smalls = (small(_MODEL_LABELS.get(name, name), row) for name, row in rows)
    numbers = [drawn_number for drawn_number in smalls if drawn_number is not None][:_MOST_SMALL]
    step, told = fold.histograms
    spreads = [histograms(name.capitalize(), rows) for name, rows in told.items() if rows]
    if not drawn and not numbers:
        return None
    remark = (
        "A row is a layer, a column one or more inspections of the model, labelled by step; a cell "
        "shows its most unusual value, so that no single inspection is lost."
    )
    more = drawn[_SHOWN_LAYERS:]
    return section(
        "layers",
        "Layers over time",
        note(remark) if drawn else None,
        *drawn[:_SHOWN_LAYERS],
        details(f"{len(more)} more of each layer", *more) if more else None,
        details(f"Histograms at step {step:,}", *spreads) if spreads else None,
        tag("div", *numbers, cls="smalls") if numbers else None,
    )


def position(run: RunReader) -> Html | None:
    """The loss along the sequence, early and late in the run."""
    fold = run.fold.layers
    last = len(fold.profiles) - 1
    places = {round(index * last / (_PROFILES - 1)) for index in range(_PROFILES) if last >= 0}
    profiles: dict[str, list[Point]] = {}
    for step, profile in (fold.profiles[at] for at in sorted(places, reverse=True)):
        width = fold.positions / len(profile)
        profiles[f"step {step:,}"] = [((at + 0.5) * width, y) for at, y in enumerate(profile)]
    drawn = lines(
        "Early and late in the run", "nats per token", profiles, x_label="positions of a sequence"
    )
    if drawn is None:
        return None
    remark = (
        "A healthy model predicts better the more context it has: the lines fall to the right. A "
        "jump shows where documents are packed, masked or cut."
    )
    return section("position", "Loss by position", note(remark), drawn)


def source(run: RunReader) -> Html | None:
    """Held-out loss and samples of each source of a mixture."""
    fold = run.fold.sources
    names = list(dict.fromkeys([*fold.samples, *fold.newest]))
    if not names:
        return None
    whole, rows = sum(fold.samples.values()) or 1, []
    for name in names[:_MOST_SOURCES]:
        count = fold.samples.get(name, 0)
        loss = f"{fold.newest[name]:.4f}" if name in fold.newest else ""
        rows.append([name, f"{count:,}", f"{count / whole:.1%}", loss])
    more = len(names) - _MOST_SOURCES
    means = f"{run.unit}, means".removeprefix(", ")
    trained = lines("Training loss", means, _curves(fold.trained), x_label="steps")
    return section(
        "source",
        "Loss by source",
        lines("Held-out loss", run.unit, _curves(fold.losses), x_label="steps"),
        table(["source", "samples in attempted steps", "share", "held-out loss"], rows),
        details("Training loss", trained) if trained is not None else None,
        note(f"and {more:,} more sources") if more > 0 else None,
    )


def own_metrics(run: RunReader) -> Html | None:
    """A drawing for each metric of the user's own: in training, and evaluated."""
    fold, drawn = run.fold.own, []
    trained, evaluated = _curves(fold.trained), _curves(fold.evaluated)
    for name in list(dict.fromkeys([*trained, *evaluated]))[:_MOST_METRICS]:
        of_groups = {
            f"evaluated, {group.removeprefix(f'{name}/')}": points
            for group, points in evaluated.items()
            if group.startswith(f"{name}/")
        }
        curves = {"in training": trained.get(name, []), "evaluated": evaluated.get(name, [])}
        is_group = any(name.startswith(f"{other}/") for other in evaluated)
        if not is_group or name in trained:
            drawn.append(lines(name, "means", {**curves, **of_groups}, x_label="steps"))
    if not any(drawn):
        return None
    return section("metrics", "Metrics of the model or the loop", *drawn)


def _curves(grid: ValueGrid) -> dict[str, list[Point]]:
    rows = zip(grid.names, grid.means(), strict=True)
    return {name: list(zip(grid.steps, row, strict=True)) for name, row in rows}


def ranks(run: RunReader) -> Html | None:
    """Times of the ranks: which rank was slow, and whether its device was."""
    fold = run.fold.ranks
    drawn = []
    rows = [
        (fold.own, "Own time of a step: data and Python before its first collective", "seconds"),
        (fold.device, "One fixed computation on each device", "seconds"),
    ]
    rows = [row for row in rows if len(row[0].names) > 1]
    rows += [
        (fold.grids[name], f"{what.capitalize()} of each GPU", unit)
        for name, (what, unit) in GPU_QUANTITIES.items()
    ]
    for grid, title, unit in rows:
        shown = picture(grid)
        if shown is not None and shown.high <= _ALIKE * shown.low and not shown.has_above:
            usual = number(median(cell for row in grid.cells() for cell in row if cell == cell))
            drawn.append(note(f"{title}: about {usual} {unit} on all ranks, the whole time."))
        elif shown is not None:
            drawn.append(heat(shown, title, f"{unit}, by rank, over inspections"))
    if not drawn:
        return None
    return section("ranks", "Ranks over time", note(slowest(fold.own)), *drawn)


def slowest(grid: ValueGrid) -> str:
    """A sentence about the rank with the highest median; empty for fewer than two with values."""
    medians = medians_of(grid)
    if len(medians) < 2:
        return ""
    name, most = max(medians.items(), key=lambda one: one[1])
    usual = median(value for other, value in medians.items() if other != name)
    times = f" ({number(most / usual)} times)" if usual > 0 else ""
    return f"Slowest: {name}, {number(most)} s; the median of the others {number(usual)} s{times}."


def medians_of(grid: ValueGrid) -> dict[str, float]:
    """By row, of those with a value."""
    rows = zip(grid.names, grid.cells(), strict=True)
    known = {name: [value for value in row if value == value] for name, row in rows}
    return {name: median_high(values) for name, values in known.items() if values}


# -- the ring --------------------------------------------------------------------------------


def ring(run: RunReader) -> Html | None:
    """The checkpoints that exist now, and the lifetimes of all so far."""
    drawn, rows = _life(run), _stored(run)
    if drawn is None and not rows:
        return None
    heads = ["step", "state", "tier", "size", "saved"]
    older = rows[_SHOWN_ROWS:_MOST_ROWS]
    return section(
        "ring",
        "The ring",
        drawn,
        table(heads, rows[:_SHOWN_ROWS]) if rows else None,
        details(f"{len(older):,} older", table(heads, older)) if older else None,
    )


def _stored(run: RunReader) -> list[list[object]]:
    """A row for each checkpoint that exists: newest first, memory before disk and remote."""
    rows: list[tuple[int, int, list[object]]] = []

    def add(serial: int, step: int, state: State, tier: str, size: str, saved: float) -> None:
        badge = tag("span", _STATE_LABELS[state], cls=f"badge {state.value}")
        age = f"{duration(max(0.0, run.clock() - saved))} ago"
        rows.append((-serial, TIERS.index(tier), [f"{step:,}", badge, tier, size, age]))

    for one in run.checkpoints():
        add(one.serial, one.step, one.state, "disk", format_bytes(one.num_bytes), one.time)
    # Snapshots in memory are gone once the processes that held them have ended.
    for tier in ("memory", "remote") if run.is_alive() else ("remote",):
        for copy in run.fold.ring.live(tier):
            add(copy.serial, copy.step, _changes(copy)[-1][1], tier, "", copy.saved)
    return [row for _, _, row in sorted(rows, key=lambda one: one[:2])]


def _changes(copy: TierCopy) -> list[tuple[float, State]]:
    """Since when the copy had each of its states."""
    times = zip((copy.saved, copy.clean, copy.tainted), _STATE_LABELS, strict=True)
    return [(time, state) for time, state in times if time]


def _life(run: RunReader) -> Html | None:
    """Draw one lane per tier, and in it one bar per copy; a higher bar is a later step."""
    copies = {tier: run.fold.ring.copies(tier) for tier in TIERS}
    everything = [copy for of_tier in copies.values() for copy in of_tier]
    if not everything:
        return None
    last_step = max(1, *(copy.step for copy in everything))
    saved = [copy.saved for copy in everything]
    end = max(run.last_time(), min(saved) + 1.0, *saved)
    across = _across(run.fold.attempts, min(saved), end)
    tiers = [tier for tier in TIERS if copies[tier]]
    figures = (
        framed(
            stretched(_lane(tier, copies[tier], last_step, end, across), (WIDTH, _LANE)),
            height=_LANE,
            left=[Label(15, tier), Label(_LANE - 6, f"{len(copies[tier]):,} in all")],
            below=_steps(run.fold.attempts) if tier == tiers[-1] else [],
            title=f"Checkpoints on tier {tier}, from their save to their end",
        )
        for tier in tiers
    )
    remark = "a bar is a checkpoint from its save to its end; higher is a later step"
    labels = ((f"sign life-{state.value}", label) for state, label in _STATE_LABELS.items())
    return figure("Over time", remark, *figures, legend(labels), cls="life")


def _across(places: AttemptIndex, first: float, end: float) -> Callable[[float], float]:
    """Map seconds since the epoch to x units: by attempt, like the curves, if there are any."""
    last = len(places) - 1

    def across(time: float) -> float:
        if last > 0:
            fraction = bisect_left(range(last + 1), time, key=places.time_of) / last
        else:
            fraction = (time - first) / (end - first)
        return WIDTH * min(1.0, max(0.0, fraction))

    return across


def _lane(
    tier: str,
    copies: Sequence[TierCopy],
    last_step: int,
    end: float,
    across: Callable[[float], float],
) -> list[Html]:
    shapes = [tag("rect", x=0, y=0, width=WIDTH, height=_LANE, cls="lane")]

    # If there are very many: existing ones first, then tainted, then longest lived.
    def weight(copy: TierCopy) -> tuple[bool, bool, float]:
        return copy.gone is None, copy.tainted is not None, copy.lived()

    weighed = sorted(copies, key=weight, reverse=True)[:_MOST_BARS]
    for copy in sorted(weighed, key=lambda copy: copy.saved):
        y = 5 + (_LANE - 10) * (1 - copy.step / last_step)
        changes = _changes(copy)
        untils = [since for since, _ in changes[1:]] + [end if copy.gone is None else copy.gone]
        bars = []
        for (since, state), until in zip(changes, untils, strict=True):
            x = across(since)
            stop = max(across(until), x + 1.5)
            bars.append(tag("path", d=f"M{x:.1f} {y:.1f}H{stop:.1f}", cls=f"life {state.value}"))
        tooltip = f"step {copy.step:,}, {tier}: saved {when(copy.saved)}"
        shapes.append(tag("g", tag("title", tooltip), *bars))
    return shapes


def _steps(attempts: AttemptIndex) -> list[Label]:
    last = len(attempts) - 1
    return [
        Label(at / 4, f"{attempts.step_of(round(at * last / 4)):,}", is_minor=at % 2 == 1)
        for at in range(5)
        if last > 0
    ]


# -- settings --------------------------------------------------------------------------------


def settings(run: RunReader) -> Html | None:
    """The changes of settings, then the starts, then every setting."""
    changes = [
        [when(line.time), f"{line.step:,}", line.kind.replace("_", " "), line.reason, line.decision]
        for line in run.fold.lines
        if line.kind in CHANGE_KINDS
    ][-_MOST_RANGES:]
    starts = [_start(line) for line in run.fold.lines if line.kind == "start"][-_MOST_RANGES:]
    rows = [[key, _value(value, 500)] for key, value in run.settings().items()]
    if not (changes or starts or rows):
        return None
    heads = ["started", "", "ranks", "hosts", "engine", "versions", "data", "seconds"]
    return section(
        "settings",
        "Settings and their changes",
        table(["when", "at step", "what", "why", "decision"], changes) if changes else None,
        tag("div", table(heads, starts), cls="starts") if starts else None,
        details(f"All {len(rows):,} settings", table(["key", "value"], rows)) if rows else None,
    )


def _start(line: Line) -> list[str]:
    hosts = line.detail.get("hosts")
    counts = hosts.items() if isinstance(hosts, dict) else ()
    names = [f"{host} ({ranks})" for host, ranks in counts]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return [
        when(line.time),
        line.decision,
        str(line.detail.get("world_size", "")),
        ", ".join(names[:8]) + more,
        f"{line.detail.get('parallel', '')} on {line.detail.get('device', '')}",
        f"torch {line.detail.get('torch', '')}",
        str(line.detail.get("corpus", "")),
        _start_seconds(line.detail.get("start_seconds")),
    ]


def _start_seconds(phases: object) -> str:
    """Where the time of a start went, from the death before it to the loaded state."""
    parts = phases.items() if isinstance(phases, dict) else ()
    numbers = {str(name): n for name, n in parts if isinstance(n, int | float)}
    words = ", ".join(f"{name} {number:.2g}" for name, number in numbers.items())
    return f"{sum(numbers.values()):.2g}: {words}" if numbers else ""


def _value(value: object, most: int) -> str:
    return "-" if value is None else str(value)[:most]


# -- several runs ----------------------------------------------------------------------------


def comparison(runs: Mapping[str, RunReader]) -> Html:
    """Runs by name side by side: a row each, their losses, and the settings that differ."""
    heads = [
        "", "run", "status", "step", "loss", "held-out", "goodput", "wall", "discarded",
        "rollbacks", "restarts",
    ]  # fmt: skip
    rows = []
    for place, (name, run) in enumerate(runs.items()):
        now = RunStatus(run)
        numbers = dict(now.numbers()) | {"wall": duration(now.wall_seconds)}
        cells = (numbers.get(head, "") for head in heads[4:])
        rows.append([sign(place), name, now.status, f"{now.step:,}", *cells])
    points = {
        name: [(float(row.step), row.loss) for row in _compared(run)] for name, run in runs.items()
    }
    units = {run.unit for run in runs.values()}
    unit = units.pop() if len(units) == 1 else ""
    return tag(
        "section",
        tag("h2", "Side by side"),
        table(heads, rows),
        lines("Loss", unit, points, x_label="applied steps", cls="chart compare"),
        _differences(runs),
        cls="compare",
    )


def comparison_data(runs: Mapping[str, RunReader]) -> dict[str, Any]:
    """The lines of the common chart; each holds a few hundred applied steps.

    A row of ``lines`` is step, hours since the first start, loss, norm and tokens per second; one
    of ``evaluations`` step, hours and held-out loss.
    """
    return {
        "names": list(runs),
        "batch": [run.settings().get("batch.global_size") for run in runs.values()],
        "lines": [
            [_numbers(run, row, "loss", "grad_norm", "tokens_per_second") for row in _compared(run)]
            for run in runs.values()
        ],
        "evaluations": [
            [_numbers(run, row, "eval_loss") for row in run.fold.evaluated.rows()[-2000:]]
            for run in runs.values()
        ],
    }


def _numbers(run: RunReader, row: AttemptRow, *names: str) -> list[float | None]:
    hours = (row.time - (run.began() or row.time)) / 3600
    values = (hours, *(getattr(row, name) for name in names))
    return [row.step, *(float(f"{one:.6g}") if math.isfinite(one) else None for one in values)]


def _compared(run: RunReader) -> list[AttemptRow]:
    """The applied steps with the lowest and the highest loss of each column."""
    rows = (row for row in run.fold.thinned.rows() if row.is_applied and math.isfinite(row.loss))
    kept = {row.step: row for row in rows}  # a later attempt replaces one that was undone
    end = max(kept, default=0) + 1
    columns = groupby(sorted(kept.items()), key=lambda point: _POINTS * point[0] // end)
    chosen: dict[int, AttemptRow] = {}
    for _, column in columns:
        by_loss = sorted((row for _, row in column), key=lambda row: row.loss)
        chosen |= {row.step: row for row in (by_loss[0], by_loss[-1])}
    return [chosen[step] for step in sorted(chosen)]


def _differences(runs: Mapping[str, RunReader]) -> Html:
    settings = [run.settings() for run in runs.values()]
    rows = [
        [key, *(_value(one.get(key), 200) for one in settings)]
        for key in dict.fromkeys(key for one in settings for key in one if key != "out")
        if len({repr(one.get(key)) for one in settings}) > 1
    ]
    if not rows:
        return note("Their settings are the same.")
    return join([tag("h3", "Settings that differ"), table(["key", *runs], rows)])
