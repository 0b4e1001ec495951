"""The sections of the page, each from what the files hold; a section without data is not there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runner.observe.console import duration
from runner.policy.retention.records import State
from runner.report.curve import shown
from runner.report.drawing import WIDTH, bar, drawing
from runner.report.incident import Line, Trouble, notices, troubles
from runner.report.markup import Html, join, table, tag
from runner.report.run import RunReader
from runner.report.state import Standing, sentence
from runner.system.units import format_bytes

_MOST_TROUBLES = 300
_MOST_RANGES = 100
_MOST_NAMES = 16
_KIND_WORDS = {
    "productive": "steps that count",
    "recomputed": "steps that had to be computed again",
    "discarded": "discarded steps",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "rollback": "rollback",
    "restart": "restart, down time included",
    "data_wait": "waiting for data",
    "other": "start-up and all else",
}
_KEYS = (
    ("curve", "applied steps"),
    ("cross", "not applied"),
    ("arc", "rollback, back to"),
    ("start", "restart"),
    ("rebaseline", "new baseline"),
    ("halt", "halt"),
    ("limit", "gate's limit: above is not applied"),
    ("undone", "undone by a rollback"),
    ("eval", "held-out loss"),
    ("proven", "proven checkpoint on disk"),
)
_BY_SCRIPT = ("limit", "undone", "eval", "proven")  # not in the still drawings


def head(run: RunReader, now: Standing) -> Html:
    """The state in one sentence, and its numbers."""
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
            tag("p", sentence(now), cls=f"state {_status_class(now.status)}"),
            tag("dl", *tiles, cls="tiles"),
            tag("p", f"{damaged:,} lines could not be read and are left out.", cls="note")
            if damaged
            else "",
        ]
    )


def where_time_went(run: RunReader, now: Standing) -> Html | None:
    """In all, and in the last hour."""
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
            _KIND_WORDS.get(name, name),
            *_amount(whole, name),
            *(_amount(hour, name) if hour else []),
        ]
        for name in names
    ]
    return tag("section", tag("h3", "Where the time went"), *parts, table(heads, rows), cls="time")


def _time_bar(title: str, spent: Mapping[str, float]) -> Html:
    return tag("figure", tag("figcaption", title), bar(list(spent.items()), title))


def _amount(spent: Mapping[str, float], name: str) -> list[str]:
    seconds, whole = spent.get(name, 0.0), sum(spent.values()) or 1.0
    share = seconds / whole
    return [took(seconds), f"{share:.1%}" if share >= 0.001 or not seconds else "< 0.1%"]


def curves(run: RunReader, number: int) -> Html | None:
    """The charts: still ones, that the script puts its own in the place of."""
    rows = run.fold.thinned.rows()
    found = shown(rows)
    if not found:
        return None
    marks = run.marks()
    return tag(
        "section",
        tag("h3", "Curves"),
        tag(
            "p",
            "Over attempted steps, labelled by step: a step that was tried again stands twice.",
            cls="note",
        ),
        legend_of(run),
        tag("div", cls="controls", hidden=True),
        tag("p", "Point at a chart to read its numbers.", cls="readout", hidden=True),
        *(
            tag(
                "figure",
                tag("figcaption", curve.title, tag("small", f" {curve.unit}")),
                drawing(curve, rows, marks),
                cls="chart",
                data_curve=curve.key,
            )
            for curve in found
        ),
        cls="curves",
        data_run=number,
    )


def legend_of(run: RunReader) -> Html:
    """What the signs in the curves mean, of those that there are."""
    rows = run.fold.thinned.rows()
    kinds = {mark.line.kind for mark in run.marks()}
    there = {
        "curve": True,
        "cross": any(not row.is_applied for row in rows),
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
        tag(
            "li",
            tag("span", cls=f"sign {name}"),
            words,
            cls="by-script" if name in _BY_SCRIPT else None,
        )
        for name, words in _KEYS
        if there[name]
    )
    return tag("ul", *keys, cls="legend")


def warnings(run: RunReader) -> Html | None:
    """What the run warned of, beside steps."""
    told = notices(run.fold.lines)
    if not told:
        return None
    rows = [
        [_when(line.time), line.kind.replace("_", " "), f"{line.step:,}", _ranks(line), line.reason]
        for line in told[-_MOST_TROUBLES:]
    ]
    return tag(
        "section",
        tag("h3", "Warnings"),
        table(["when", "what", "step", "ranks", "why"], rows),
        cls="warnings",
    )


def incidents(run: RunReader) -> Html | None:
    """Each trouble: what it was, why, who, what it cost, what was done."""
    found = troubles(run.fold.lines)
    if not found:
        return None
    places = _places(run, found)
    left_out = len(found) - _MOST_TROUBLES
    shown_ = found[-_MOST_TROUBLES:]
    more = f"The first {left_out:,} of {len(found):,} are left out; journal.jsonl has them all."
    return tag(
        "section",
        tag("h3", f"Incidents ({len(found):,})"),
        tag("p", more, cls="note") if left_out > 0 else None,
        tag(
            "ol",
            *(_incident(one, places.get(id(one))) for one in shown_),
            start=max(1, left_out + 1),
        ),
        cls="incidents",
    )


def _places(run: RunReader, found: Sequence[Trouble]) -> dict[int, tuple[int, int]]:
    """First and last attempt of each trouble."""
    at = {id(mark.line): mark.attempt for mark in run.marks()}
    made = {}
    for one in found:
        known = [at[id(line)] for line in one.lines if id(line) in at and line.kind != "episode"]
        if known:
            made[id(one)] = min(known), max(known)
    return made


def _incident(trouble: Trouble, place: tuple[int, int] | None) -> Html:
    first, lines = trouble.first, [line for line in trouble.lines if line.kind != "episode"]
    episode = trouble.last_of("episode")
    last = lines[-1]
    kinds = [line.kind for line in lines]
    what = " then ".join(_counted(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
    steps = sum(line.cost_steps for line in lines)
    seconds = sum(line.cost_seconds for line in lines)
    names = list(dict.fromkeys(name for line in lines for name in line.sample_ids))
    spans = [line.samples for line in lines if line.samples]
    ranks = sorted({rank for line in lines for rank in line.ranks})
    facts = [
        ("when", _when(first.time)),
        ("why", _reasons(lines)),
        ("suspected cause", str(episode.detail.get("cause", "")) if episode else ""),
        ("shape", episode.reason.partition("; suspected")[0] if episode else ""),
        ("ranks", ", ".join(map(str, ranks))),
        ("samples", _span(spans)),
        ("cost", _cost(steps, seconds)),
        ("done", last.decision),
    ]
    zoom = None
    if place is not None:
        zoom = tag(
            "button", "show in the curves", type="button", cls="zoom",
            data_from=place[0], data_to=place[1], hidden=True,
        )  # fmt: skip
    return tag(
        "li",
        tag("h4", tag("span", f"Step {first.step:,}: {what}"), zoom),
        tag("dl", *(join([tag("dt", n), tag("dd", v)]) for n, v in facts if v)),
        _names(names),
        cls=f"incident {_status_class(last.kind)}",
        data_step=first.step,
    )


def _names(names: Sequence[str]) -> Html | None:
    if not names:
        return None
    items = [tag("li", name) for name in names[:_MOST_NAMES]]
    if len(names) > _MOST_NAMES:
        items.append(tag("li", f"and {len(names) - _MOST_NAMES} more in journal.jsonl"))
    summary = "1 suspected sample" if len(names) == 1 else f"{len(names)} suspected samples"
    return tag("details", tag("summary", summary), tag("ul", *items))


def _reasons(lines: Sequence[Line]) -> Html:
    told = list(dict.fromkeys(line.reason for line in lines))
    more = f"and {len(told) - 4} more" if len(told) > 4 else None
    return join([*(tag("p", words) for words in told[:4]), tag("p", more) if more else ""])


def _counted(kind: str, count: int) -> str:
    words = kind.replace("_", " ")
    return words if count == 1 else f"{words} x{count}"


def _cost(steps: int, seconds: float) -> str:
    told = [
        *(["1 step" if steps == 1 else f"{steps:,} steps"] if steps else []),
        *([took(seconds)] if seconds else []),
    ]
    return ", ".join(told)


def _span(spans: Sequence[tuple[int, int]]) -> str:
    if not spans:
        return ""
    return f"positions {min(a for a, _ in spans):,} to {max(b for _, b in spans) - 1:,}"


def stream(run: RunReader) -> Html | None:
    """What of the stream of samples was read, and what never will be."""
    cursor, ledger = run.fold.cursor, list(run.fold.history.ledger)
    told = _told_to_skip(run.settings().get("data.skip"))
    ranges = sorted([*ledger, *told])
    if not cursor:
        return None
    end = max([cursor, *(stop for _, stop in ranges)])
    skipped = sum(stop - start for start, stop in ranges)
    held_out = run.settings().get("data.held_out")
    words = f"{cursor:,} positions read or skipped"
    words += (
        f"; {skipped:,} skipped for good in {len(ranges):,} ranges" if ranges else "; none skipped"
    )
    if isinstance(held_out, int | float) and held_out:
        words += f"; {held_out:.2%} of all samples are held out of the stream"
    rows = [[f"{start:,}", f"{stop - 1:,}", f"{stop - start:,}"] for start, stop in ranges]
    more = len(rows) - _MOST_RANGES
    return tag(
        "section",
        tag("h3", "The stream"),
        _strip(end, cursor, ranges),
        tag("p", f"{words}."),
        tag(
            "details",
            tag("summary", f"{len(rows):,} skipped ranges"),
            table(["from", "to", "samples"], rows[:_MOST_RANGES]),
            tag("p", f"and {more:,} more in the journal", cls="note") if more > 0 else None,
        )
        if rows
        else None,
        cls="stream",
    )


def _strip(end: int, cursor: int, ranges: Sequence[tuple[int, int]]) -> Html:
    def rect(start: float, stop: float, cls: str, words: str) -> Html:
        width = max(2.0 if cls == "skipped" else 0.0, WIDTH * (stop - start) / end)
        at = min(WIDTH * start / end, WIDTH - width)
        return tag(
            "rect",
            tag("title", words),
            x=f"{at:.2f}",
            y=0,
            width=f"{width:.2f}",
            height=22,
            cls=cls,
        )

    parts = [rect(0, cursor, "read", f"read up to {cursor:,}")]
    parts += [rect(a, b, "skipped", f"skipped {a:,} to {b - 1:,}") for a, b in ranges[-2000:]]
    return tag(
        "svg", tag("title", "The stream of samples: read and skipped"), *parts,
        viewBox=f"0 0 {WIDTH} 22", preserveAspectRatio="none", cls="bar", role="img",
    )  # fmt: skip


def _told_to_skip(value: Any) -> list[tuple[int, int]]:
    pairs = value if isinstance(value, list) else []
    return [
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list) and len(pair) == 2 and all(type(at) is int for at in pair)
    ]


def ring(run: RunReader, now: Standing) -> Html | None:
    """The checkpoints that are there."""
    found = run.checkpoints()
    if not found:
        return None
    clock = float(run.clock())
    rows = [
        [
            f"{one.step:,}",
            tag("span", _state_words(one.state), cls=f"badge {one.state.value}"),
            "disk",
            format_bytes(one.num_bytes),
            f"{duration(max(0.0, clock - one.time))} ago",
        ]
        for one in reversed(found)
    ]
    return tag(
        "section",
        tag("h3", "The ring"),
        table(["step", "state", "tier", "size", "saved"], rows),
        cls="ring",
    )


def _state_words(state: State) -> str:
    return {
        State.clean: "proven",
        State.committed: "whole, not proven yet",
        State.tainted: "not to be used",
    }[state]


def settings(run: RunReader) -> Html | None:
    """Changes first, then the starts, then every setting."""
    parts = [*_changes(run.fold.lines), *_starts(run.fold.lines)]
    told = run.settings()
    if told:
        rows = [[key, _value(value)] for key, value in told.items()]
        parts.append(
            tag(
                "details",
                tag("summary", f"All {len(rows):,} settings"),
                table(["key", "value"], rows),
            )
        )
    return tag("section", tag("h3", "Settings"), *parts, cls="settings") if parts else None


def _changes(lines: Iterable[Line]) -> list[Html]:
    rows = [
        [_when(line.time), f"{line.step:,}", line.reason, line.decision]
        for line in lines
        if line.kind == "setting_changed"
    ]
    return [table(["when", "at step", "what changed", "decision"], rows)] if rows else []


def _starts(lines: Iterable[Line]) -> list[Html]:
    rows = [
        [
            _when(line.time),
            line.decision,
            str(line.detail.get("world_size", "")),
            _hosts(line.detail.get("hosts")),
            f"{line.detail.get('parallel', '')} on {line.detail.get('device', '')}",
            f"torch {line.detail.get('torch', '')}",
        ]
        for line in lines
        if line.kind == "start"
    ]
    heads = ["started", "", "ranks", "hosts", "engine", "versions"]
    return [tag("div", table(heads, rows[-_MOST_RANGES:]), cls="starts")] if rows else []


def _hosts(value: object) -> str:
    if not isinstance(value, dict):
        return ""
    names = [f"{host} ({ranks})" for host, ranks in list(value.items())[:8]]
    more = f" and {len(value) - 8} more" if len(value) > 8 else ""
    return ", ".join(names) + more


def _value(value: object) -> str:
    return "-" if value is None else str(value)[:500]


def _ranks(line: Line) -> str:
    return ", ".join(map(str, line.ranks[:32]))


def _when(seconds: float) -> str:
    if not seconds:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _status_class(status: str) -> str:
    known = ("done", "running", "halted", "failed", "crash", "halt", "silent", "preempted")
    return status if status in known else "plain"


def took(seconds: float) -> str:
    """0.7s, 12s, 3m07s."""
    return f"{seconds:.1f}s" if 0 < seconds < 10 else duration(seconds)
