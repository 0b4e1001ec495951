"""Agreement by sums, and the gate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from runner.policy.decision.signals import NUM_LANES, Limits, all_equal, lanes
from tests.policy.steps import attempted

MAX_RANKS = 20_000
RANKS = st.integers(1, MAX_RANKS)
# Not st.text(): building its table of all of Unicode takes longer than all the rest.
WORDS = st.text(alphabet='ab 1"\\\n\0é☃𝄞', max_size=20)


def summed(groups: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[list[float], list[float]]:
    """What an FP64 all-reduce makes of ``count`` ranks that each give these lanes."""
    width = range(len(groups[0][1]))
    sums = [math.fsum(float(count * told[at]) for count, told in groups) for at in width]
    squares = [math.fsum(float(count * told[at] ** 2) for count, told in groups) for at in width]
    return sums, squares


@given(identity=WORDS, ranks=RANKS)
@example(identity="step 1", ranks=MAX_RANKS)
@settings(max_examples=30, deadline=None)
def test_equal_identities_agree(identity: str, ranks: int) -> None:
    assert all_equal(*summed([(ranks, lanes(identity))]), ranks)


@given(one=WORDS, other=WORDS, ranks=st.integers(2, MAX_RANKS))
@example(one="step 1", other="step 2", ranks=MAX_RANKS)
@settings(max_examples=30, deadline=None)
def test_one_differing_rank_is_noticed(one: str, other: str, ranks: int) -> None:
    assume(one != other)
    assert not all_equal(*summed([(ranks - 1, lanes(one)), (1, lanes(other))]), ranks)


@pytest.mark.parametrize("ranks", [2, 3, 1000, 19_999, MAX_RANKS])
@pytest.mark.parametrize("value", [0, 1, 2047, 4094])
def test_the_smallest_difference_is_noticed(ranks: int, value: int) -> None:
    groups = [(ranks - 1, (value, 7, 7)), (1, (value + 1, 7, 7))]
    assert not all_equal(*summed(groups), ranks)


def test_lanes_are_stable_distinct_and_small_enough_to_be_exact() -> None:
    told = {lanes(f"step {step}") for step in range(2000)}
    assert len(told) == 2000
    assert all(len(numbers) == NUM_LANES for numbers in told)
    largest = max(number for numbers in told for number in numbers)
    assert min(number for numbers in told for number in numbers) >= 0
    assert MAX_RANKS**2 * largest**2 < 2**53, "sums of squares must stay exact in FP64"
    assert lanes("holdfast") == lanes("holdfast")


def test_a_sum_that_is_not_a_number_is_no_agreement() -> None:
    assert not all_equal([math.nan] * 3, [math.nan] * 3, 4)


@pytest.mark.parametrize(
    ("numbers", "finite"),
    [
        ({}, True),
        ({"grad_norm": 0.0}, True),
        ({"loss": math.nan}, False),
        ({"loss": math.inf}, False),
        ({"loss": -math.inf}, False),
        ({"grad_norm": math.nan}, False),
        ({"grad_norm": math.inf}, False),
        ({"nonfinite_ranks": 1}, False),
    ],
)
def test_is_finite(numbers: dict[str, Any], finite: bool) -> None:
    signals = attempted(1, **numbers)
    assert signals.is_finite is finite
    assert Limits().exceeded(signals) is not finite, "without limits the gate closes on these only"


@pytest.mark.parametrize(
    ("loss", "grad_norm", "exceeded"),
    [
        (2.0, 1.0, False),
        (4.0, 5.0, False),  # at the limit is applied
        (math.nextafter(4.0, 5.0), 5.0, True),
        (4.0, math.nextafter(5.0, 6.0), True),
        (math.nan, 1.0, True),
        (2.0, math.nan, True),
        (-math.inf, 1.0, True),
    ],
)
def test_limits(loss: float, grad_norm: float, exceeded: bool) -> None:
    signals = attempted(1, loss, grad_norm)
    assert Limits(loss=4.0, grad_norm=5.0).exceeded(signals) is exceeded
