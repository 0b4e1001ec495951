"""Retention, proof and the order of use, over made-up rings: on disk, in memory, in a store."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.policy.retention.records import (
    FEWEST_SLOTS,
    NodeNeed,
    Reach,
    Record,
    State,
    Tier,
    abandoned_by_rollback,
    due_for_proof,
    kept_there,
    make_room,
    next_upload,
    older_targets,
    on_disk,
    plan_slots,
    resume_order,
    retire,
    rollback_targets,
    slots_for_probation,
    with_state,
)

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


@given(records=rings(), keep=st.integers(0, 4), every=st.sampled_from([0, 20, 30]))
@example(records=ring_of(OK, C, C), keep=0, every=0)
@example(records=ring_of(BAD, BAD), keep=1, every=0)
@example(records=ring_of(OK, OK, OK, OK), keep=2, every=20)
@settings(max_examples=60, deadline=None)
def test_what_retention_promises(records: list[Record], keep: int, every: int) -> None:
    gone = retire(records, keep=keep, keep_every=every)
    keep = max(1, keep)  # the last clean one stays, whatever was asked
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


# In memory


def memory(serial: int, state: State = C, step: int | None = None) -> Record:
    step = serial * 10 if step is None else step
    return Record(serial=serial, step=step, cursor=step * 8, state=state, tier=Tier.memory)


def disk(serial: int, state: State = C) -> Record:
    return Record(serial=serial, step=serial * 10, cursor=serial * 80, state=state)


@st.composite
def both_tiers(draw: st.DrawFn) -> list[Record]:
    """Copies in memory of some of a ring's checkpoints, and of others that were never on disk."""
    records = draw(rings())
    serials = draw(st.sets(st.integers(1, 40), max_size=5))
    held = [memory(serial, draw(st.sampled_from([C, OK]))) for serial in sorted(serials)]
    return draw(st.permutations([*records, *held]))


@given(records=both_tiers(), keep=st.integers(1, 4), every=st.sampled_from([0, 20]))
@settings(max_examples=60, deadline=None)
def test_memory_keeps_nothing_on_disk_and_deletes_nothing(
    records: list[Record], keep: int, every: int
) -> None:
    gone = retire(records, keep=keep, keep_every=every)
    assert gone == retire(on_disk(records), keep=keep, keep_every=every)
    assert all(record.tier is Tier.disk for record in gone)
    clean = [r for r in on_disk(records) if r.state is OK]
    assert not clean or max(clean, key=lambda r: r.serial) not in gone, "never the last clean one"


@given(records=both_tiers(), must=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_makes_room(records: list[Record], must: bool, data: st.DataObject) -> None:
    held = [record for record in records if record.tier is Tier.memory]
    busy = data.draw(st.sets(st.sampled_from([r.serial for r in held]))) if held else set()
    given_up = make_room(records, busy=busy, must=must)
    if given_up is None:
        assert not must or all(record.serial in busy for record in held)
        return
    assert given_up.tier is Tier.memory and given_up.serial not in busy
    clean = sorted(r.serial for r in held if r.state is OK)
    unproven = sorted(r.serial for r in held if r.state is C)
    if not must:
        assert given_up.serial not in (clean[-1:] + unproven[:1])


@pytest.mark.parametrize(
    ("records", "busy", "must", "gone"),
    [
        ([memory(1, OK), memory(2, OK), memory(3)], (), False, 1),
        ([memory(1, OK), memory(2), memory(3)], (), False, 3),  # 2 is nearest to its proof
        ([memory(1, OK), memory(2)], (), False, None),
        ([memory(1, OK), memory(2)], (), True, 2),
        ([memory(1, OK), memory(2)], (2,), True, 1),
        ([memory(1, OK), memory(2, OK)], (1,), False, None),
        ([disk(1, OK), disk(2, OK)], (), True, None),
    ],
)
def test_make_room(
    records: list[Record], busy: tuple[int, ...], must: bool, gone: int | None
) -> None:
    found = make_room(records, busy=busy, must=must)
    assert (found.serial if found else None) == gone


@given(interval=st.integers(1, 25), clean_after=st.integers(1, 40), verify_steps=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_slots_for_probation_are_enough(
    interval: int, clean_after: int, verify_steps: int
) -> None:
    """None is left out, and from the first proof on a clean one is always there."""
    verify_steps = min(verify_steps, interval - 1)
    slots = slots_for_probation(interval=interval, clean_after=clean_after)
    records: list[Record] = []
    proofs: dict[int, int] = {}
    first_proof = interval + clean_after + verify_steps
    for step in range(1, 12 * (interval + clean_after)):
        for record in due_for_proof(records, step=step, clean_streak=step, clean_after=clean_after):
            proofs.setdefault(record.serial, step + verify_steps)
        for serial in [s for s, when in proofs.items() if when == step]:
            records = with_state(records, serial, OK, Tier.memory)
            del proofs[serial]
        if step % interval == 0:
            if len(records) == slots:
                gone = make_room(records, busy=proofs, must=False)
                assert gone is not None, f"no slot at step {step} of {slots}"
                assert gone.state is OK, "nothing that waits for its proof is given up"
                records.remove(gone)
            records.append(memory(step, step=step))
        if step > first_proof:
            assert any(record.state is OK for record in records), step


def test_of_two_copies_the_one_in_memory_comes_first() -> None:
    records = [disk(1, OK), memory(2, OK), disk(2, OK), memory(3), disk(3)]
    order = [(r.serial, r.tier.value) for r in resume_order(records)]
    assert order == [(3, "memory"), (3, "disk"), (2, "memory"), (2, "disk"), (1, "disk")]
    targets = rollback_targets(records, cursor=10_000, step=10_000)
    assert [(r.serial, r.tier.value) for r in targets] == order[2:]


def test_trouble_that_comes_back_goes_back_by_checkpoints_on_disk() -> None:
    """Snapshots a few steps apart are no older checkpoints; the same ones are used without them."""
    targets = rollback_targets(
        [disk(1, OK), disk(5, OK), memory(5, OK), memory(7, OK), disk(9, OK), memory(11, OK)],
        cursor=10_000,
        step=10_000,
    )
    assert [r.serial for r in older_targets(targets, 0)] == [11, 9, 7, 5, 5, 1]
    assert [r.serial for r in older_targets(targets, 1)] == [5, 5, 1, 7, 9, 11]
    assert [r.serial for r in older_targets(targets, 2)] == [1, 5, 5, 7, 9, 11]
    assert [r.serial for r in older_targets(targets, 9)] == [1, 5, 5, 7, 9, 11]
    assert [r.serial for r in older_targets([memory(4, OK), memory(2, OK)], 1)] == [2, 4]


def test_a_state_is_one_copys_own() -> None:
    records = [disk(2), memory(2)]
    proven = with_state(records, 2, OK, Tier.memory)
    assert [(r.tier, r.state) for r in proven] == [(Tier.disk, C), (Tier.memory, OK)]


def need(budget: int, slot: int = 10, spare: int = 0) -> NodeNeed:
    return NodeNeed(name=f"n{budget}", slot_bytes=slot, budget_bytes=budget, spare_slots=spare)


@pytest.mark.parametrize(
    ("nodes", "wanted", "slots", "tightest"),
    [
        ([need(100)], 3, 3, "n100"),
        ([need(100), need(29), need(50)], 3, 2, "n29"),
        ([need(100), need(19)], 3, 0, "n19"),
        ([need(40, spare=2)], 3, 2, "n40"),
        ([need(39, spare=2)], 3, 0, "n39"),
        ([need(0, slot=0)], 3, 0, "n0"),
    ],
)
def test_the_tightest_node_decides(
    nodes: list[NodeNeed], wanted: int, slots: int, tightest: str
) -> None:
    plan = plan_slots(nodes, wanted=wanted)
    assert (plan.slots, plan.tightest.name) == (slots, tightest)
    assert plan.slots == 0 or plan.slots >= FEWEST_SLOTS


# In a store


def of_letters(states: str) -> list[Record]:
    """c clean, o committed, t tainted; serial n is of step 10 n."""
    return [disk(n, {"c": OK, "o": C, "t": BAD}[at]) for n, at in enumerate(states, start=1)]


@pytest.mark.parametrize(
    ("ring", "stored", "tried", "chosen"),
    [
        ("", "", 0, None),
        ("oo", "", 0, None),  # nothing is proven
        ("tt", "", 0, None),
        ("co", "", 0, 1),
        ("cco", "", 0, 2),  # the newest, not one after another
        ("cco", "c", 0, 2),
        ("cco", "cc", 0, None),
        ("cco", "", 2, None),  # it failed: not until there is a newer one
        ("ccc", "", 2, 3),
        ("ct", "", 0, 1),
        ("cc", "ccc", 0, None),  # the store has a newer one
    ],
)
def test_what_is_sent_next(ring: str, stored: str, tried: int, chosen: int | None) -> None:
    found = next_upload(of_letters(ring), of_letters(stored), tried=tried)
    assert (found and found.serial) == chosen


def test_the_last_before_a_stop_is_sent_unproven_and_once_more_when_it_is_clean() -> None:
    for ring, stored, unproven, chosen in (
        ("cco", "cc", True, 3), ("cco", "cco", True, None), ("cct", "cc", True, None),
        ("ccc", "cco", False, 3), ("cco", "cco", False, None),
    ):  # fmt: skip
        found = next_upload(of_letters(ring), of_letters(stored), tried=0, unproven=unproven)
        assert (found and found.serial) == chosen, (ring, stored)
    assert [r.serial for r in kept_there(of_letters("coc"), keep=2, keep_every=0)] == [1, 3]
    assert [r.serial for r in kept_there(of_letters("cco"), keep=1, keep_every=0)] == [2, 3]


def test_the_newest_stay_and_every_so_manyth_for_good() -> None:
    kept = kept_there(of_letters("cccccc"), keep=2, keep_every=30)
    assert [record.step for record in kept] == [30, 50, 60]
    assert [r.step for r in kept_there(of_letters("cccccc"), keep=1, keep_every=0)] == [60]
