"""Boxes of tensors: in a checkpoint one after another, and read into boxes of another cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from runner.embed.state.geometry import Geometry, Grid, _parts, _require_each_once
from runner.embed.state.staged_state import Regrouped, TensorSlice
from runner.system.error import ConfigError


def drawn_grid(dice: random.Random, shape: tuple[int, ...]) -> Grid:
    ends = []
    for size in shape:
        inner = dice.sample(range(1, size), dice.randint(0, min(2, size - 1))) if size > 1 else []
        ends.append(tuple(sorted({0, size, *inner})))
    return Grid(tuple(ends))


def boxes(grid: Grid) -> list[Any]:
    return list(grid.overlapping(tuple((0, cuts[-1]) for cuts in grid.ends)))


def within(box: Any) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in box)


@pytest.mark.parametrize("seed", range(40))
def test_what_one_grid_stored_is_read_by_another(seed: int) -> None:
    dice = random.Random(seed)
    shape = tuple(dice.randint(1, 7) for _ in range(dice.randint(0, 4)))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    if seed % 3 == 0:
        whole = torch.complex(whole, -whole)
    stored, wanted = drawn_grid(dice, shape), drawn_grid(dice, shape)
    parts = [whole[within(box)].reshape(-1) for box in boxes(stored)]
    starts = [stored.start(box) for box in boxes(stored)]
    assert starts == [sum(map(len, parts[:at])) for at in range(len(parts))], "none between"
    data = torch.cat(parts)
    for box in boxes(wanted):
        where = Geometry(
            shape=shape, start=0, count=whole[within(box)].numel(), index=0, copies=1, box=box
        )
        read = Regrouped("a", whole.dtype, where, stored)
        flat = torch.view_as_real(data).reshape(-1) if data.is_complex() else data
        [part.local for part in read.slices]  # as a look at all sizes does, which loads nothing
        for part in read.slices:
            part.local.copy_(flat[part.start : part.start + len(part.local)])
        assert torch.equal(read.loaded(), whole[within(box)].reshape(-1))


def test_an_empty_part_reads_nothing() -> None:
    where = Geometry(shape=(3,), start=3, count=0, index=0, copies=1, box=((3, 0),))
    read = Regrouped("a", torch.float32, where, Grid(((0, 1, 3),)))
    assert read.slices == [] and len(read.loaded()) == 0


@pytest.mark.parametrize("size", [1, 3, 4, 7, 12, 13])
@pytest.mark.parametrize("counts", [(2,), (3,), (2, 2), (3, 2), (2, 3)])
def test_a_dimension_is_cut_as_torch_cuts_it(size: int, counts: tuple[int, ...]) -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as torchs

    parts, ends = _parts(size, tuple((Shard(0), count) for count in counts))
    for place, (first, count) in parts.items():
        shape, offset = torchs((size,), counts, list(place), [Shard(0)] * len(counts))
        assert shape == (count,) and (not count or offset == (first,))
    assert ends[0] == 0 and ends[-1] == size


@pytest.mark.parametrize(
    "ends",
    [
        None, [[0, 4]], [[0, 4], [0, 2, 1, 3]], [[0, 4], [0, 1]], [[0, 4], [1, 3]],
        [[0, 4], [0, 1, 1, 3]], [[0, 4.0], [0, 3]], [[True, 4], [0, 3]], [[], [0, 3]], [[0, 4], 3],
    ],
)  # fmt: skip
def test_what_cuts_no_tensor_is_refused(ends: Any) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        Grid.from_json(ends, (4, 3))
    assert Grid.from_json([[0, 4], [0, 1, 3]], (4, 3)) == Grid(((0, 4), (0, 1, 3)))


def test_a_slice_of_a_box_is_a_part_of_its_copies() -> None:
    """Each of the ranks that hold it saves another part."""
    values = torch.arange(10.0)
    where = [Geometry(shape=(4, 5), start=10, count=10, index=n, copies=3) for n in range(3)]
    slices = [TensorSlice("a", torch.float32, one, lambda: values) for one in where]
    assert [part.start for part in slices] == [10, 14, 18]
    assert torch.equal(torch.cat([part.local for part in slices]), values)


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ([[[0, 1]], [[0, 1]], [[2]], []], "on different numbers of device meshes"),
        ([[[0, 1]], [[0, 1]], [[0, 2]]], r"\[\[0, 1\], \[0, 2\]\] .*hold each of 3 ranks once"),
        ([[[0, 1]], [[0, 1]], [[0, 1]]], r'a pipeline, say so: pipeline=mesh\["pp"\]'),
    ],
)
def test_meshes_that_do_not_hold_each_rank_once_are_refused(by_rank: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _require_each_once(by_rank, range(len(by_rank)))
    _require_each_once([[[0, 2]], [[1]], [[0, 2]]], range(3))
