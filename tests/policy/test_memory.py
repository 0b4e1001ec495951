"""Slots in memory: how many probation needs, how many fit, and which one makes room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.policy.retention.records import (
    Record,
    State,
    Tier,
    due_for_proof,
    older_targets,
    on_disk,
    resume_order,
    rollback_targets,
    with_state,
    without,
)
from runner.policy.retention.retire import (
    FEWEST_SLOTS,
    NodeNeed,
    make_room,
    plan_slots,
    retire,
    slots_for_probation,
)
from tests.policy.test_ring import rings

C, OK, BAD = State.committed, State.clean, State.tainted


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


@given(
    interval=st.integers(1, 25),
    clean_after=st.integers(1, 40),
    verify_steps=st.integers(0, 3),
)
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
                records = without(records, gone.serial, Tier.memory)
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
    assert without(records, 2, Tier.memory) == [disk(2)]


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
