"""Decides when a checkpoint is due, on disk and in memory: at a fixed interval, or by cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from runner.config.schema import CheckpointConfig
from runner.policy.decision.history import History, Incident
from runner.policy.retention.interval import (
    MOST_SNAPSHOT_STEPS,
    IntervalRules,
    MeasuredCosts,
    SaveCosts,
    SnapshotRules,
    next_steps,
    prior_seconds,
    snapshot_steps,
    why,
    why_snapshots,
)
from runner.policy.retention.records import memory_every
from runner.train.evaluate import BestEvaluation
from runner.train.run import Run

_FIRST_LOOK = 4  # first look after so many snapshots, then at each doubling: it is collective


class FixedInterval:
    """Saves every ``steps`` updates. Called after each update, on all ranks alike."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def is_due(self, updates: int) -> bool:
        """Whether the state after exactly ``updates`` updates is saved."""
        return updates % self.steps == 0

    def step(self, seconds: float, *, busy: bool) -> None:
        """Note that an update took ``seconds``; ``busy`` if a checkpoint was in progress."""

    @contextmanager
    def save(self, updates: int) -> Iterator[None]:
        """Around a save. Collective."""
        yield


class _IntervalByCost(FixedInterval):
    """An interval estimated from the costs of steps and saves, by rank 0's clock.

    So the times of saves depend on the clock. The result does not: the run ends the same whatever
    checkpoint it goes back to. A restart begins with the newest interval in the journal.
    """

    _key = ""  # of the interval in the journal
    _what = ""

    def __init__(self, run: Run, rules: IntervalRules | SnapshotRules) -> None:
        lines = [line.detail for line in run.history.incidents if line.kind == "interval"]
        known = [detail[self._key] for detail in lines if self._key in detail]
        super().__init__(rules.bounded(known[-1]) if known else rules.first)
        self._run = run
        self._costs = SaveCosts()

    def step(self, seconds: float, *, busy: bool) -> None:
        if seconds:
            self._costs.step(seconds, busy=busy)

    @contextmanager
    def save(self, updates: int) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._costs.saved(time.monotonic() - began)
        measured = self._measure(updates)
        if measured is None:
            return
        was, (self.steps, reason) = self.steps, self._next(measured)
        if self.steps != was:
            self._run.written.report(
                Incident(
                    kind="interval",
                    step=updates,
                    decision=f"a {self._what} every {self.steps} steps",
                    reason=reason,
                    detail={self._key: self.steps, "measured": measured.to_json()},
                )
            )

    def _measure(self, updates: int) -> MeasuredCosts | None:
        """Rank 0's costs, if it is time to estimate the interval anew. Collective then."""
        raise NotImplementedError

    def _next(self, measured: MeasuredCosts) -> tuple[int, str]:
        """The next interval, and why."""
        raise NotImplementedError


class AutoInterval(_IntervalByCost):
    """The interval of checkpoints, estimated anew at every save."""

    _key = "interval_steps"
    _what = "checkpoint"

    def __init__(self, run: Run, rules: IntervalRules) -> None:
        super().__init__(run, rules)
        self._rules = rules
        self._last = run.resumed.step

    def is_due(self, updates: int) -> bool:
        """Whether the interval since the last save, or the last rollback's target, is over."""
        self._last = min(self._last, updates - 1)
        return updates - self._last >= self.steps

    def _measure(self, updates: int) -> MeasuredCosts | None:
        self._last = updates
        numbers = self._run.ranks.from_first(
            self._own().to_json() if self._costs.is_known else None
        )
        return None if numbers is None else MeasuredCosts(**numbers)

    def _own(self) -> MeasuredCosts:
        spent, history = dict(self._run.reporter.spent()), self._run.history
        down = spent.pop("restart", 0.0)
        return self._costs.measured(
            restart=down / max(1, history.num_starts - 1),
            failures=num_failures(history),
            up=sum(spent.values()),
        )

    def _next(self, measured: MeasuredCosts) -> tuple[int, str]:
        steps = next_steps(self.steps, measured, self._rules)
        return steps, why(self.steps, steps, measured, self._rules)


class SnapshotInterval(_IntervalByCost):
    """The interval of snapshots that do not go to disk; see :func:`snapshot_steps`.

    Due at its multiples.
    """

    _key = "snapshot_steps"
    _what = "snapshot in memory"

    def __init__(self, run: Run, rules: SnapshotRules) -> None:
        super().__init__(run, rules)
        self._rules = rules
        self._count = 0

    def _measure(self, updates: int) -> MeasuredCosts | None:
        self._count += 1
        is_look = self._count >= _FIRST_LOOK and self._count & (self._count - 1) == 0
        if not is_look or self._rules.bounded(self._rules.most) == self._rules.first:
            return None
        own = self._costs.measured(restart=0.0, failures=0, up=0.0)
        return MeasuredCosts(**self._run.ranks.from_first(own.to_json()))

    def _next(self, measured: MeasuredCosts) -> tuple[int, str]:
        steps = snapshot_steps(self.steps, measured, self._rules)
        return steps, why_snapshots(self.steps, measured)


def num_failures(history: History) -> int:
    """How often the run went back to a checkpoint: crashes and rollbacks."""
    crashed = {i.detail.get("incarnation") for i in history.incidents if i.kind == "crash"}
    return len(crashed) + len(history.rollbacks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSchedule:
    """When saves are due: to ``disk``, and to ``memory`` (None: no separate snapshots).

    ``best``: the state with the best held-out number is saved as well; ``advised``: so are the
    states after these updates, because a machine may soon be taken back.
    """

    disk: FixedInterval
    memory: FixedInterval | None
    best: BestEvaluation | None = None
    advised: set[int] = field(default_factory=set)

    def is_due(self, updates: int) -> bool:
        """Whether the state after exactly ``updates`` updates is saved."""
        return self.is_due_in_memory(updates) or self.is_due_on_disk(updates)

    def is_due_on_disk(self, updates: int) -> bool:
        """Whether it is saved to disk."""
        return self.disk.is_due(updates) or self.is_best(updates) or updates in self.advised

    def is_best(self, updates: int) -> bool:
        """Whether it is saved to disk as the best."""
        return self.best is not None and self.best.is_new(updates)

    def is_due_in_memory(self, updates: int) -> bool:
        """Whether a snapshot is due, regardless of the disk."""
        return self.memory is not None and self.memory.is_due(updates)

    @classmethod
    def of(
        cls,
        run: Run,
        settings: CheckpointConfig,
        *,
        in_memory: bool,
        best: BestEvaluation | None = None,
    ) -> SaveSchedule:
        """
        Args:
            in_memory: whether there are slots for snapshots.
        """
        memory = _snapshot_times(run, settings) if in_memory else None
        return cls(disk=_disk_times(run, settings), memory=memory, best=best)


def _disk_times(run: Run, settings: CheckpointConfig) -> FixedInterval:
    place = run.group.place
    if isinstance(settings.every, int):
        return FixedInterval(settings.every)
    nodes = -(-place.world_size // place.local_world_size)
    rules = IntervalRules(
        clean_after=settings.clean_after,
        most=settings.auto_most,
        prior_seconds=prior_seconds(nodes),
    )
    return AutoInterval(run, rules)


def _snapshot_times(run: Run, settings: CheckpointConfig) -> FixedInterval | None:
    """Of snapshots in memory; None if they are off."""
    every = memory_every(settings)
    if every == 0:
        return None
    if settings.memory_every is not None:
        return FixedInterval(every)
    # An interval above the disk's would never be due.
    most = settings.every if isinstance(settings.every, int) else settings.auto_most
    return SnapshotInterval(run, SnapshotRules(first=every, most=min(most, MOST_SNAPSHOT_STEPS)))
