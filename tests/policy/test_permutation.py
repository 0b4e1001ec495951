"""The computed order: a bijection at every size, another for every key, the same everywhere."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.data.cursor import MAX_SIZE, epoch_key, held_out, permute

KNOWN_10 = [8, 4, 6, 1, 3, 7, 5, 0, 9, 2]
KNOWN_LARGE = [4573517308, 4687662495, 3203224399]
KNOWN_KEY = 5197578548964807871
KNOWN_HELD_OUT = [5, 19, 24, 26, 52]
SMALL_SIZES = [*range(1, 70), 97, 127, 128, 129, 251, 256, 257, 509, 512, 1000, 1021, 4096, 5003]


@pytest.mark.parametrize("size", SMALL_SIZES)
def test_every_index_comes_exactly_once(size: int) -> None:
    for key in (0, 1, epoch_key(7, 3)):
        order = permute(np.arange(size), size=size, key=key)
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(size))


@given(size=st.integers(1, 10**12), key=st.integers(0, 2**64 - 1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_distinct_positions_give_distinct_indices_in_range(size: int, key: int, seed: int) -> None:
    positions = np.unique(np.random.default_rng(seed).integers(0, size, 500))
    order = permute(positions, size=size, key=key)
    assert np.unique(order).size == positions.size
    assert order.min() >= 0
    assert order.max() < size


def test_the_largest_size() -> None:
    ends = np.array([0, 1, MAX_SIZE - 2, MAX_SIZE - 1])
    order = permute(ends, size=MAX_SIZE, key=5)
    assert np.unique(order).size == 4
    assert order.min() >= 0
    assert order.max() < MAX_SIZE


def test_known_values_hold_on_every_machine() -> None:
    # A change here means that no run that was ever started can be resumed in its own order.
    assert permute(np.arange(10), size=10, key=1).tolist() == KNOWN_10
    assert permute(np.arange(3), size=10**10, key=epoch_key(0, 0)).tolist() == KNOWN_LARGE
    assert epoch_key(0, 0) == KNOWN_KEY


def test_the_part_does_not_depend_on_the_rest() -> None:
    whole = permute(np.arange(1000), size=1000, key=9)
    assert np.array_equal(permute(np.arange(300, 400), size=1000, key=9), whole[300:400])
    assert np.array_equal(
        permute(np.arange(1000).reshape(10, 100), size=1000, key=9), whole.reshape(10, 100)
    )
    assert permute(np.array([], dtype=np.int64), size=5, key=0).shape == (0,)


def test_keys_give_unrelated_orders() -> None:
    orders = [permute(np.arange(2000), size=2000, key=epoch_key(1, epoch)) for epoch in range(6)]
    for first in range(6):
        for second in range(first):
            # Two random orders agree at about one place.
            assert int((orders[first] == orders[second]).sum()) < 10


@pytest.mark.parametrize("size", [1 << 20, 1_000_003])
def test_order_is_roughly_uniform(size: int) -> None:
    order = permute(np.arange(20_000), size=size, key=epoch_key(0, 1))
    counts = np.bincount(order * 100 // size, minlength=100)
    chi_squared = float(((counts - 200.0) ** 2 / 200.0).sum())
    assert chi_squared < 160  # 99 degrees of freedom: 148 is one in a thousand
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(neighbours) < 0.03


def test_each_position_reaches_each_index_equally_often() -> None:
    counts = np.zeros((7, 7), dtype=np.int64)
    for epoch in range(2100):
        counts[np.arange(7), permute(np.arange(7), size=7, key=epoch_key(3, epoch))] += 1
    assert counts.min() > 220  # 300 expected, standard deviation 16
    assert counts.max() < 380


@pytest.mark.parametrize(
    ("positions", "size"), [([0], 0), ([0], MAX_SIZE + 1), ([5], 5), ([-1], 5)]
)
def test_out_of_range_is_refused(positions: list[int], size: int) -> None:
    with pytest.raises(ValueError, match="not in"):
        permute(np.array(positions), size=size, key=0)


def test_a_batch_of_a_huge_corpus_takes_no_more_memory_than_itself() -> None:
    positions = np.arange(4096) + 10**9
    tracemalloc.start()
    found = permute(positions, size=10**10, key=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(found.tolist())) == 4096 and peak < 50 * positions.nbytes


def test_epoch_keys_do_not_collide() -> None:
    keys = {epoch_key(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(keys) == 2500
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.3, 1.0])
def test_held_out_share_is_what_was_asked(share: float) -> None:
    out = held_out(np.arange(200_000), share=share)
    assert out.dtype == np.bool_
    deviation = (share * (1 - share) / 200_000) ** 0.5
    assert abs(out.mean() - share) <= 4 * deviation


def test_held_out_is_a_property_of_the_index() -> None:
    whole = held_out(np.arange(1000), share=0.1)
    assert np.array_equal(held_out(np.arange(500, 600), share=0.1), whole[500:600])
    assert np.flatnonzero(whole)[:5].tolist() == KNOWN_HELD_OUT
    assert not np.array_equal(held_out(np.arange(1000), share=0.1, seed=1), whole)


def test_a_larger_share_only_adds() -> None:
    small, large = (held_out(np.arange(5000), share=share) for share in (0.05, 0.2))
    assert (small <= large).all()
    assert large.sum() > small.sum()
