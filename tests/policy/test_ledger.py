"""The skip ledger against the plainest model there is: a set of positions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.policy.decision.skip_ledger import Ledger

END = 60
Ranges = list[tuple[int, int]]
RANGES = st.lists(
    st.tuples(st.integers(0, END - 10), st.integers(1, 10)).map(lambda r: (r[0], r[0] + r[1])),
    max_size=8,
)


def positions(ranges: Ranges) -> set[int]:
    return {position for start, stop in ranges for position in range(start, stop)}


@given(ranges=RANGES)
@example(ranges=[(0, 5), (10, 15), (5, 10)])
@example(ranges=[(0, 2), (4, 6), (8, 10), (1, 9)])
@settings(max_examples=30, deadline=None)
def test_holds_exactly_what_was_added(ranges: Ranges) -> None:
    ledger = Ledger(ranges)
    assert {position for position in range(-1, END + 1) if position in ledger} == positions(ranges)
    assert positions(list(ledger)) == positions(ranges)
    flat = [bound for pair in ledger for bound in pair]
    assert all(a < b for a, b in pairwise(flat)), "sorted, apart, not touching"


@given(ranges=RANGES, start=st.integers(0, END))
@settings(max_examples=30, deadline=None)
def test_allowed_is_the_complement(ranges: Ranges, start: int) -> None:
    spans = list(Ledger(ranges).allowed(start))
    assert [stop is None for _, stop in spans] == [False] * (len(spans) - 1) + [True]
    closed = [(first, END + 5 if stop is None else stop) for first, stop in spans]
    flat = [bound for pair in closed for bound in pair]
    assert all(a < b for a, b in pairwise(flat))
    assert positions(closed) == set(range(start, END + 5)) - positions(ranges)


@given(ranges=RANGES, start=st.integers(0, END), size=st.integers(0, END))
@settings(max_examples=30, deadline=None)
def test_num_skipped_counts_positions(ranges: Ranges, start: int, size: int) -> None:
    expected = len(positions(ranges) & set(range(start, start + size)))
    assert Ledger(ranges).num_skipped(start, start + size) == expected


@given(ranges=RANGES, data=st.data())
@settings(max_examples=30, deadline=None)
def test_order_of_adding_does_not_matter(ranges: Ranges, data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(ranges))
    assert list(Ledger(ranges)) == list(Ledger(shuffled))


def test_a_copy_is_independent() -> None:
    first = Ledger([(0, 4)])
    second = first.copy()
    second.add(10, 12)
    first.add(20, 22)
    assert list(first) == [(0, 4), (20, 22)]
    assert list(second) == [(0, 4), (10, 12)]


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (6, 5), (-1, 5), (-3, -1), (0, 0)])
def test_a_bad_range_is_refused_and_changes_nothing(start: int, stop: int) -> None:
    ledger = Ledger([(1, 3)])
    with pytest.raises(ValueError, match="need 0 <= start < stop"):
        ledger.add(start, stop)
    assert list(ledger) == [(1, 3)]
    with pytest.raises(ValueError, match="skip range"):
        Ledger([(start, stop)])


@pytest.mark.parametrize(
    ("stop", "count", "expected"),
    [
        (100, 0, 100),
        (100, 10, 90),  # nothing skipped near
        (60, 5, 45),  # [50, 60) holds nothing that is read
        (62, 5, 47),  # two behind the range, three before it
        (55, 5, 45),  # within a range
        (30, 10, 10),  # across [20, 30)
        (30, 25, 0),  # the stream begins at 0
        (62, 32, 10),  # across both
    ],
)
def test_so_many_positions_that_are_read_before(stop: int, count: int, expected: int) -> None:
    ledger = Ledger([(20, 30), (50, 60)])
    assert ledger.before(stop, count) == expected
    assert stop - expected - ledger.num_skipped(expected, stop) <= count or stop == 100
