"""The digest of a large state: of what is held, wherever it is cut, and never in a stop's way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.checkpoint import state_digest as digests
from runner.checkpoint import tensor_sums
from runner.checkpoint.state_digest import digest_of_sums, is_whole
from runner.checkpoint.tensor_sums import Summing, Sums, added
from runner.session.summary import at_a_stop, collect_digest


def sums_of(name: str, values: torch.Tensor, cuts: Sequence[int] = ()) -> Sums:
    edges = [0, *sorted(cuts), len(values)]
    found: Sums = (0,) * tensor_sums.LANES
    for first, last in pairwise(edges):
        found = added(found, Summing().of(name, first, values[first:last]))
    return found


VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in a small tensor, and several parts in a block."""
    monkeypatch.setattr(tensor_sums, "BLOCK_ELEMENTS", 128)
    monkeypatch.setattr(tensor_sums, "_CACHED_ELEMENTS", 48)


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_wherever_it_is_cut_the_sums_are_the_same(cuts: list[int]) -> None:
    assert sums_of("param/a", VALUES, cuts) == sums_of("param/a", VALUES)


def changed(at: int, bit: int) -> torch.Tensor:
    other = VALUES.clone()
    other.view(torch.int32)[at] ^= (1 << bit) if bit < 31 else -(1 << 31)
    return other


@pytest.mark.parametrize("at", [0, 127, 128, 999])
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_any_single_bit_is_noticed(at: int, bit: int) -> None:
    pairs = zip(sums_of("a", changed(at, bit)), sums_of("a", VALUES), strict=True)
    assert all(one != other for one, other in pairs)


def test_what_is_exchanged_is_noticed() -> None:
    swapped, moved = VALUES.clone(), VALUES.roll(128)
    swapped[[3, 500]] = swapped[[500, 3]]
    twice = changed(5, 31)
    twice.view(torch.int32)[5 + 128] ^= -(1 << 31)
    told = {sums_of("a", one) for one in (VALUES, swapped, moved, twice, -VALUES)}
    assert len(told | {sums_of("b", VALUES)}) == 6


def test_the_digest_is_of_names_shapes_sums_and_counts() -> None:
    told = [
        digest_of_sums({"a": ((2, 3), (1, 2))}, {"a": 1}),
        digest_of_sums({"a": ((3, 2), (1, 2))}, {"a": 1}),
        digest_of_sums({"b": ((2, 3), (1, 2))}, {"a": 1}),
        digest_of_sums({"a": ((2, 3), (2, 1))}, {"a": 1}),
        digest_of_sums({"a": ((2, 3), (1, 2))}, {"a": 2}),
    ]
    assert len(set(told)) == len(told) and all(one.startswith("v2:") for one in told)


def test_the_definition_stands() -> None:
    """Digests of runs that have ended are compared with it."""
    tensor_sums.BLOCK_ELEMENTS, tensor_sums._CACHED_ELEMENTS = 1 << 20, 1 << 16
    values = torch.arange(3, dtype=torch.float32)
    told = digest_of_sums({"param/a": ((3,), sums_of("param/a", values))}, {"a": 7})
    assert told == "v2:c122e9b41b05276ae27f8837f7db517721fa355942866a185c02fb86ff39fcaa"
    assert is_whole([(1 << 13, 1 << 13)]) and not is_whole([(1 << 13, 1 << 13), (1,)])


# Over ranks


@dataclass
class Shard:
    name: str
    shape: tuple[int, ...]
    start: int
    local: torch.Tensor


@dataclass
class Held:
    """One rank's part of two tensors, cut in ``count`` rows, ``copies`` times."""

    rank: int
    count: int
    copies: int = 1
    tensors: Mapping[str, torch.Tensor] = field(
        default_factory=lambda: {"param/a": VALUES, "exp_avg/a": VALUES * 2}
    )

    @property
    def replica(self) -> tuple[int, int]:
        return self.rank // self.count, self.copies

    def shards(self) -> list[Shard]:
        found = []
        for name, whole in self.tensors.items():
            size = -(-len(whole) // self.count)
            first = min(len(whole), size * (self.rank % self.count))
            found.append(Shard(name, tuple(whole.shape), first, whole[first : first + size]))
        return found

    def update_counts(self) -> dict[str, int]:
        return {"a": 3}

    def full(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def collected(count: int, copies: int = 1, late: int | None = None) -> str | None:
    """Rank 0's digest; ``late`` is the rank that has no time left."""
    others: list[list[float]] = []

    def on(rank: int, total: Callable[[list[float]], list[float]]) -> str | None:
        ranks, engine = SimpleNamespace(rank=rank, sum=total), Held(rank, count, copies)
        return collect_digest(cast(Any, engine), cast(Any, ranks), lambda: rank == late)

    def noted(numbers: list[float]) -> list[float]:
        others.append(numbers)
        return numbers

    for rank in range(1, count * copies):
        assert on(rank, noted) is None
    return on(0, lambda numbers: [sum(all_of) for all_of in zip(numbers, *others, strict=True)])


@pytest.mark.parametrize(("count", "copies"), [(1, 1), (3, 1), (4, 2), (1, 3), (7, 1)])
def test_a_large_state_has_one_digest_on_any_layout(
    count: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "WHOLE_BYTES", 0)
    monkeypatch.setattr(Held, "full", None)  # nobody asks for a whole tensor
    expected = {
        name: (tuple(whole.shape), sums_of(name, whole))
        for name, whole in Held(0, 1).tensors.items()
    }
    assert collected(count, copies) == digest_of_sums(expected, {"a": 3})


@pytest.mark.parametrize("late", [0, 2])
def test_one_rank_without_time_is_enough(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "WHOLE_BYTES", 0)
    assert collected(3, late=late) is None


def test_a_small_state_is_left_as_well_when_it_is_late() -> None:
    asked: list[str] = []
    engine = Held(0, 1)
    ranks = SimpleNamespace(rank=0, sum=lambda numbers: numbers)
    whole = collect_digest(cast(Any, engine), cast(Any, ranks), lambda: False)
    assert whole is not None and len(whole) == 64
    engine.full = lambda name: asked.append(name) or VALUES  # type: ignore[method-assign, func-returns-value]
    assert collect_digest(cast(Any, engine), cast(Any, ranks), lambda: True) is None
    assert asked == []


def test_at_a_stop_it_is_late_with_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert at_a_stop(lambda: True)()
    is_late = at_a_stop(lambda: False)
    assert not is_late()
    monkeypatch.setattr("time.monotonic", lambda: float("inf"))
    assert is_late()
