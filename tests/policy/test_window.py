"""Median and MAD against brute force."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.policy.decision.window import Window

# Few distinct values make ties; the others make everything else.
VALUES = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, -3.0]), min_size=1, max_size=30),
    st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=30),
)


def brute_sigma(values: list[float]) -> float:
    center = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - center) for value in values)


@given(values=VALUES, size=st.integers(1, 12))
@example(values=[1.0], size=4)
@example(values=[1.0, 1.0, 1.0, 9.0], size=4)
@example(values=[0.0, 0.0, 5.0, 5.0], size=4)
@settings(max_examples=50, deadline=None)
def test_statistics_of_the_last_values(values: list[float], size: int) -> None:
    window = Window(size)
    for count, value in enumerate(values, start=1):
        window.push(value)
        last = values[max(0, count - size) : count]
        assert window.values() == last
        assert len(window) == len(last)
        assert window.median() == statistics.median(last)
        assert window.sigma() == brute_sigma(last)


@given(values=VALUES, size=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_rebuilding_from_its_values_changes_nothing(values: list[float], size: int) -> None:
    window = Window(size, values)
    again = Window(size, window.values())
    assert again.values() == window.values()
    assert (again.median(), again.sigma()) == (window.median(), window.sigma())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_values_enter(value: float) -> None:
    window = Window(4, [1.0, 2.0])
    with pytest.raises(AssertionError, match="clean values"):
        window.push(value)
    assert window.values() == [1.0, 2.0]
