"""The section of the ring: which checkpoints there are, and how long each of them lived."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from runner.policy.retention.records import State
from runner.system.units import duration, format_bytes
from runner.tools.report.drawing import WIDTH, Label, framed, stretched
from runner.tools.report.formatting import when
from runner.tools.report.markup import Html, table, tag
from runner.tools.report.run_reader import RunReader
from runner.tools.report.side_files import TIERS, TierCopy

_MOST_BARS = 250
_MOST_ROWS = 60
_LANE = 84
_STATE_LABELS = {
    State.clean: "proven",
    State.committed: "whole, not proven yet",
    State.tainted: "not to be used",
}


def ring(run: RunReader) -> Html | None:
    """The checkpoints that exist now, and the lifetimes of all so far."""
    drawn, rows = _drawing(run), _rows(run)
    if drawn is None and not rows:
        return None
    return tag(
        "section",
        tag("h3", "The ring"),
        drawn,
        table(["step", "state", "tier", "size", "saved"], rows[:_MOST_ROWS]) if rows else None,
        cls="ring",
    )


def _rows(run: RunReader) -> list[list[object]]:
    clock = float(run.clock())
    rows: list[tuple[int, int, list[object]]] = []
    for checkpoint in run.checkpoints():
        age = f"{duration(max(0.0, clock - checkpoint.time))} ago"
        size = format_bytes(checkpoint.num_bytes)
        rows.append(
            (
                checkpoint.serial,
                1,
                [f"{checkpoint.step:,}", _badge(checkpoint.state), "disk", size, age],
            )
        )
    for order, tier in ((0, "memory"), (2, "remote")):
        # Snapshots in memory are gone once the processes that held them have ended.
        for copy in run.sides.ring.live(tier) if tier == "remote" or run.is_alive() else []:
            age = f"{duration(max(0.0, clock - copy.saved))} ago"
            row: list[object] = [f"{copy.step:,}", _badge(_state(copy)), tier, "", age]
            rows.append((copy.serial, order, row))
    return [row for _, _, row in sorted(rows, key=lambda one: (-one[0], one[1]))]


def _badge(state: State) -> Html:
    return tag("span", _STATE_LABELS[state], cls=f"badge {state.value}")


def _state(copy: TierCopy) -> State:
    if copy.tainted is not None:
        return State.tainted
    return State.committed if copy.proven is None else State.clean


def _drawing(run: RunReader) -> Html | None:
    """Draw one lane per tier, and in it one bar per copy; a higher bar is a later step."""
    fold = run.sides.ring
    copies_by_tier = [(tier, fold.copies(tier)) for tier in TIERS]
    copies_by_tier = [(tier, copies) for tier, copies in copies_by_tier if copies]
    if not copies_by_tier:
        return None
    last_step = max(1, *(copy.step for _, copies in copies_by_tier for copy in copies))
    saved = [copy.saved for _, copies in copies_by_tier for copy in copies]
    end = max(run.last_time(), min(saved) + 1.0, *saved)
    across = _scale(run, min(saved), end)
    figures = []
    for index, (tier, copies) in enumerate(copies_by_tier):
        shapes = _lane(tier, copies, last_step, end, across)
        names = [Label(at=15, text=tier), Label(at=_LANE - 6, text=f"{len(copies):,} in all")]
        figures.append(
            framed(
                [stretched(shapes, _LANE)],
                height=_LANE,
                left=names,
                below=_steps(run) if index == len(copies_by_tier) - 1 else [],
                title=f"Checkpoints on tier {tier}, from their save to their end",
            )
        )
    caption = tag(
        "figcaption",
        "Over time",
        tag("small", " a bar is a checkpoint from its save to its end; higher is a later step"),
    )
    return tag("figure", caption, *figures, _legend(), cls="life")


def _scale(run: RunReader, first: float, end: float) -> Callable[[float], float]:
    """Map seconds since the epoch to x units: by attempt, like the curves, if there are any."""
    places = run.fold.attempts
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
    for copy in _limit_bars(copies):
        y = 5 + (_LANE - 10) * (1 - copy.step / last_step)
        end_of_life = end if copy.gone is None else copy.gone
        changes = [
            (copy.saved, "committed"),
            *([(copy.proven, "clean")] if copy.proven is not None else []),
            *([(copy.tainted, "tainted")] if copy.tainted is not None else []),
        ]
        tooltip = f"step {copy.step:,}, {tier}: saved {when(copy.saved)}"
        bars = []
        for index, (since, state) in enumerate(changes):
            until = changes[index + 1][0] if index + 1 < len(changes) else end_of_life
            x, stop = across(since), max(across(until), across(since) + 1.5)
            bars.append(tag("path", d=f"M{x:.1f} {y:.1f}H{stop:.1f}", cls=f"life {state}"))
        shapes.append(tag("g", tag("title", tooltip), *bars))
    return shapes


def _limit_bars(copies: Sequence[TierCopy]) -> list[TierCopy]:
    """At most :data:`_MOST_BARS` copies: existing ones first, then tainted, then longest lived."""
    if len(copies) <= _MOST_BARS:
        return list(copies)

    def weight(copy: TierCopy) -> tuple[bool, bool, float]:
        return copy.gone is None, copy.tainted is not None, copy.lived()

    chosen = sorted(copies, key=weight, reverse=True)[:_MOST_BARS]
    return sorted(chosen, key=lambda one: one.saved)


def _steps(run: RunReader) -> list[Label]:
    attempts = run.fold.attempts
    last = len(attempts) - 1
    if last <= 0:
        return []
    return [
        Label(
            at=index / 4,
            text=f"{attempts.step_of(round(index * last / 4)):,}",
            is_minor=index % 2 == 1,
        )
        for index in range(5)
    ]


def _legend() -> Html:
    return tag(
        "ul",
        *(
            tag("li", tag("span", cls=f"sign life-{state.value}"), _STATE_LABELS[state])
            for state in (State.committed, State.clean, State.tainted)
        ),
        cls="legend",
    )
