"""The ladder: a table of what is decided, and that it always ends."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.policy.decision import ladder
from runner.policy.decision.episode import PreOnset
from runner.policy.decision.judge import Kind, Verdict
from runner.policy.decision.ladder import (
    Action,
    Apply,
    BadStepTracker,
    DecisionInput,
    Discard,
    Halt,
    Rebaseline,
    RemedyRules,
    Replayed,
    Rollback,
    decide,
)
from runner.policy.retention.records import Record, State
from tests.policy.paper_run import BEFORE, PaperRun
from tests.policy.steps import BATCH, attempted, remedy_rules

PALM = Path(__file__).parents[2] / "configs" / "guard" / "palm.yaml"
# The ladder as the tables below know it, whatever the defaults become.
TABLE = {
    "persist": 3,
    "margin": 1,
    "ahead": 0,
    "back": 0,
    "cooldown_steps": 40,
    "level_steps": 6,
    "max_rollbacks": 5,
}


def table_rules(**changes: Any) -> RemedyRules:
    return remedy_rules(**TABLE | changes)


def run_to(steps: int, *, before: PreOnset = BEFORE, **rules: Any) -> PaperRun:
    """A run after so many healthy steps: a checkpoint every 10, proven by 3 clean steps."""
    run = PaperRun(table_rules(**rules), before=before)
    run.healthy(steps)
    return run


def bad(run: PaperRun, count: int, kind: Kind = Kind.spike, loss: float = 9.9) -> list[Action]:
    return [run.attempt(kind, loss) for _ in range(count)]


def rolled_back(run: PaperRun, kind: Kind = Kind.non_finite) -> Rollback:
    """Bad steps until the run goes back."""
    for _ in range(run.rules.guard.persist):
        action = run.attempt(kind, math.nan if kind is Kind.non_finite else 9.9)
        if isinstance(action, Rollback):
            return action
    raise AssertionError(f"no rollback but {action}")


def test_a_clean_step_is_applied() -> None:
    run = run_to(5)
    assert run.attempt(Kind.clean) == Apply(reason="told Clean")
    assert (run.updates, run.cursor) == (6, 6 * BATCH)


@pytest.mark.parametrize("kind", [Kind.spike, Kind.non_finite])
def test_one_bad_step_is_discarded(kind: Kind) -> None:
    run = run_to(25)
    assert run.attempt(kind) == Discard(reason=f"told {kind.value}")
    assert (run.updates, run.cursor) == (25, 26 * BATCH)
    assert list(run.history.ledger) == [(25 * BATCH, 26 * BATCH)]


@pytest.mark.parametrize("kind", [Kind.spike, Kind.non_finite])
def test_persisting_trouble_goes_back_before_its_onset_and_skips_it(kind: Kind) -> None:
    run = run_to(25)
    first, second, third = bad(run, 3, kind)
    assert isinstance(first, Discard)
    assert isinstance(second, Discard)
    assert isinstance(third, Rollback)
    assert third.skip == (24 * BATCH, 28 * BATCH), "one step of margin, then the three bad ones"
    assert [record.step for record in third.targets] == [20, 10, 0]
    assert (third.onset_step, third.repeat) == (26, 0)
    assert (third.cut_factor, third.cut_steps) == (1.0, 0)
    assert "3 bad steps among the last 10 attempted" in third.reason


def test_bad_steps_with_clean_ones_between_are_one_episode() -> None:
    run = run_to(25)
    bad(run, 1)
    run.healthy(4)
    bad(run, 1)
    run.healthy(3)
    [action] = bad(run, 1)
    assert isinstance(action, Rollback)
    # The onset is the first of them: what was trained on between is under suspicion too.
    assert action.skip == (24 * BATCH, 35 * BATCH)
    assert action.onset_step == 26
    assert [record.step for record in action.targets] == [20, 10, 0]


def test_bad_steps_far_apart_never_go_back() -> None:
    run = run_to(25)
    for _ in range(20):
        assert isinstance(bad(run, 1)[0], Discard)
        run.healthy(5)
    assert run.history.rollbacks == []


def test_an_episode_ends_after_a_window_of_clean_steps() -> None:
    run = run_to(25)
    bad(run, 2)
    run.healthy(10)
    action = bad(run, 3)[-1]
    assert isinstance(action, Rollback)
    assert action.onset_step == 36


@pytest.mark.parametrize(
    ("onset_after", "targets"),
    [
        (30, [20, 10, 0]),  # step 30's checkpoint read what the margin skips
        (31, [20, 10, 0]),  # it read nothing of that, but is not proven
        (33, [30, 20, 10]),  # checkpoint.keep=3
        (43, [40, 30, 20]),
        (9, [0]),
        (0, [0]),
    ],
)
def test_the_newest_clean_checkpoint_before_the_skip(onset_after: int, targets: list[int]) -> None:
    run = run_to(onset_after)
    action = rolled_back(run)
    assert [record.step for record in action.targets] == targets
    assert action.skip[0] == max(0, onset_after - 1) * BATCH


def test_without_a_clean_checkpoint_the_run_halts() -> None:
    run = run_to(25)
    run.records = [
        Record(serial=9, step=20, cursor=20 * BATCH, state=State.committed),
        Record(serial=8, step=10, cursor=10 * BATCH, state=State.tainted),
        Record(serial=7, step=25, cursor=25 * BATCH, state=State.clean),  # behind the skip's start
    ]
    action = bad(run, 3)[-1]
    assert isinstance(action, Halt)
    assert f"no clean checkpoint at or before sample position {24 * BATCH}" in action.reason


@pytest.mark.parametrize("clean_after", [1, 2, 3, 4])
@pytest.mark.parametrize("gap", [1, 2, 3])
@pytest.mark.parametrize("at", range(18, 26))
def test_scattered_bad_steps_find_the_one_checkpoint_that_is_kept(
    at: int, gap: int, clean_after: int
) -> None:
    """Those proven between the bad steps lie behind the onset."""
    run = PaperRun(table_rules(), every=clean_after, clean_after=clean_after, keep=1)
    run.healthy(at)
    for _ in range(2):
        assert isinstance(run.attempt(Kind.non_finite, math.nan), Discard)
        run.healthy(gap)
    kept = [record for record in run.records if record.state is State.clean]
    action = run.attempt(Kind.non_finite, math.nan)
    assert isinstance(action, Rollback), action
    assert (action.onset_step, action.skip[0]) == (at + 1, (at - 1) * BATCH)
    assert at - 1 - 2 * clean_after <= action.targets[0].step < at, "the newest that will do"
    assert len(kept) <= 2 + -(-(2 * gap + 2) // clean_after)
    run.healthy(40)
    kept = [record for record in run.records if record.state is State.clean]
    assert len(kept) <= 2, "one, and the one before while it is too young to go back to"


# The grad norm had crept up before the onset: no bad data does that.
CREPT = dataclasses.replace(BEFORE, creep=2.5, is_creep_clear=True)
ROSE_A_LITTLE = dataclasses.replace(BEFORE, creep=1.3)


def test_a_repeat_goes_further_back_and_skips_more_then_cuts_the_rate() -> None:
    run = run_to(38, before=CREPT)
    first = rolled_back(run)
    assert (first.repeat, first.targets[0].step) == (0, 30)
    assert first.skip == (37 * BATCH, 41 * BATCH)
    assert list(run.history.ledger) == [first.skip]

    run.healthy(7)  # to the same place: step 38 now reads from 41 batches on
    second = rolled_back(run)
    assert (second.repeat, second.targets[0].step) == (1, 20)
    # The margin is a step that was read, not one that the first rollback skipped already.
    assert second.skip == (36 * BATCH, (44 + 2 * 3) * BATCH), "twice persist ahead"
    assert (second.cut_factor, second.cut_steps) == (1.0, 0)
    assert "repeat 1" in second.reason

    run.healthy(16)  # and again: step 37 reads from 50 batches on
    third = rolled_back(run)
    assert (third.repeat, third.targets[0].step) == (2, 10)
    assert third.skip == (35 * BATCH, (53 + 4 * 3) * BATCH), "four times persist ahead"
    assert (third.cut_factor, third.cut_steps) == (0.5, 40)
    assert "learning rate times 0.5 for 40 updates from the onset" in third.reason
    [cut] = run.history.cuts
    assert (cut.start, cut.stop, cut.factor) == (36, 36 + 40, 0.5)


def come_back(run: PaperRun, times: int) -> list[Rollback]:
    """The first rollback and so many repeats, each with a few clean steps before."""
    rollbacks = [rolled_back(run)]
    for _ in range(times):
        run.healthy(12)
        rollbacks.append(rolled_back(run))
    return rollbacks


def test_the_rate_is_not_cut_for_the_datas_fault() -> None:
    rollbacks = come_back(run_to(38), 3)
    assert [r.repeat for r in rollbacks] == [0, 1, 2, 3]
    assert [r.cut_factor for r in rollbacks] == [1.0] * 4
    assert "the data is suspected: the learning rate stays" in rollbacks[2].reason
    assert "suspected" not in rollbacks[1].reason, "no cut was due"
    assert [r.cut_factor for r in come_back(run_to(38, before=ROSE_A_LITTLE), 2)] == [1.0, 1.0, 0.5]


def test_the_last_rollback_cuts_the_rate_whatever_is_suspected() -> None:
    run = run_to(38, max_rollbacks=3)
    assert [r.cut_factor for r in come_back(run, 2)] == [1.0, 1.0, 0.5]
    run.healthy(12)
    halt = bad(run, 3, Kind.non_finite, math.nan)[-1]
    assert isinstance(halt, Halt)
    skip, *others = halt.settings
    assert re.fullmatch(r"data\.skip=\[\[\d+,\d+\]\]", skip)
    assert others == ["optim.lr", "guard.max_rollbacks=6"]


def test_trouble_beyond_the_repeat_window_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_REPEAT_WINDOW", 20)
    run = run_to(38)
    assert rolled_back(run).onset_step == 39
    run.healthy(39 + 20 - run.updates)
    later = rolled_back(run)
    assert (later.onset_step, later.repeat) == (60, 0)

    run = run_to(38)
    rolled_back(run)
    run.healthy(38 + 20 - run.updates)
    sooner = rolled_back(run)
    assert (sooner.onset_step, sooner.repeat) == (59, 1)


def test_the_budget_halts_and_is_regained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "_REPEAT_WINDOW", 1)
    monkeypatch.setattr(ladder, "_BUDGET_WINDOW", 100)
    run = run_to(38, max_rollbacks=2)
    rolled_back(run)
    run.healthy(60 - run.updates)
    rolled_back(run)
    run.healthy(138 - run.updates)  # step 139: 100 after the first onset, so one is regained
    assert rolled_back(run).onset_step == 139

    run.healthy(150 - run.updates)
    action = bad(run, 3)[-1]
    assert isinstance(action, Halt)
    assert "2 rollbacks within 100 steps" in action.reason


@pytest.mark.parametrize("persist", [10, 50])
def test_too_many_discards_in_a_row_halt_even_where_none_would_go_back(
    persist: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "_MAX_DISCARDS", 8)
    run = run_to(25, persist=persist)
    actions = bad(run, 9)
    assert all(isinstance(action, Discard) for action in actions[:8])
    assert isinstance(actions[8], Halt)
    assert "9 steps in a row discarded" in actions[8].reason


def test_a_level_that_comes_back_is_waited_for_and_accepted() -> None:
    run = run_to(38)
    rolled_back(run, Kind.spike)
    run.healthy(8)
    losses = [5.0, 5.1, 4.9, 5.05, 4.95, 5.0]
    actions = [run.attempt(Kind.spike, loss) for loss in losses]
    assert all(isinstance(action, Discard) for action in actions[:5])
    assert "new baseline at 6" in actions[3].reason
    assert isinstance(actions[5], Rebaseline)
    assert actions[5].losses == tuple(losses)
    assert actions[5].grad_norms == (1.0,) * 6
    assert run.attempt(Kind.clean, 5.0) == Apply(reason="told Clean")
    assert isinstance(run.attempt(Kind.spike, 9.0), Discard), "a new episode, from one"


LEVEL = [(3.4 + 0.01 * (-1) ** n, 1.0) for n in range(6)]
RISING = [(3.4 + 0.05 * n, 1.0) for n in range(6)]


@pytest.mark.parametrize(
    ("recent", "comes_back", "kind"),
    [
        (LEVEL, False, Rollback),  # the first time it may be the weights
        (LEVEL, True, Rebaseline),  # from other weights too, and no longer rising: the data
        (RISING, True, Rollback),
        (LEVEL[:5], True, Rollback),  # too short to tell
    ],
)
def test_a_drift_that_comes_back_level_is_a_new_baseline(
    recent: list[tuple[float, float]], comes_back: bool, kind: type[Action]
) -> None:
    run = run_to(38)
    if comes_back:
        assert isinstance(run.attempt(Kind.drift, drift_steps=5), Rollback)
        run.healthy(8)
    action = run.attempt(Kind.drift, 3.4, drift_steps=5, recent=recent)
    assert isinstance(action, kind)
    if isinstance(action, Rebaseline):
        assert action.applied
        assert action.losses == tuple(loss for loss, _ in recent)


def test_a_level_is_first_suspected_to_be_the_model() -> None:
    action = bad(run_to(38), 3, loss=5.0)[-1]
    assert isinstance(action, Rollback), "only a level that survives a rollback is the data's"


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([math.nan] * 3, "non-finite"),
        ([5.0, 5.0, math.inf], "one non-finite"),
        ([10.5, 10.5, 10.5], "worse than knowing nothing"),
        ([5.0, 5.0, 10.5], "one worse than knowing nothing"),
        ([4.0, 6.5, 9.0], "not level"),
        ([5.0] * 5 + [math.nan], "a level run broken by a non-finite one"),
    ],
)
def test_what_never_becomes_a_baseline(losses: list[float], why: str) -> None:
    run = run_to(38)
    rolled_back(run)
    run.healthy(8)
    kinds = [Kind.spike if math.isfinite(loss) else Kind.non_finite for loss in losses]
    *first, last = (run.attempt(*step) for step in zip(kinds, losses, strict=True))
    assert all(isinstance(action, Discard) for action in first)
    assert isinstance(last, Rollback), why
    assert last.repeat == 1


def test_drift_goes_back_at_once_from_where_it_began() -> None:
    run = run_to(38)
    action = run.attempt(Kind.drift, 3.4, drift_steps=14)
    assert isinstance(action, Rollback)
    assert action.onset_step == 25
    assert action.skip == (23 * BATCH, 39 * BATCH)
    assert [record.step for record in action.targets] == [20, 10]
    assert "bad steps" not in action.reason


def test_a_drift_older_than_the_ring_goes_back_as_far_as_there_is() -> None:
    """A slow rise takes more steps to be seen than three checkpoints hold: no reason to halt."""
    run = run_to(60)
    assert min(record.step for record in run.records) > 20, "what is older was retired"
    action = run.attempt(Kind.drift, 3.4, drift_steps=50)
    assert isinstance(action, Rollback)
    [oldest] = action.targets
    assert oldest.state is State.clean
    assert oldest.step == 30
    assert action.skip == (30 * BATCH, 61 * BATCH), "nothing before it: those steps stay"
    assert action.onset_step == 11


@pytest.mark.parametrize("kind", [Kind.spike, Kind.non_finite])
def test_palm_goes_a_hundred_steps_back_and_skips_hundreds_of_batches(kind: Kind) -> None:
    palm = remedy_rules(**yaml.safe_load(PALM.read_text()))  # the shipped preset
    run = PaperRun(palm, every=50, clean_after=10, keep=4)
    run.healthy(437)
    action = rolled_back(run, kind)
    assert all(action.onset_step - 1 - record.step >= 99 for record in action.targets)
    assert action.targets[0].step == 300, "the newest that is a hundred steps back"
    assert 200 <= (action.skip[1] - action.skip[0]) / BATCH <= 500
    assert action.skip[0] <= (action.onset_step - 1) * BATCH - 100 * BATCH


KINDS = st.sampled_from([Kind.clean] * 6 + [Kind.spike, Kind.non_finite, Kind.drift])
STEPS = st.lists(
    st.tuples(KINDS, st.integers(1, 12), st.sampled_from([3.0, 5.0, 5.1, 9.0, 99.0])),
    min_size=1,
    max_size=25,
)
SMALL_RULES = st.builds(
    table_rules,
    persist=st.integers(1, 4),
    margin=st.integers(0, 3),
    ahead=st.integers(0, 3),
    back=st.integers(0, 12),
    max_rollbacks=st.integers(0, 4),
    level_steps=st.integers(2, 6),
)


@given(rules=SMALL_RULES, steps=STEPS)
@settings(max_examples=30, deadline=None)
def test_any_course_of_events(rules: RemedyRules, steps: list[tuple[Kind, int, float]]) -> None:
    run = PaperRun(rules, every=5)
    for kind, count, loss in steps:
        for _ in range(count):
            before = list(run.records)
            action = run.attempt(kind, loss, drift_steps=count)
            assert action.reason
            assert isinstance(action, Apply) is (kind is Kind.clean)
            if isinstance(action, Rollback):
                check_rollback(action, before, run)
            if isinstance(action, Halt):
                return


def check_rollback(action: Rollback, records: list[Record], run: PaperRun) -> None:
    assert action.targets
    assert all(record in records for record in action.targets)
    assert all(record.state is State.clean for record in action.targets)
    assert all(record.cursor <= action.skip[0] for record in action.targets)
    reach = max(0, action.onset_step - run.rules.guard.back)
    if action.targets[0].step > reach:
        check_oldest(action, records, reach)
    else:
        assert all(record.step <= reach for record in action.targets)
    serials = [record.serial for record in action.targets]
    older = sorted((s for s in serials if s <= serials[0]), reverse=True)
    assert serials == older + sorted(s for s in serials if s > serials[0])
    assert all(p in run.history.ledger for p in (action.skip[0], action.skip[1] - 1))


def check_oldest(action: Rollback, records: list[Record], reach: int) -> None:
    """For a drift alone, and where nothing older is left."""
    assert "told Drift" in action.reason
    clean = [record for record in records if record.state is State.clean]
    assert action.targets == (clean[0],)
    assert clean[0].step > reach
    assert action.skip[0] >= clean[0].cursor


@given(
    rules=SMALL_RULES,
    healthy=st.integers(0, 40),
    kinds=st.lists(st.sampled_from([Kind.spike, Kind.non_finite]), min_size=1, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_bad_for_ever_halts_soon(rules: RemedyRules, healthy: int, kinds: list[Kind]) -> None:
    run = PaperRun(rules, every=5)
    run.healthy(healthy)
    at_most = (rules.guard.max_rollbacks + 1) * rules.guard.persist
    for _, kind in zip(range(at_most), itertools.cycle(kinds), strict=False):
        action = run.attempt(kind, 99.0)
        if isinstance(action, Halt):
            return
    raise AssertionError(f"still going on after {at_most} bad steps: {action}")


@given(pattern=st.lists(st.booleans(), max_size=30))
@settings(max_examples=20, deadline=None)
def test_trouble_survives_json(pattern: list[bool]) -> None:
    rules = table_rules()
    one, two = BadStepTracker(rules.guard), BadStepTracker(rules.guard)
    for step, is_bad in enumerate(pattern, start=1):
        loss = math.nan if is_bad and step % 3 == 0 else 5.0
        one.note(attempted(step, loss), BEFORE if is_bad else None)
    text = json.dumps(one.to_json(), allow_nan=False)
    two.load_json(json.loads(text))
    assert json.dumps(two.to_json()) == text
    for trouble in (one, two):
        trouble.note(attempted(99, 5.0), BEFORE)
    assert one.to_json() == two.to_json()
    assert (one.num_recent(), one.in_a_row) == (two.num_recent(), two.in_a_row)
    assert [step.step for step in one.last_run()] == [step.step for step in two.last_run()]
    one.settle()
    assert (one.num_recent(), one.in_a_row, one.last_run(), one.bad) == (0, 0, [], [])


def decided(run: PaperRun, replayed: Replayed) -> Action:
    """On one more bad step that was replayed."""
    signals = run._next_signals(5.0)
    run.trouble.note(signals, BEFORE)
    case = DecisionInput(
        verdict=Verdict(kind=Kind.spike, reason="high", onset_step=signals.step, onset=0),
        signals=signals,
        trouble=run.trouble,
        history=run.history,
        ring=run.records,
        rules=run.rules,
        untrained_loss=10.0,
        replayed=replayed,
    )
    return decide(case)


@pytest.mark.parametrize("num_rollbacks", [0, 1, 2])
@pytest.mark.parametrize(
    ("replayed", "halts"),
    [
        (Replayed(proven="hardware, sticky: rank 1 on node1", may_settle=False), True),
        (Replayed(proven="state corrupted", may_settle=False, blames_weights=True), False),
        (Replayed(proven="rate", may_settle=False, rate_factor=1 / 3), False),
        (Replayed(may_settle=False), None),
    ],
)
def test_a_proven_cause_that_is_no_sample_skips_none_and_never_settles(
    num_rollbacks: int, replayed: Replayed, halts: bool | None
) -> None:
    run = run_to(40)
    for _ in range(num_rollbacks):
        rolled_back(run)
    bad(run, 20, loss=5.0) if halts is None else None
    before = list(run.history.ledger)
    action = decided(run, replayed)
    assert not isinstance(action, Rebaseline), action
    if halts is None:
        return
    assert isinstance(action, Halt) or (isinstance(action, Rollback) and action.read_again)
    assert list(run.history.ledger) == before
    if halts or (replayed.blames_weights and num_rollbacks == 2):
        assert isinstance(action, Halt) and replayed.proven in action.reason
        assert action.settings == (), "no setting mends a device"


def test_steps_that_no_precision_can_compute_are_left_out_until_they_persist() -> None:
    run = run_to(40)
    replayed = Replayed(proven="numerics: in FP32 it is good", may_discard=True, may_settle=False)
    *first, last = (decided(run, replayed) for _ in range(run.rules.guard.persist))
    assert first and all(isinstance(action, Discard) for action in first)
    assert isinstance(last, Halt) and "in FP32 it is good" in last.reason
    assert last.settings == ("compute.precision=fp32",)
