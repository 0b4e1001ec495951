"""Where this rank's part of a tensor lies in the whole, and how many ranks hold that part.

A part is a box. Where only the first dimension is cut, a box is a range of the flattened tensor.
Where others are cut as well, a checkpoint holds the boxes one after another (:class:`Grid`), so
that each is a range there, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from runner.distributed.agreement import Ranks
from runner.embed.state.stages import Holders, Stages
from runner.system.error import ConfigError

Box = tuple[tuple[int, int], ...]  # (first index, how many) by dimension
_MOST_CUTS = 1 << 20  # boxes of a tensor in a checkpoint that is read


@dataclass(frozen=True, slots=True)
class Grid:
    """How a checkpoint cuts a tensor into boxes, which it holds in row-major order.

    Args:
        ends: by dimension, where a box begins or ends: from 0 to the size, rising.
    """

    ends: tuple[tuple[int, ...], ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Grid:
        """One box."""
        return cls(tuple((0, size) for size in shape))

    @classmethod
    def from_json(cls, ends: object, shape: Sequence[int]) -> Grid:
        """
        Raises:
            ValueError: no grid of a tensor of this shape.
        """
        if not isinstance(ends, list) or len(ends) != len(shape):
            raise ValueError(f"{str(ends)[:80]} cuts no tensor of shape {list(shape)}")
        for cuts, size in zip(ends, shape, strict=True):
            are_whole = all(type(end) is int for end in cuts)
            if not are_whole or cuts != sorted(set(cuts)) or [cuts[0], cuts[-1]] != [0, size]:
                raise ValueError(f"{str(cuts)[:80]} cuts no dimension of {size}")
        if math.prod(len(cuts) - 1 for cuts in ends) > _MOST_CUTS:
            raise ValueError(f"{str(ends)[:80]}: more than {_MOST_CUTS:,} boxes")
        return cls(tuple(map(tuple, ends)))

    @property
    def is_flat(self) -> bool:
        """Whether its order is that of the flattened tensor."""
        return all(len(cuts) <= 2 for cuts in self.ends[1:])

    def start(self, box: Box) -> int:
        """How many elements lie before one of its boxes."""
        sizes = [cuts[-1] for cuts in self.ends]
        return sum(
            math.prod(count for _, count in box[:dim]) * first * math.prod(sizes[dim + 1 :])
            for dim, (first, _) in enumerate(box)
        )

    def overlapping(self, box: Box) -> Iterator[Box]:
        """Its boxes that have an element in common with ``box``."""
        return itertools.product(
            *(
                [
                    (begin, end - begin)
                    for begin, end in itertools.pairwise(cuts)
                    if begin < first + count and end > first
                ]
                for cuts, (first, count) in zip(self.ends, box, strict=True)
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A part of a tensor of ``shape``: ``count`` elements from ``start``.

    They are elements of the flattened tensor, or of its boxes in the order of ``grid``; this
    rank's part is ``box``. ``copies`` ranks hold the same part, and this is number ``index`` of
    them; they are the ranks of ``group`` (None: all ranks).
    """

    shape: tuple[int, ...]
    start: int
    count: int
    index: int
    copies: int
    group: dist.ProcessGroup | None = None
    grid: Grid | None = None
    box: Box | None = None


def replicated(shape: Sequence[int], holders: Holders, rank: int) -> Geometry:
    """Of a tensor that is the same on some ranks, of which this is one."""
    return Geometry(
        shape=tuple(shape),
        start=0,
        count=math.prod(shape),
        index=holders.ranks.index(rank),
        copies=len(holders.ranks),
        group=holders.group,
        box=tuple((0, size) for size in shape),
    )


def nowhere(shape: Sequence[int]) -> Geometry:
    """Of a tensor of which this rank has nothing: it is of another stage of a pipeline."""
    return Geometry(shape=tuple(shape), start=0, count=0, index=0, copies=1)


def row(shape: Sequence[int], number: int, num_rows: int) -> Geometry:
    """Of a tensor that differs between ranks: each rank's is one row."""
    count = math.prod(shape)
    return Geometry(shape=(num_rows, *shape), start=number * count, count=count, index=0, copies=1)


class Meshes:
    """Which ranks hold the same parts of tensors, where no dimension of a mesh says it.

    A mesh of some of the ranks has twins on the other ranks, which hold the same: the data-parallel
    mesh of each tensor-parallel rank, for parameters that no plan cuts.
    """

    def __init__(self, ranks: Ranks, stages: Stages) -> None:
        self._ranks = ranks
        self._stages = stages
        self._holders: dict[tuple[DeviceMesh, tuple[int, ...]], Holders] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def learn(self, tensors: Iterable[torch.Tensor]) -> None:
        """Agree on the meshes of these tensors, which a stage's ranks have in the same order.

        Collective where a tensor needs it.

        Raises:
            ConfigError: the meshes of one tensor do not hold each rank of its stage once.
        """
        if self._ranks.world_size == 1:
            return
        sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        keys = {_key(tensor): None for tensor in sharded if not self._is_plain(tensor)}
        if not keys and self._stages.count == 1:
            return
        # What follows raises on all ranks alike.
        by_rank = self._ranks.gather([mesh.mesh.tolist() for mesh, _ in keys])
        for members in self._stages.members:
            _require_each_once([by_rank[rank] for rank in members], members)
        of_stage = [by_rank[rank] for rank in self._stages.own.ranks]
        own = []
        for place, (mesh, copied) in enumerate(keys):
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            at = tuple(slice(None) if n in copied else c for n, c in enumerate(coordinate))
            twins = [torch.tensor(of[place]) for of in of_stage]
            own.append(tuple(sorted({rank for t in twins for rank in t[at].flatten().tolist()})))
        for ranks in sorted({tuple(held) for of in self._ranks.gather(own) for held in of}):
            if 1 < len(ranks) < self._ranks.world_size and ranks not in self._groups:
                # Every rank takes part; one that is not of the group gets none.
                self._groups[ranks] = dist.new_group(list(ranks))
        for key, ranks in zip(keys, own, strict=True):
            self._holders[key] = Holders(ranks, self._groups.get(ranks))

    def holders(self, tensor: DTensor) -> Holders | None:
        """The ranks that hold the same part as this one; None if the mesh is not known."""
        mesh, copied = _key(tensor)
        if not self._is_plain(tensor):
            return self._holders.get((mesh, copied))
        if len(copied) == mesh.ndim:
            return self._stages.own
        if not copied:
            return Holders((self._ranks.rank,), None)
        (dim,) = copied
        group = mesh.get_group(dim)
        return Holders(tuple(dist.get_process_group_ranks(group)), group)

    def _is_plain(self, tensor: DTensor) -> bool:
        """Whether the mesh itself has the group of the ranks that hold the same."""
        mesh, copied = _key(tensor)
        is_whole = mesh.size() == len(self._stages.own.ranks)
        return is_whole and len(copied) in (0, 1, mesh.ndim)


def _key(tensor: DTensor) -> tuple[DeviceMesh, tuple[int, ...]]:
    """A tensor's mesh, and its dimensions along which the tensor is copied."""
    copied = tuple(n for n, placement in enumerate(tensor.placements) if placement.is_replicate())
    return tensor.device_mesh, copied


def _require_each_once(by_rank: Sequence[Sequence[Any]], members: Sequence[int]) -> None:
    """
    Args:
        by_rank: the ranks of each mesh, as the ranks of ``members`` have them.

    Raises:
        ConfigError: the meshes of one tensor do not hold each of these ranks once.
    """
    if len({len(of) for of in by_rank}) > 1:
        raise ConfigError("the ranks' tensors lie on different numbers of device meshes")
    for twins in zip(*by_rank, strict=True):
        lists = [tuple(torch.tensor(twin).flatten().tolist()) for twin in twins]
        distinct = sorted(set(lists))
        hold_themselves = all(rank in of for rank, of in zip(members, lists, strict=True))
        if not hold_themselves or sorted(sum(distinct, ())) != list(members):
            raise ConfigError(
                f"the device meshes of a tensor, {[list(twin) for twin in distinct]} on "
                f"different ranks, do not hold each of {len(members)} ranks once; what only some "
                "ranks hold cannot be saved. Where they are stages of a pipeline, say so: "
                'pipeline=mesh["pp"]'
            )


def geometry(
    tensor: torch.Tensor, name: str, rank: int, stage: Holders, meshes: Meshes
) -> Geometry:
    """The geometry of a DTensor, or of a plain tensor that is the same on all ranks of a stage.

    Raises:
        ConfigError: it has no values of its own, or its mesh is not known.
    """
    if not isinstance(tensor, DTensor):
        return replicated(tensor.shape, stage, rank)
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate, holders = mesh.get_coordinate(), meshes.holders(tensor)
    if coordinate is None or holders is None or any(p.is_partial() for p in placements):
        raise ConfigError(
            f"{name}: is laid out as {placements} over {mesh.size()} of {len(stage.ranks)} ranks; "
            "partial sums have to be reduced (redistribute), and a mesh has to hold this rank and "
            "be that of a parameter which Guard or Ring was given"
        )
    if holders.ranks == stage.ranks:
        return replicated(tensor.shape, stage, rank)
    shape = tuple(tensor.shape)
    grid, box = _cut(shape, name, mesh, placements, coordinate)
    if [count for _, count in box] != list(tensor._local_tensor.shape):
        raise ConfigError(
            f"{name}: {placements} give {box} of {list(shape)}, and this rank holds "
            f"{list(tensor._local_tensor.shape)}"
        )
    return Geometry(
        shape=shape,
        start=grid.start(box),
        count=math.prod(count for _, count in box),
        index=holders.ranks.index(rank),
        copies=len(holders.ranks),
        group=holders.group,
        grid=None if grid.is_flat else grid,
        box=box,
    )


def _cut(
    shape: tuple[int, ...],
    name: str,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[Grid, Box]:
    """The grid of a tensor, and this rank's box in it."""
    ends, box = [], []
    for dim, size in enumerate(shape):
        cutting = [n for n, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        parts, cuts = _parts(size, tuple((placements[n], mesh.size(n)) for n in cutting))
        if not parts:
            raise ConfigError(
                f"{name}: {placements} give a rank rows of several places of dimension {dim}, "
                f"which has {size}; that cannot be saved. Let the sizes of the mesh divide it"
            )
        ends.append(cuts)
        box.append(parts[tuple(coordinate[n] for n in cutting)])
    return Grid(tuple(ends)), tuple(box)


@lru_cache(maxsize=4096)
def _parts(
    size: int, cuts: tuple[tuple[Placement, int], ...]
) -> tuple[dict[tuple[int, ...], tuple[int, int]], tuple[int, ...]]:
    """(first, how many) of a dimension's indices by coordinate, and where a part begins or ends.

    As torch cuts them: one dimension of the mesh after the other. Nothing where a part has indices
    of several places.
    """
    rows: dict[tuple[int, ...], torch.Tensor] = {(): torch.arange(size)}
    for placement, count in cuts:
        dim = placement.dim  # type: ignore[attr-defined]
        rows = {
            (*place, number): part.flatten()
            for place, held in rows.items()
            for number, part in enumerate(
                placement._split_tensor(  # type: ignore[attr-defined]
                    held.view(*[1] * dim, -1), count, with_padding=False, contiguous=False
                )[0]
            )
        }
    parts = {}
    for place, held in rows.items():
        first, last = (int(held[0]), int(held[-1])) if len(held) else (size, size - 1)
        if last - first + 1 != len(held) or not bool((held.diff() == 1).all()):
            return {}, ()
        parts[place] = first, len(held)
    return parts, tuple(sorted({0, size, *(first for first, _ in parts.values())}))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached from autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
