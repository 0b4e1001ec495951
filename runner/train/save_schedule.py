"""Decides when a checkpoint is due, on disk and in memory: at a fixed interval, or by cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from runner.policy.decision.history import History, Incident
from runner.policy.retention.interval import (
    IntervalRules,
    Measured,
    SaveCosts,
    SnapshotRules,
    next_steps,
    snapshot_steps,
    why,
    why_snapshots,
)

_FIRST_LOOK = 4  # first look after so many snapshots, then at each doubling: it is collective


class SaveTimes(Protocol):
    """The interface of both schedules, called after each update, on all ranks alike."""

    def is_due(self, updates: int) -> bool: ...
    def step(self, seconds: float, *, busy: bool) -> None: ...
    @contextmanager
    def save(self, updates: int) -> Iterator[None]: ...


class FixedInterval:
    """Every ``every`` updates."""

    def __init__(self, every: int) -> None:
        self._every = every

    def is_due(self, updates: int) -> bool:
        return updates % self._every == 0

    def step(self, seconds: float, *, busy: bool) -> None:
        """Ignore the step's cost."""

    @contextmanager
    def save(self, updates: int) -> Iterator[None]:
        yield


class AutoInterval:
    """An interval by cost, estimated anew at every save from rank 0's numbers.

    So checkpoint times depend on the clock. The result does not: the run ends the same whatever
    checkpoint it goes back to.

    Args:
        updates: the update at which this start resumes.
        from_first: collective; rank 0's JSON value.
        spent: seconds by kind, see :mod:`runner.run_dir.time_account`.
        report: takes incidents, alike on every rank.
    """

    def __init__(
        self,
        *,
        rules: IntervalRules,
        updates: int,
        history: History,
        from_first: Callable[[Any], Any],
        spent: Callable[[], Mapping[str, float]],
        report: Callable[[Incident], None],
    ) -> None:
        self._rules = rules
        self._last = updates
        self._history = history
        self._from_first = from_first
        self._spent = spent
        self._report = report
        self._costs = SaveCosts()
        self.steps = journalled(history, rules)

    def is_due(self, updates: int) -> bool:
        """Whether the interval since the last save, or the last rollback's target, is over."""
        self._last = min(self._last, updates - 1)
        return updates - self._last >= self.steps

    def step(self, seconds: float, *, busy: bool) -> None:
        """Record that an update took ``seconds``; ``busy`` if a checkpoint was in progress."""
        if seconds:
            self._costs.step(seconds, busy=busy)

    @contextmanager
    def save(self, updates: int) -> Iterator[None]:
        """Time a save. Collective."""
        began = time.monotonic()
        yield
        self._last = updates
        self._costs.saved(time.monotonic() - began)
        measured = self._from_first(self._measured())
        if measured is not None:
            self._estimate(updates, Measured(**measured))

    def _measured(self) -> dict[str, Any] | None:
        if not self._costs.is_known:
            return None
        spent = dict(self._spent())
        down = spent.pop("restart", 0.0)
        return self._costs.measured(
            restart=down / max(1, self._history.num_starts - 1),
            failures=num_failures(self._history),
            up=sum(spent.values()),
        ).to_json()

    def _estimate(self, updates: int, measured: Measured) -> None:
        was, self.steps = self.steps, next_steps(self.steps, measured, self._rules)
        if self.steps != was:
            self._report(
                Incident(
                    kind="interval",
                    step=updates,
                    decision=f"a checkpoint every {self.steps} steps",
                    reason=why(was, self.steps, measured, self._rules),
                    detail={"interval_steps": self.steps, "measured": measured.to_json()},
                )
            )


class SnapshotInterval:
    """The interval of snapshots, by cost; see :func:`snapshot_steps`. Due at its multiples.

    Args:
        history: the run's history; a restart begins with the last recorded interval.
        from_first: collective; rank 0's JSON value.
        report: takes incidents, alike on every rank.
    """

    def __init__(
        self,
        *,
        rules: SnapshotRules,
        history: History,
        from_first: Callable[[Any], Any],
        report: Callable[[Incident], None],
    ) -> None:
        self._rules = rules
        self._from_first = from_first
        self._report = report
        self._costs = SaveCosts()
        self._count = 0
        known = _journalled_steps(history, "snapshot_steps")
        self.steps = rules.bounded(known[-1] if known else rules.first)

    def is_due(self, updates: int) -> bool:
        return updates % self.steps == 0

    def step(self, seconds: float, *, busy: bool) -> None:
        """Record that an update took ``seconds``; ``busy`` if a checkpoint was in progress."""
        if seconds:
            self._costs.step(seconds, busy=busy)

    @contextmanager
    def save(self, updates: int) -> Iterator[None]:
        """Time a snapshot that does not go to disk. Collective."""
        began = time.monotonic()
        yield
        self._costs.saved(time.monotonic() - began)
        self._count += 1
        is_look = self._count >= _FIRST_LOOK and self._count & (self._count - 1) == 0
        if not is_look or self._rules.bounded(self._rules.most) == self._rules.first:
            return
        own = self._costs.measured(restart=0.0, failures=0, up=0.0)
        measured = Measured(**self._from_first(own.to_json()))
        was, self.steps = self.steps, snapshot_steps(self.steps, measured, self._rules)
        if self.steps != was:
            self._report(
                Incident(
                    kind="interval",
                    step=updates,
                    decision=f"a snapshot in memory every {self.steps} steps",
                    reason=why_snapshots(was, measured),
                    detail={"snapshot_steps": self.steps, "measured": measured.to_json()},
                )
            )


def _journalled_steps(history: History, key: str) -> list[int]:
    lines = [i.detail for i in history.incidents if i.kind == "interval"]
    return [detail[key] for detail in lines if key in detail]


def journalled(history: History, rules: IntervalRules) -> int:
    """The newest interval in the journal, with which a restart begins."""
    known = _journalled_steps(history, "interval_steps")
    return rules.bounded(known[-1]) if known else rules.first


def num_failures(history: History) -> int:
    """How often the run went back to a checkpoint: crashes and rollbacks."""
    crashed = {i.detail.get("incarnation") for i in history.incidents if i.kind == "crash"}
    return len(crashed) + len(history.rollbacks)
