"""Retention, proof and the order of use, over made-up rings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.policy.retention.records import (
    Reach,
    Record,
    State,
    abandoned_by_rollback,
    due_for_proof,
    resume_order,
    rollback_targets,
    with_state,
)
from runner.policy.retention.retire import retire

C, OK, BAD = State.committed, State.clean, State.tainted
STATES = st.sampled_from(list(State))


def ring_of(*states: State, every: int = 10) -> list[Record]:
    """Records at steps 0, 10, 20, .. with serials from 1 and 8 samples a step."""
    return [
        Record(serial=at + 1, step=at * every, cursor=at * every * 8, state=state)
        for at, state in enumerate(states)
    ]


def serials(records: list[Record]) -> list[int]:
    return [record.serial for record in records]


@st.composite
def rings(draw: st.DrawFn) -> list[Record]:
    """Any order on disk, steps that repeat after rollbacks, any mixture of states."""
    size = draw(st.integers(0, 9))
    numbers = draw(st.lists(st.integers(1, 40), min_size=size, max_size=size, unique=True))
    return [
        Record(serial=serial, step=step, cursor=step * 8, state=draw(STATES))
        for serial in numbers
        for step in [draw(st.integers(0, 12)) * 10]
    ]


@given(records=rings(), keep=st.integers(1, 4), every=st.sampled_from([0, 20, 30]))
@settings(max_examples=60, deadline=None)
def test_what_retention_promises(records: list[Record], keep: int, every: int) -> None:
    gone = retire(records, keep=keep, keep_every=every)
    left = [record for record in records if record not in gone]
    newest = sorted(records, key=lambda record: -record.serial)
    clean = [record for record in newest if record.state is OK]
    unproven = [record for record in newest if record.state is C]

    assert serials(gone) == sorted(serials(gone)), "oldest first"
    assert set(clean[:keep]) <= set(left)
    assert set(unproven[:2]) <= set(left)
    assert not (every and any(record.step % every == 0 for record in gone if record.state is OK))
    assert bool(left) == bool(records), "never the last one of any kind"
    assert retire(left, keep=keep, keep_every=every) == []

    spared = {record for record in clean[keep:] if every and record.step % every == 0}
    needed = {*clean[:keep], *unproven[:2], *spared}
    assert set(left) == (needed or set(newest[:1])), "and nothing is kept without a reason"


@pytest.mark.parametrize(
    ("states", "keep", "keep_every", "gone"),
    [
        ([OK, OK, OK, OK], 2, 0, [1, 2]),
        ([OK, OK, OK, OK], 2, 20, [2]),  # steps 0 and 20 stay for good
        ([OK, C, C, C], 3, 0, [2]),
        ([OK, BAD, BAD], 1, 0, [2, 3]),
        ([BAD, BAD], 1, 0, [1]),
        ([C], 1, 0, []),
        ([OK], 1, 0, []),
        ([], 1, 0, []),
        ([OK, C, C], 0, 0, []),  # the last clean one stays, whatever was asked
    ],
)
def test_retire(states: list[State], keep: int, keep_every: int, gone: list[int]) -> None:
    assert serials(retire(ring_of(*states), keep=keep, keep_every=keep_every)) == gone


@pytest.mark.parametrize(
    ("step", "cursor", "gone"),
    [
        (40, 320, [1, 2, 3, 4]),  # the newest will do
        (39, 320, [1, 2, 3]),  # guard.back
        (40, 319, [1, 2, 3]),  # a margin before the onset
        (25, 999, [1, 2]),  # what lies between may be needed when the next one is proven
        (0, 0, []),
    ],
)
def test_what_a_rollback_may_have_to_go_back_to_stays(
    step: int, cursor: int, gone: list[int]
) -> None:
    records = [*ring_of(OK, OK, OK, OK, OK), Record(serial=9, step=50, cursor=400, state=C)]
    needed = Reach(step=step, cursor=cursor)
    assert serials(retire(records, keep=1, keep_every=0, reach=needed)) == gone


def test_nothing_within_reach_keeps_nothing_more() -> None:
    records = ring_of(OK, OK, OK)[1:]
    assert serials(retire(records, keep=1, keep_every=0, reach=Reach(step=5, cursor=40))) == [2]


@pytest.mark.parametrize(
    ("step", "streak", "due"),
    [
        (14, 100, [1, 2]),
        (13, 100, [1]),  # step 10's probation is not over
        (14, 3, [1]),  # a step was refused on the way
        (14, 4, [1, 2]),
        (24, 4, [1, 2, 4]),
        (5, 0, [1]),  # the initial state needs no probation
    ],
)
def test_due_for_proof(step: int, streak: int, due: list[int]) -> None:
    records = [*ring_of(C, C), *ring_of(C, C, C, OK, BAD)[2:]]
    records[2] = Record(serial=3, step=20, cursor=160, state=BAD)
    records[3] = Record(serial=4, step=20, cursor=160, state=C)
    found = due_for_proof(records, step=step, clean_streak=streak, clean_after=4)
    assert serials(found) == due


@given(records=rings(), cursor=st.integers(0, 1000), step=st.integers(0, 130))
@settings(max_examples=30, deadline=None)
def test_rollback_targets(records: list[Record], cursor: int, step: int) -> None:
    targets = rollback_targets(records, cursor=cursor, step=step)
    assert serials(targets) == sorted(serials(targets), reverse=True)
    for record in records:
        usable = record.state is OK and record.cursor <= cursor and record.step <= step
        assert (record in targets) is usable


def test_a_target_may_end_exactly_where_the_skip_begins() -> None:
    records = ring_of(OK, OK, OK)
    assert serials(rollback_targets(records, cursor=160, step=20)) == [3, 2, 1]
    assert serials(rollback_targets(records, cursor=159, step=20)) == [2, 1]
    assert serials(rollback_targets(records, cursor=160, step=19)) == [2, 1]


@given(records=rings())
@settings(max_examples=30, deadline=None)
def test_resume_order(records: list[Record]) -> None:
    order = resume_order(records)
    assert serials(order) == sorted(serials(order), reverse=True)
    assert set(order) == {record for record in records if record.state is not BAD}


@given(records=rings(), target=st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_abandoned_by_rollback(records: list[Record], target: int) -> None:
    left = abandoned_by_rollback(records, target)
    assert set(serials(left)) == {serial for serial in serials(records) if serial > target}


def test_with_state_changes_one_record() -> None:
    changed = with_state(ring_of(C, C, C), 2, OK)
    assert [record.state for record in changed] == [C, OK, C]
    assert serials(changed) == [1, 2, 3]
