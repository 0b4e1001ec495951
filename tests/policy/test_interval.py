"""The interval between checkpoints, from what saves, steps, failures and restarts cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.policy.retention.interval import (
    IntervalRules,
    MeasuredCosts,
    SaveCosts,
    best_steps,
    mtbf_seconds,
    next_steps,
    prior_seconds,
    why,
)

HOUR = 3600.0
RULES = IntervalRules(clean_after=10, most=1000, prior_seconds=24 * HOUR)
# A day between failures, 2 s a save, 1 s a step: sqrt(2 * 86400 * 2) = 588 s.
USUAL = MeasuredCosts(
    step=1.0, blocked=1.0, slowed=1.0, write=5.0, restart=60.0, failures=0, up=0.0
)


@pytest.mark.parametrize(
    ("measured", "rules", "steps"),
    [
        (USUAL, RULES, 590),
        (replace(USUAL, blocked=0.0, slowed=0.02), RULES, 59),  # a hundredth of the cost: a tenth
        (replace(USUAL, step=10.0), RULES, 59),
        (replace(USUAL, failures=3), RULES, 300),  # four times the rate: half the interval
        (replace(USUAL, failures=3, up=72 * HOUR), RULES, 590),  # as rare as expected after all
        (replace(USUAL, up=2300 * HOUR), RULES, 1000),  # never fails: bounded
        (replace(USUAL, blocked=0.0, slowed=0.0), RULES, 10),  # free: as soon as proven
        (replace(USUAL, blocked=0.0, slowed=0.0, write=25.0), RULES, 25),  # but once it is written
        (replace(USUAL, failures=10**6), RULES, 17),  # the restarts alone: sqrt(2 * 60 * 2)
        (USUAL, replace(RULES, prior_seconds=HOUR), 120),
        (USUAL, replace(RULES, clean_after=700), 700),
        (USUAL, replace(RULES, most=77), 77),
    ],
)
def test_the_best_interval(measured: MeasuredCosts, rules: IntervalRules, steps: int) -> None:
    assert best_steps(measured, rules) == steps


def test_the_formula_is_that_of_the_paper() -> None:
    """Saxena 2024 counts from save to save; the loop counts the work between them."""
    save, mtbf, restart = 4.0, 24 * HOUR, 60.0
    period = save + math.sqrt(2 * (mtbf + restart) * save + save**2)
    measured = replace(USUAL, blocked=save, slowed=0.0, step=0.01)
    most = replace(RULES, most=10**9)
    assert best_steps(measured, most) == pytest.approx((period - save) / 0.01, rel=0.05)


@given(
    st.builds(
        MeasuredCosts,
        step=st.floats(0, 1e4),
        blocked=st.floats(0, 1e5),
        slowed=st.floats(0, 1e5),
        write=st.floats(0, 1e6),
        restart=st.floats(0, 1e6),
        failures=st.integers(0, 10**6),
        up=st.floats(0, 1e9),
    ),
    st.integers(1, 1000),
)
def test_it_stays_within_its_bounds_and_settles(measured: MeasuredCosts, now: int) -> None:
    best = best_steps(measured, RULES)
    assert RULES.clean_after <= best <= RULES.most
    then = next_steps(now, measured, RULES)
    assert RULES.clean_after <= then <= RULES.most
    assert next_steps(then, measured, RULES) == then
    assert str(then) in why(now, then, measured, RULES)


def test_it_does_not_flutter() -> None:
    now, changes = 590, 0
    for percent in range(-18, 19):
        noisy = replace(USUAL, slowed=1.0 * (1 + percent / 100), step=1 + percent / 200)
        changes += next_steps(now, noisy, RULES) != now
    assert changes == 0
    assert next_steps(now, replace(USUAL, failures=3), RULES) == 300


@pytest.mark.parametrize(
    ("failures", "up", "hours"),
    [(0, 0.0, 24), (0, 24 * HOUR, 48), (1, 0.0, 12), (1, 24 * HOUR, 24), (99, 176 * HOUR, 2)],
)
def test_a_rate_of_few_failures(failures: int, up: float, hours: float) -> None:
    seen = mtbf_seconds(replace(USUAL, failures=failures, up=up), RULES)
    assert seen == pytest.approx(hours * HOUR)


def test_the_rate_to_begin_with() -> None:
    assert prior_seconds(1) == 24 * HOUR
    assert prior_seconds(2048) == pytest.approx(3.093 * HOUR, abs=5)


def test_what_a_save_costs_is_told_from_the_steps_around_it() -> None:
    costs = SaveCosts()
    assert not costs.is_known
    for number in range(5):
        costs.saved(0.25)
        for _ in range(4):
            costs.step(1.5, busy=True)
        for _ in range(20):
            costs.step(1.0, busy=False)
        costs.step(30.0 if number == 3 else 1.0, busy=False)  # one slow disk moves nothing
    made = costs.measured(restart=7.0, failures=2, up=100.0)
    assert costs.is_known
    assert (made.step, made.blocked, made.slowed, made.write) == (1.0, 0.25, 2.0, 6.0)
    assert made.save == 2.25 and (made.restart, made.failures, made.up) == (7.0, 2, 100.0)


def test_where_every_step_is_busy_saves_still_count() -> None:
    costs = SaveCosts()
    for _ in range(4):
        costs.saved(0.5)
        costs.step(2.0, busy=True)
    assert costs.is_known
    made = costs.measured(restart=0, failures=0, up=0)
    assert (made.step, made.save, made.write) == (2.0, 0.5, 2.0)


def test_faster_steps_while_writing_are_no_gain() -> None:
    costs = SaveCosts()
    for _ in range(4):
        costs.saved(0.0)
        costs.step(0.5, busy=True)
        costs.step(1.0, busy=False)
    assert costs.measured(restart=0, failures=0, up=0).save == 0.0
