"""Dealing a global batch: every slot once, every rank in lockstep, for any world size."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runner.data.cursor import shard_batch

SIZES = st.integers(1, 96).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(1, 40), st.integers(1, size))
)


@given(sizes=SIZES)
@example(sizes=(1, 1, 1))
@example(sizes=(5, 2, 4))
@example(sizes=(8, 3, 2))
@settings(max_examples=40, deadline=None)
def test_every_slot_once_and_all_ranks_alike(sizes: tuple[int, int, int]) -> None:
    global_size, micro_size, world_size = sizes
    dealt = [shard_batch(global_size, micro_size, world_size, rank) for rank in range(world_size)]
    flat = [[slot for micro in ranks for slot in micro] for ranks in dealt]

    real = sorted(slot for slots in flat for slot in slots if slot is not None)
    assert real == list(range(global_size))

    shapes = [[len(micro) for micro in micros] for micros in dealt]
    assert shapes == [shapes[0]] * world_size, "collectives run in lockstep"
    assert all(size == micro_size for size in shapes[0][:-1])
    assert 1 <= shapes[0][-1] <= micro_size

    assert all(any(slot is not None for slot in slots) for slots in flat)
    assert sum(slots.count(None) for slots in flat) == -global_size % world_size, "minimal padding"


def test_slots_go_round_the_ranks_in_order() -> None:
    assert shard_batch(8, 2, 2, 0) == ((0, 2), (4, 6))
    assert shard_batch(8, 2, 2, 1) == ((1, 3), (5, 7))
    assert shard_batch(5, 2, 2, 0) == ((0, 2), (4,))
    assert shard_batch(5, 2, 2, 1) == ((1, 3), (None,))
    assert shard_batch(3, 16, 1, 0) == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((4, 1, 5, 0), "5 ranks but only 4 sequences"),
        ((0, 1, 1, 0), "positive"),
        ((4, 0, 1, 0), "positive"),
        ((4, 1, 0, 0), "positive"),
        ((4, 1, 2, 2), "rank < world_size"),
        ((4, 1, 2, -1), "0 <= rank"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        shard_batch(*sizes)
