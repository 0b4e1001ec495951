"""The sections of the page; a section without data is left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.policy.retention.records import State
from runner.system.units import duration
from runner.tools.report.chart_data import ring_of, shown
from runner.tools.report.drawing import WIDTH, bar, drawing, piece, shares
from runner.tools.report.formatting import status_class, took, when
from runner.tools.report.incident import CHANGE_KINDS, Line
from runner.tools.report.markup import Html, join, table, tag
from runner.tools.report.run_reader import RunReader
from runner.tools.report.run_status import RunStatus, sentence

_MOST_RANGES = 100
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
_LEGEND = (
    ("curve", "applied steps"),
    ("cross", "not applied"),
    ("redo", "computed again"),
    ("arc", "rollback, back to"),
    ("start", "restart"),
    ("rebaseline", "new baseline"),
    ("halt", "halt"),
    ("limit", "gate's limit: above is not applied"),
    ("undone", "undone by a rollback"),
    ("eval", "held-out loss"),
    ("proven", "proven checkpoint on disk"),
)


def head(run: RunReader, now: RunStatus) -> Html:
    """The run's state in one sentence, and its numbers."""
    facts = [
        ("step", f"{now.step:,}" + (f" of {now.total:,}" if now.total is not None else "")),
        *([("to go", duration(now.eta_seconds))] if now.eta_seconds is not None else []),
        *([("loss", f"{now.loss:.4f}")] if now.loss is not None else []),
        *([("held-out", f"{now.eval_loss:.4f}")] if now.eval_loss is not None else []),
        *([("tokens/s", f"{now.tokens_per_second:,.0f}")] if now.tokens_per_second else []),
        ("goodput", f"{now.goodput:.0%}"),
        ("discarded", f"{now.discards:,}"),
        ("rollbacks", f"{now.rollbacks:,}"),
        ("restarts", f"{now.restarts:,}"),
    ]
    tiles = (tag("div", tag("dt", name), tag("dd", value)) for name, value in facts)
    damaged = run.num_damaged
    return join(
        [
            tag("p", sentence(now), cls=f"state {status_class(now.status)}"),
            tag("dl", *tiles, cls="tiles"),
            tag("p", f"{damaged:,} lines could not be read; they are left out.", cls="note")
            if damaged
            else "",
        ]
    )


def where_time_went(run: RunReader, now: RunStatus) -> Html | None:
    """How the time was spent: in total, and in the last hour."""
    whole = run.time_spent()
    if sum(whole.values()) <= 0:
        return None
    hour = run.last_hour()
    parts = [_time_bar(f"In all: {duration(now.wall_seconds)}", whole)]
    if hour is not None:
        parts.append(_time_bar("In the last hour", hour))
    names = [name for name in whole if whole[name] > 0 or (hour or {}).get(name, 0) > 0]
    heads = ["", "what", "in all", "share", *(["last hour", "share"] if hour else [])]
    rows = [
        [
            tag("span", cls=f"key {name}"),
            _TIME_LABELS.get(name, name),
            *_amount(whole, name),
            *(_amount(hour, name) if hour else []),
        ]
        for name in names
    ]
    return tag("section", tag("h3", "Where the time went"), *parts, table(heads, rows), cls="time")


def _time_bar(title: str, spent: Mapping[str, float]) -> Html:
    return tag("figure", tag("figcaption", title), shares(list(spent.items()), title))


def _amount(spent: Mapping[str, float], name: str) -> list[str]:
    seconds, whole = spent.get(name, 0.0), sum(spent.values()) or 1.0
    share = seconds / whole
    return [took(seconds), f"{share:.1%}" if share >= 0.001 or not seconds else "< 0.1%"]


def curves(run: RunReader, number: int) -> Html | None:
    """The charts: static ones, which the script replaces."""
    rows = run.fold.thinned.rows()
    drawn_curves = shown(rows)
    if not drawn_curves:
        return None
    marks, ring = run.marks(), ring_of(run)
    evaluated = run.fold.evaluated.rows()
    return tag(
        "section",
        tag("h3", "Curves"),
        tag(
            "p",
            "Over attempted steps, labelled by step; a step that was tried again appears twice.",
            cls="note",
        ),
        legend_of(run),
        tag("div", cls="controls", hidden=True),
        tag("p", "Point at a chart to read its numbers.", cls="readout", hidden=True),
        *(
            tag(
                "figure",
                tag("figcaption", curve.title, tag("small", f" {curve.unit}")),
                drawing(curve, rows, marks, evaluations=evaluated, ring=ring),
                cls="chart",
                data_curve=curve.key,
            )
            for curve in drawn_curves
        ),
        cls="curves",
        data_run=number,
    )


def legend_of(run: RunReader) -> Html:
    """The legend of the curves, for the signs that occur."""
    rows = run.fold.thinned.rows()
    kinds = {mark.line.kind for mark in run.marks()}
    is_present = {
        "curve": True,
        "cross": any(not row.is_applied and row.action != "redo" for row in rows),
        "redo": any(row.action == "redo" for row in rows),
        "arc": "rollback" in kinds,
        "start": run.fold.history.num_starts > 1,
        "rebaseline": "rebaseline" in kinds,
        "halt": "halt" in kinds,
        "limit": any(row.loss_limit == row.loss_limit for row in rows),
        "undone": "rollback" in kinds,
        "eval": run.fold.eval_loss is not None,
        "proven": any(one.state is State.clean for one in run.checkpoints()),
    }
    keys = (
        tag("li", tag("span", cls=f"sign {name}"), label)
        for name, label in _LEGEND
        if is_present[name]
    )
    return tag("ul", *keys, cls="legend")


def stream(run: RunReader) -> Html | None:
    """How much of the stream of samples was read, and which ranges are skipped."""
    cursor, ledger = run.fold.cursor, list(run.fold.history.ledger)
    configured = _configured_skips(run.settings().get("data.skip"))
    ranges = sorted([*ledger, *configured])
    if not cursor:
        return None
    skipped = sum(stop - start for start, stop in ranges)
    end = max([cursor, *(stop for _, stop in ranges)])
    planned = max(end, _planned(run) + skipped)
    text = f"{cursor:,} positions read or skipped"
    text += f" of about {planned:,}" if planned > end else ""
    text += (
        f"; {skipped:,} skipped for good in {_count_ranges(len(ranges))}"
        if ranges
        else "; none skipped"
    )
    rows = [[f"{start:,}", f"{stop - 1:,}", f"{stop - start:,}"] for start, stop in ranges]
    more = len(rows) - _MOST_RANGES
    return tag(
        "section",
        tag("h3", "The stream"),
        _strip(planned, cursor, ranges),
        tag("p", f"{text}."),
        *_held_out(run),
        _stream_legend(bool(ranges), planned > end),
        tag(
            "details",
            tag("summary", f"skipped: {_count_ranges(len(rows))}"),
            table(["from", "to", "samples"], rows[:_MOST_RANGES]),
            tag("p", f"and {more:,} more in the journal", cls="note") if more > 0 else None,
        )
        if rows
        else None,
        cls="stream",
    )


def _planned(run: RunReader) -> int:
    """The positions that the whole run reads; 0 if unknown."""
    settings = run.settings()
    steps, size = settings.get("steps"), settings.get("batch.global_size")
    if type(steps) is not int or type(size) is not int or min(steps, size) < 0:
        return 0
    return min(steps * size, 1 << 60)


def _held_out(run: RunReader) -> list[Html]:
    """The samples that are held out of the stream, as a share of all."""
    settings = run.settings()
    if settings.get("data.val_path"):
        return [
            tag("p", "The held-out loss is computed on separate files (data.val_path).", cls="note")
        ]
    share = settings.get("data.held_out")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < 1:
        return []
    width = max(3.0, WIDTH * share)
    drawn = bar(
        f"All samples: {share:.2%} held out",
        [
            piece(0, WIDTH - width, _STRIP, "streamed"),
            piece(WIDTH - width, width, _STRIP, "held"),
        ],
        _STRIP,
    )
    return [drawn, tag("p", f"{share:.2%} of all samples are held out of the stream.")]


def _stream_legend(is_skipped: bool, is_planned: bool) -> Html:
    keys = [
        ("read", "read", True),
        ("skipped", "skipped for good", is_skipped),
        ("to-come", "to come", is_planned),
        ("streamed", "in the stream", True),
        ("held", "held out", True),
    ]
    items = (
        tag("li", tag("span", cls=f"key {name}"), label)
        for name, label, is_present in keys
        if is_present
    )
    return tag("ul", *items, cls="legend")


def _count_ranges(num_ranges: int) -> str:
    return f"{num_ranges:,} range{'' if num_ranges == 1 else 's'}"


def _strip(end: int, cursor: int, ranges: Sequence[tuple[int, int]]) -> Html:
    # Wide enough to see, but many of them must not cover the part that was read.
    least_width = max(0.6, min(4.0, 250 / max(1, len(ranges))))

    def rect(start: float, stop: float, cls: str, tooltip: str) -> Html:
        width = max(least_width if cls == "skipped" else 0.0, WIDTH * (stop - start) / end)
        x = min(WIDTH * start / end, WIDTH - width)
        return piece(x, width, _STRIP, cls, tooltip)

    parts = [rect(0, cursor, "read", f"read up to {cursor:,}")]
    parts += [rect(a, b, "skipped", f"skipped {a:,} to {b - 1:,}") for a, b in ranges[-2000:]]
    return bar("The stream of samples: read and skipped", parts, _STRIP)


def _configured_skips(value: Any) -> list[tuple[int, int]]:
    pairs = value if isinstance(value, list) else []
    return [
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(type(at) is int for at in pair)
    ]


def settings(run: RunReader) -> Html | None:
    """The changes of settings, then the starts, then every setting."""
    parts = [*_changes(run.fold.lines), *_starts(run.fold.lines)]
    all_settings = run.settings()
    if all_settings:
        rows = [[key, _value(value)] for key, value in all_settings.items()]
        parts.append(
            tag(
                "details",
                tag("summary", f"All {len(rows):,} settings"),
                table(["key", "value"], rows),
            )
        )
    title = tag("h3", "Settings and their changes")
    return tag("section", title, *parts, cls="settings") if parts else None


def _changes(lines: Iterable[Line]) -> list[Html]:
    rows = [
        [when(line.time), f"{line.step:,}", line.kind.replace("_", " "), line.reason, line.decision]
        for line in lines
        if line.kind in CHANGE_KINDS
    ]
    heads = ["when", "at step", "what", "why", "decision"]
    return [table(heads, rows[-_MOST_RANGES:])] if rows else []


def _starts(lines: Iterable[Line]) -> list[Html]:
    rows = [
        [
            when(line.time),
            line.decision,
            str(line.detail.get("world_size", "")),
            _hosts(line.detail.get("hosts")),
            f"{line.detail.get('parallel', '')} on {line.detail.get('device', '')}",
            f"torch {line.detail.get('torch', '')}",
            str(line.detail.get("corpus", "")),
        ]
        for line in lines
        if line.kind == "start"
    ]
    heads = ["started", "", "ranks", "hosts", "engine", "versions", "data"]
    return [tag("div", table(heads, rows[-_MOST_RANGES:]), cls="starts")] if rows else []


def _hosts(value: object) -> str:
    if not isinstance(value, dict):
        return ""
    names = [f"{host} ({ranks})" for host, ranks in list(value.items())[:8]]
    more = f" and {len(value) - 8} more" if len(value) > 8 else ""
    return ", ".join(names) + more


def _value(value: object) -> str:
    return "-" if value is None else str(value)[:500]
