"""Where the time went: each second of wall time is in one kind, across rollbacks and restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.run_dir.time_account import KINDS, account, past


def line(
    step: int,
    at: float,
    seconds: float = 1.0,
    action: str = "apply",
    wait: float = 0.0,
    **stalls: float,
) -> dict[str, Any]:
    """A metrics line; it costs a second unless told."""
    return {
        "step": step,
        "action": action,
        "seconds": seconds,
        "data_wait_seconds": wait,
        "time": at,
        "stalls": stalls,
    }


def entry(kind: str, at: float, **detail: Any) -> dict[str, Any]:
    return {"kind": kind, "time": at, "detail": detail}


TABLE: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], float, dict[str, float]]] = {
    "nothing yet": ([], [], 10.0, {"other": 10.0}),
    "two steps": ([line(1, 1), line(2, 2)], [], 5.0, {"productive": 2.0, "other": 3.0}),
    "waiting for data is no work": (
        [line(1, 1, wait=0.25)],
        [],
        1.0,
        {"productive": 0.75, "data_wait": 0.25},
    ),
    "stalls": (
        [line(1, 1), line(2, 6, checkpoint=1.5, evaluation=2.5)],
        [],
        6.0,
        {"productive": 2.0, "checkpoint": 1.5, "evaluation": 2.5},
    ),
    "a discard": (
        [line(1, 1), line(2, 2, action="discard")],
        [],
        2.0,
        {"productive": 1.0, "discarded": 1.0},
    ),
    "a rollback, redone": (
        [line(1, 1), line(2, 2), line(3, 3, action="rollback"), line(2, 5, rollback=1.0)],
        [entry("rollback", 4, to_step=1)],
        5.0,
        {"productive": 2.0, "recomputed": 1.0, "discarded": 1.0, "rollback": 1.0},
    ),
    "a rollback, not yet redone": (
        [line(1, 1), line(2, 2), line(3, 3, action="rollback")],
        [entry("rollback", 4, to_step=0)],
        4.0,
        {"recomputed": 2.0, "discarded": 1.0, "other": 1.0},
    ),
    "a rollback whose place in the file a restart has cut away": (
        # Done anew from step 1: what is in the file now was written after that rollback.
        [line(1, 1), line(2, 12), line(3, 13)],
        [entry("rollback", 4, to_step=1), entry("start", 10, lost={"recomputed": 2.0})],
        13.0,
        {"productive": 3.0, "recomputed": 2.0, "other": 8.0},
    ),
    "a restart": (
        [line(1, 1), line(2, 23, restart=19.0)],
        [entry("start", 0), entry("start", 20, lost={"recomputed": 2.0, "data_wait": 0.5})],
        23.5,
        {"productive": 2.0, "recomputed": 2.0, "data_wait": 0.5, "restart": 19.0},
    ),
    "a stop": (
        [line(1, 1)],
        [entry("start", 0), entry("preempted", 3, stalls={"checkpoint": 2.0})],
        3.0,
        {"productive": 1.0, "checkpoint": 2.0},
    ),
    "a clock that was set back": (
        [line(1, 1), line(2, 2, checkpoint=2.0)],
        [],
        2.0,
        {"productive": 1.0, "checkpoint": 1.0},
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_where_the_time_went(case: str) -> None:
    metrics, journal, wall, expected = TABLE[case]
    found = account(iter(metrics), journal)
    assert found.breakdown(wall) == dict.fromkeys(KINDS, 0.0) | expected
    assert found.goodput(wall) == pytest.approx(expected.get("productive", 0.0) / wall)


def test_what_a_restart_cuts_away_is_lost_and_nothing_else() -> None:
    kept = [line(1, 1), line(2, 2)]
    cut = [line(3, 4, wait=0.5, checkpoint=1.0), line(4, 5, action="discard"), line(4, 6)]
    found = past(kept, cut, [entry("start", 0), entry("crash", 30)])
    assert found.lost == {"recomputed": 1.5, "discarded": 1.0, "data_wait": 0.5, "checkpoint": 1.0}
    assert found.last_life == 6, "the crash was journalled by the next start"
    assert found.account.breakdown(6.0) == dict.fromkeys(KINDS, 0.0) | found.lost | {
        "productive": 2.0
    }
    # The next start finds it in the journal.
    journal = [entry("start", 0), entry("crash", 30), entry("start", 31, lost=found.lost)]
    assert account(kept, journal).spent() == found.account.spent()


@pytest.mark.parametrize(
    ("kept", "journal", "expected"),
    [
        ([], [], None),
        ([], [entry("start", 5), entry("start", 7)], 5),  # none of them came to a step
        ([line(1, 6)], [entry("start", 5)], 6),
        ([line(1, 6)], [entry("start", 5), entry("preempted", 8)], 8),
        ([line(1, 6)], [entry("start", 5), entry("crash", 60), entry("start", 61)], 6),
    ],
)
def test_the_last_sign_of_life(
    kept: list[dict[str, Any]], journal: list[dict[str, Any]], expected: float | None
) -> None:
    assert past(kept, [], journal).last_life == expected


def test_the_pause_after_a_finished_run_is_not_counted() -> None:
    """A run is asked for more steps a day after it was done."""
    metrics = [line(1, 1), line(2, 2)]
    journal = [entry("start", 0, incarnation=1)]
    done = {"status": "done", "incarnation": 1}
    stopped = done | {"status": "preempted"}
    for summary in (None, stopped, done | {"incarnation": 7}):
        assert past(metrics, [], journal, summary=summary, now=86_402.0).idle_seconds == 0.0
    found = past(metrics, [], journal, summary=done, now=86_402.0)
    assert found.idle_seconds == 86_400 and found.last_life == 86_402
    assert found.account.breakdown(86_404.0) == dict.fromkeys(KINDS, 0.0) | {
        "productive": 2.0,
        "other": 2.0,
    }
    assert found.account.goodput(86_404.0) == 0.5
    # The next start and the report find it in the journal.
    journal.append(entry("start", 86_402, incarnation=2, idle_seconds=found.idle_seconds))
    again = past([*metrics, line(3, 86_403)], [], journal, summary=done, now=86_500.0)
    assert again.idle_seconds == 0.0, "the second start did not end as done"
    assert again.account.goodput(86_404.0) == 0.75


def test_what_was_counted_after_the_last_line_of_a_finished_run_stays() -> None:
    """The last save and the last evaluation are in its summary, and in no line."""
    metrics, journal = [line(1, 1), line(2, 2)], [entry("start", 0, incarnation=1)]
    time = {"productive": 2.0, "checkpoint": 1.5, "other": 0.5, "restart": "soon"}
    done = {"status": "done", "incarnation": 1, "time": time}
    found = past(metrics, [], journal, summary=done, now=100.0)
    assert (found.idle_seconds, found.last_life) == (96.0, 100.0), "it ended at 4, not at 2"
    assert found.lost == {"checkpoint": 1.5}
    expected = dict.fromkeys(KINDS, 0.0) | {k: v for k, v in time.items() if v != "soon"}
    assert found.account.breakdown(100.0) == expected
    # A third start finds the same in the journal.
    detail = {"incarnation": 2, "idle_seconds": found.idle_seconds, "lost": found.lost}
    journal.append(entry("start", 100, **detail))
    again = past(metrics, [], journal, summary=done | {"incarnation": 2}, now=300.0)
    assert (again.idle_seconds, again.lost) == (200.0, {})
    assert again.account.breakdown(300.0) == expected


amounts = st.floats(0, 1e4)


@given(
    st.lists(st.tuples(st.integers(1, 20), amounts, amounts, st.booleans(), amounts)),
    st.lists(st.tuples(amounts, st.integers(0, 20))),
    st.floats(0, 1e6),
)
def test_it_always_adds_up(
    steps: list[tuple[int, float, float, bool, float]],
    rollbacks: list[tuple[float, int]],
    wall: float,
) -> None:
    metrics: list[Mapping[str, Any]] = [
        line(
            step,
            at,
            seconds=seconds,
            action="apply" if applied else "discard",
            wait=seconds / 4,
            checkpoint=stall,
        )
        for at, (step, seconds, stall, applied, _) in enumerate(steps)
    ]
    journal = [entry("rollback", at, to_step=step) for at, step in rollbacks]
    found = account(metrics, journal)
    kinds = found.breakdown(wall)
    assert all(seconds >= 0 for seconds in kinds.values()), kinds
    assert sum(kinds.values()) == pytest.approx(wall, abs=0.001 * len(KINDS))
    spent = sum(seconds + stall for _, seconds, stall, _, _ in steps)
    assert sum(found.spent().values()) == pytest.approx(spent, abs=1e-6 * (1 + spent))
