"""Accounts for the wall time of a run, across its restarts, from its files.

Each metrics line has the seconds of its step and of what stalled the training thread since
the line before. A restart cuts lines off; its journal line has what they had cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

# What a metrics line has besides its step; ``restart`` runs from the last sign of life before a
# crash or stop to the first new step, down time included.
STALLS = ("checkpoint", "evaluation", "rollback", "restart")

# productive: steps that count. recomputed: steps that a rollback or a restart undid, so that
# they had to be computed again. discarded: steps that were never applied. other: the
# first start-up, inspections, what is between the steps.
KINDS = ("productive", "recomputed", "discarded", *STALLS, "data_wait", "other")

# Journalled by the next start, not in the life of the one before.
_LATE = ("start", "crash", "checkpoint_damaged")


class TimeAccount:
    """Adds up metrics lines, in order, and what the journal says of them.

    It holds 16 bytes a step: a rollback must know what the steps it undoes have cost.
    """

    def __init__(self) -> None:
        self._spent = dict.fromkeys(KINDS, 0.0)
        self._steps = array("q")
        self._seconds = array("d")
        self.idle_seconds = 0.0
        self.last_time = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one metrics line."""
        wait = float(line["data_wait_seconds"])
        seconds = float(line["seconds"]) - wait
        self._spent["data_wait"] += wait
        self.stalled(line.get("stalls", {}))
        self.last_time = float(line.get("time", 0.0))
        if line["action"] != "apply":
            self._spent["discarded"] += seconds
            return
        step = int(line["step"])
        self.undo(step - 1)
        self._steps.append(step)
        self._seconds.append(seconds)
        self._spent["productive"] += seconds

    def stalled(self, seconds: Mapping[str, float]) -> None:
        """Take seconds by kind."""
        for kind, amount in seconds.items():
            self._spent[kind] += amount

    def idle(self, seconds: float) -> None:
        """Note a pause after the run was done: it is no part of the run's wall time."""
        self.idle_seconds += seconds

    def undo(self, to_step: int) -> None:
        """Note a rollback: the steps after ``to_step`` no longer count."""
        while self._steps and self._steps[-1] > to_step:
            self._steps.pop()
            seconds = self._seconds.pop()
            self._spent["productive"] -= seconds
            self._spent["recomputed"] += seconds

    def spent(self) -> dict[str, float]:
        """Seconds by kind; none under ``other``."""
        return dict(self._spent)

    def goodput(self, wall_seconds: float) -> float:
        """The share of ``wall_seconds`` that was productive, 0 to 1; pauses do not count."""
        spent = self.breakdown(wall_seconds)
        return spent["productive"] / max(sum(spent.values()), 1e-9)

    def breakdown(self, wall_seconds: float) -> dict[str, float]:
        """Seconds by kind that add up to ``wall_seconds`` without pauses, to the millisecond.

        Where more was spent than the wall clock says (it was set back), all is cut in
        proportion.
        """
        total = sum(self._spent.values())
        wall_seconds = max(wall_seconds - self.idle_seconds, min(wall_seconds, total))
        share = min(1.0, max(wall_seconds, 0.0) / total) if total else 1.0
        kinds = {kind: max(0.0, round(amount * share, 3)) for kind, amount in self._spent.items()}
        kinds["other"] = 0.0
        kinds["other"] = max(0.0, round(wall_seconds - sum(kinds.values()), 3))
        return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The account that a start finds.

    ``lost`` has the seconds by kind of the lines that this start cuts off; ``account`` has
    them already. ``last_life`` is the time of the last sign of life of an earlier start, None
    without one. ``idle_seconds`` passed between the end of a run that was done and this start; the
    run's life then goes on at its first new step. ``lost`` then also has what the summary counted
    after the last line, such as the last save.
    """

    account: TimeAccount
    lost: dict[str, float]
    last_life: float | None
    idle_seconds: float = 0.0


def account(
    metrics: Iterable[Mapping[str, Any]], journal: Iterable[Mapping[str, Any]]
) -> TimeAccount:
    """Fold metrics lines, read one at a time, and journal lines."""
    total = TimeAccount()
    undone: list[tuple[float, int]] = []
    for line in journal:
        detail = line["detail"]
        total.stalled(detail.get("lost", {}))
        total.stalled(detail.get("stalls", {}))
        total.idle(float(detail.get("idle_seconds", 0.0)))
        if line["kind"] == "rollback":
            undone.append((float(line["time"]), int(detail["to_step"])))
    # By time, not by position: a restart may have cut the file and rewritten it.
    undone.sort(reverse=True)
    for line in metrics:
        while undone and undone[-1][0] <= float(line.get("time", 0.0)):
            total.undo(undone.pop()[1])
        total.add(line)
    for _, step in reversed(undone):
        total.undo(step)
    return total


def past(
    kept: Iterable[Mapping[str, Any]],
    cut: Iterable[Mapping[str, Any]],
    journal: Iterable[Mapping[str, Any]],
    *,
    summary: Mapping[str, Any] | None = None,
    now: float = 0.0,
) -> Past:
    """The account before this start: from the metrics lines it keeps and cuts, and the journal.

    Args:
        summary: what ``summary.json`` holds; it tells whether the last start ended as done.
        now: seconds since the epoch.
    """
    known = list(journal)
    before = account(kept, known)
    away = account(cut, [])
    away.undo(-1)
    lost = {kind: round(amount, 6) for kind, amount in away.spent().items() if amount}
    before.stalled(lost)
    signs = [float(line["time"]) for line in known if line["kind"] not in _LATE]
    times = [time for time in chain(signs, [before.last_time, away.last_time]) if time]
    starts = [float(line["time"]) for line in known if line["kind"] == "start"]
    # A start without a step: the run has been down since it began.
    last_life = max(times) if times else (starts[0] if starts else None)
    if last_life is None or not _was_done(summary, known):
        return Past(account=before, lost=lost, last_life=last_life)
    counted, spent = seconds_by_kind((summary or {}).get("time")), before.spent()
    after = {kind: round(counted.get(kind, 0.0) - spent[kind], 6) for kind in STALLS}
    after = {kind: amount for kind, amount in after.items() if amount > 0.001}
    before.stalled(after)
    ended = max(last_life, float(known[0]["time"]) + before.idle_seconds + sum(counted.values()))
    idle_seconds = round(max(0.001, now - ended), 3)
    before.idle(idle_seconds)
    lost |= {kind: lost.get(kind, 0.0) + amount for kind, amount in after.items()}
    return Past(
        account=before, lost=lost, last_life=ended + idle_seconds, idle_seconds=idle_seconds
    )


def seconds_by_kind(value: Any) -> dict[str, float]:
    """The plausible ones of stored seconds by kind."""
    if not value or not isinstance(value, dict):  # empty in nearly every line
        return {}
    by_kind = {kind: plausible_seconds(value.get(kind)) for kind in KINDS}
    return {kind: seconds for kind, seconds in by_kind.items() if seconds is not None}


def plausible_seconds(value: Any) -> float | None:
    """A stored number of seconds; None if it is something else."""
    if type(value) is not float and type(value) is not int:
        return None
    return float(value) if 0 <= value < 1e11 else None


def _was_done(summary: Mapping[str, Any] | None, journal: Iterable[Mapping[str, Any]]) -> bool:
    starts = [line["detail"].get("incarnation") for line in journal if line["kind"] == "start"]
    if not starts or summary is None:
        return False
    return summary.get("status") == "done" and summary.get("incarnation") == starts[-1]
