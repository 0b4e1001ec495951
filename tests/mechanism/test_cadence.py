"""When a checkpoint is due: alike on all ranks, also after a rollback and a restart."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from runner.policy.decision.history import History, Incident
from runner.policy.retention.interval import (
    IntervalRules,
    MeasuredCosts,
    SaveCosts,
    SnapshotRules,
    snapshot_steps,
)
from runner.train.save_schedule import AutoInterval, FixedInterval, SnapshotInterval, num_failures

RULES = IntervalRules(clean_after=5, most=40, prior_seconds=86400.0)


def run_of(history: History, from_first: Callable[[Any], Any], updates: int = 0) -> Any:
    """What an interval needs of a run."""
    return SimpleNamespace(
        history=history,
        ranks=SimpleNamespace(from_first=from_first),
        reporter=SimpleNamespace(spent=lambda: {"productive": 100.0, "restart": 7.0}),
        resumed=SimpleNamespace(step=updates),
        written=SimpleNamespace(report=history.add),
    )


def auto(history: History, told: list[Any], *, updates: int = 0, rank: int = 0) -> AutoInterval:
    """One rank's; ``told`` is what rank 0 says, in order."""

    def from_first(value: Any) -> Any:
        if rank == 0:
            told.append(value)
            return value
        return told.pop(0)

    return AutoInterval(run_of(history, from_first, updates), RULES)


def drive(one: FixedInterval, first: int, last: int, seconds: float) -> list[int]:
    """Run these updates; returns those at which it saved."""
    saved = []
    for updates in range(first, last + 1):
        one.step(seconds, busy=False)
        if one.is_due(updates):
            with one.save(updates):
                pass
            saved.append(updates)
    return saved


def test_ranks_with_other_clocks_save_at_the_same_steps() -> None:
    histories, told = [History(), History()], list[Any]()
    saved = [
        drive(auto(history, told, rank=rank), 1, 200, 1.0 if rank == 0 else 1e-6)
        for rank, history in enumerate(histories)
    ]
    assert saved[0] == saved[1] and told == []
    assert saved[0][:4] == [10, 20, 30, 35]  # saves cost next to nothing: as soon as proven
    assert histories[0].incidents == histories[1].incidents != []
    assert auto(histories[0], []).steps == 5


def test_after_a_rollback_it_counts_from_where_the_run_went_back_to() -> None:
    one = auto(History(), [])
    assert drive(one, 1, 17, 1.0) == [10]
    assert drive(one, 4, 16, 1.0) == [13]  # back at update 3


def test_a_restart_begins_with_the_journalled_interval() -> None:
    history = History()
    assert auto(history, []).steps == 10
    for steps in (30, 17):
        history.add(
            Incident(
                kind="interval", step=1, decision="", reason="", detail={"interval_steps": steps}
            )
        )
    assert drive(auto(history, [], updates=100), 101, 140, 1.0) == [117, 134]
    damaged = Incident(kind="interval", step=1, decision="", reason="")
    history.add(damaged)
    history.add(
        Incident(kind="interval", step=1, decision="", reason="", detail={"interval_steps": 10**9})
    )
    assert auto(history, []).steps == RULES.most


def test_an_incarnation_crashes_once_however_often_it_is_told() -> None:
    history = History()
    for number in (1, 1, 2):
        crash = Incident(
            kind="crash", step=3, decision="", reason="", detail={"incarnation": number}
        )
        history.add(crash)
    assert num_failures(history) == 2


def costs(step: float, save: float) -> MeasuredCosts:
    return MeasuredCosts(
        step=step, blocked=save, slowed=0.0, write=save, restart=0.0, failures=0, up=0.0
    )


SNAPSHOTS = SnapshotRules(first=10, most=100)


@pytest.mark.parametrize(
    ("now", "step", "save", "steps"),
    [
        (10, 0.4, 0.01, 10),  # a quarter of a percent
        (10, 0.07, 0.01, 30),
        (10, 0.07, 0.03, 90),
        (10, 0.07, 3.0, 100),  # no more seldom than that
        (30, 0.07, 0.009, 30),  # near enough
        (90, 0.4, 0.01, 10),
        (10, 0.0, 0.01, 100),
        (10, 0.07, 0.0, 10),
    ],
)
def test_snapshots_are_as_near_as_they_are_cheap(
    now: int, step: float, save: float, steps: int
) -> None:
    assert snapshot_steps(now, costs(step, save), SNAPSHOTS) == steps


def test_the_interval_of_snapshots_is_a_multiple_within_bounds() -> None:
    assert SnapshotRules(first=10, most=45).bounded(70) == 40
    assert SnapshotRules(first=10, most=4).bounded(70) == 10  # every save to disk is one as well


def test_ranks_take_snapshots_at_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0's clock; looked at seldom; a restart begins with what was journalled."""
    monkeypatch.setattr(SaveCosts, "measured", lambda *_, **__: costs(0.07, 0.01))
    histories, told = [History(), History()], list[Any]()

    def first(value: Any) -> Any:
        told.append(value)
        return value

    ways = (first, lambda _: told[0])
    saved = [
        drive(SnapshotInterval(run_of(history, way), SNAPSHOTS), *(1, 200, 1.0))
        for history, way in zip(histories, ways, strict=True)
    ]
    assert saved[0] == saved[1] == [10, 20, 30, 40, 60, 90, 120, 150, 180]
    assert len(told) == 2, "at the fourth and the eighth"
    (line,) = histories[0].incidents
    assert line.decision == "a snapshot in memory every 30 steps" and "1.43%" in line.reason
    assert histories[0].incidents == histories[1].incidents
    again = SnapshotInterval(run_of(histories[0], lambda v: v), SNAPSHOTS)
    assert again.steps == 30 and auto(histories[0], []).steps == RULES.first
