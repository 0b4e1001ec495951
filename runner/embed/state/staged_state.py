"""The state of a user's loop as shards of the ring: staging, exchange between ranks, assembly.

The checkpoint's ``train_state`` has type, shape and sharding of each tensor by name, so that a
checkpoint can be loaded before the tensors exist. If several ranks hold the same values, each saves
a part, and they exchange the parts at a load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runner.checkpoint.manifest import ITEM_SIZES
from runner.distributed.agreement import Ranks
from runner.embed.state.codec import dtype_of
from runner.embed.state.geometry import Box, Geometry, Grid, Meshes, geometry, local, nowhere
from runner.embed.state.stages import Stages
from runner.engine.protocol import slice_of
from runner.engine.whole_state import complete

_CONVERTED = (torch.float32, torch.bfloat16, torch.float16)  # by :func:`encode`


EXPERTS: Final = (
    "Experts of which each rank has its own are DTensors on a mesh of all ranks: "
    "DTensor.from_local(experts, mesh, [Shard(0)]), and to_local() in forward"
)


def norm_of(part: torch.Tensor) -> torch.Tensor:
    """A number that changes with the values."""
    if part.is_complex():
        part = torch.view_as_real(part)
    flat = part.reshape(-1)
    wide = flat.double() if flat.numel() < 1 << 16 else flat.float()
    norm: torch.Tensor = torch.linalg.vector_norm(wide)
    return norm


def differing_norms(by_rank: Sequence[Mapping[str, float]], tolerance: float) -> str:
    """Norms of what the ranks with the same key hold, where they differ; empty if none do.

    Args:
        by_rank: by key; not compared where one is not finite.
        tolerance: relative.
    """
    for key in sorted({key for of in by_rank for key in of}):
        known = [of[key] for of in by_rank if key in of]
        if all(map(math.isfinite, known)) and max(known) - min(known) > tolerance * max(known):
            return ", ".join(f"{number:.6g}" for number in known[:8])
    return ""


def encode(values: torch.Tensor) -> torch.Tensor:
    """FP32 1-D: elements of any type as the state digest counts them ("lanes").

    Elements that are no floats become integers of up to 16 bits a lane.
    """
    flat = values.detach().contiguous().reshape(-1)
    if flat.dtype in _CONVERTED:
        return flat.float()
    if flat.dtype.itemsize == 1:
        return flat.view(torch.uint8).float()
    return (flat.view(torch.int16).to(torch.int32) & 0xFFFF).float()


def _num_lanes(values: torch.Tensor) -> int:
    """How many elements :func:`encode` makes."""
    is_kept = values.dtype in _CONVERTED or values.dtype.itemsize == 1
    return values.numel() if is_kept else values.numel() * values.dtype.itemsize // 2


class TensorSlice:
    """This rank's slice of one tensor, in the type in which the ring stores its elements.

    Of types that the ring does not know (complex, rare FP8) each element takes ``width`` elements
    of ``element_type``.

    Args:
        read: returns the slice of the live tensor; None for one that is being loaded.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        where: Geometry,
        read: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.name, self.dtype, self.geometry = name, dtype, where
        self.element_type, self._width = dtype, 1
        if dtype.is_complex:
            self.element_type, self._width = dtype.to_real(), 2
        elif str(dtype).removeprefix("torch.") not in ITEM_SIZES:
            self.element_type, self._width = torch.uint8, dtype.itemsize
        self.shape = where.shape if self._width == 1 else (*where.shape, self._width)
        num = where.count * self._width
        first = min(num, where.index * -(-num // where.copies))  # as in :func:`slice_of`
        self.start = where.start * self._width + first
        self._read, self._num = read, num
        self.staged: torch.Tensor | None = None
        if read is None:
            self.staged = self.room()

    def room(self) -> torch.Tensor:
        """1-D, of ``element_type``: memory for the whole slice."""
        return torch.zeros(self._num, dtype=self.element_type)

    @property
    def local(self) -> torch.Tensor:
        """1-D, of ``element_type``: what this rank saves or loads."""
        flat, where = self.staged, self.geometry
        if flat is None:
            assert self._read is not None
            flat = self._read().contiguous().reshape(-1).view(self.element_type)
        return slice_of(self.name, flat, where.index, where.copies).local

    def loaded(self) -> torch.Tensor:
        """1-D, of ``dtype``: the elements that were loaded."""
        assert self.staged is not None
        return self.staged.view(self.dtype)


class _StoredBox(TensorSlice):
    """A box of a checkpoint in which some of this rank's elements are."""

    def __init__(self, parts: Regrouped, box: Box, where: Geometry) -> None:
        self._parts = parts
        self.box = box
        super().__init__(parts.name, parts.dtype, where, read=self.room)

    @property
    def local(self) -> torch.Tensor:
        return self._parts.room_for(self)


class Regrouped:
    """This rank's box of a tensor that a checkpoint has cut in another way.

    The checkpoint's boxes are read one after another: only one is held at a time.

    Args:
        where: of the tensor that is to be filled.
        grid: of the checkpoint.
    """

    staged = None  # nothing is exchanged between ranks

    def __init__(self, name: str, dtype: torch.dtype, where: Geometry, grid: Grid) -> None:
        assert where.box is not None
        self.name, self.dtype = name, dtype
        self.geometry = replace(where, index=0, copies=1, group=None)
        self._own = where.box
        self._values = torch.zeros([count for _, count in where.box], dtype=dtype)
        self._open: tuple[_StoredBox, torch.Tensor] | None = None
        self.slices = [self._stored(grid, box) for box in grid.overlapping(where.box)]

    def _stored(self, grid: Grid, box: Box) -> _StoredBox:
        """The part of a stored box that has to be read: of its first dimension what is needed."""
        start = grid.start(box)
        if box:
            (begin, count), (first, own) = box[0], self._own[0]
            above, below = max(begin, first), min(begin + count, first + own)
            of_one = math.prod(count for _, count in box[1:])
            start += (above - begin) * of_one
            box = ((above, below - above), *box[1:])
        count = math.prod(count for _, count in box)
        where = replace(self.geometry, start=start, count=count, grid=grid, box=box)
        return _StoredBox(self, box, where)

    def room_for(self, box: _StoredBox) -> torch.Tensor:
        """Memory for a box, which is put in place before another is asked for."""
        if self._open is None or self._open[0] is not box:
            self._put()
            self._open = box, box.room()
        return self._open[1]

    def _put(self) -> None:
        if self._open is None:
            return
        box, elements = self._open
        values = elements.view(self.dtype).view([count for _, count in box.box])
        of_box, of_own = [], []
        for (begin, count), (first, own) in zip(box.box, self._own, strict=True):
            above, below = max(begin, first), min(begin + count, first + own)
            of_box.append(slice(above - begin, below - begin))
            of_own.append(slice(above - first, below - first))
        self._values[tuple(of_own)] = values[tuple(of_box)]
        self._open = None

    def loaded(self) -> torch.Tensor:
        """1-D, of ``dtype``: the elements that were loaded."""
        self._put()
        return self._values.reshape(-1)


class StagedState:
    """State as the shards that :class:`runner.checkpoint.ring.CheckpointRing` saves and loads.

    ``before_change`` is called before a save with other tensors than the last one, or than those of
    which :meth:`expected_in_memory` was told. Collective. Until it is set, what is captured is no
    save: a resume captures what it has loaded.
    """

    replica = (0, 1)  # this class handles copies itself, tensor by tensor

    def __init__(self, ranks: Ranks, device: torch.device, stages: Stages | None = None) -> None:
        self.device = device
        self.before_change: Callable[[], None] | None = None
        self._ranks = ranks
        self.stages = stages or Stages(ranks)
        self._meshes = Meshes(ranks, self.stages)
        self._slices: list[TensorSlice] = []
        self._saved: object = None  # the layout of the last save
        self._taken: dict[str, tuple[TensorSlice, str | None, str]] = {}
        self._loading: dict[str, TensorSlice | Regrouped] = {}
        # The entries of the checkpoint that is being loaded.
        self._stored_tensors: dict[str, Any] = {}

    @property
    def compute_device(self) -> torch.device:
        """Where the numbers of a step are, and tensors that are like no parameter."""
        return self.device

    def geometry_of(self, tensor: torch.Tensor, name: str, like: str | None = None) -> Geometry:
        """The geometry of this rank's part of a live tensor, sharded like parameter ``like``."""
        return geometry(tensor, name, self._ranks.rank, self.stages.own, self._meshes)

    def holders_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The ranks that hold the same part of a live tensor as this one."""
        holders = self._meshes.holders(tensor) if isinstance(tensor, DTensor) else None
        return (holders or self.stages.own).ranks

    # -- saving ---------------------------------------------------------------------------

    def _take(
        self,
        name: str,
        read: Callable[[], torch.Tensor],
        where: Geometry,
        like: str | None,
        home: str,
    ) -> str:
        """Take a live tensor for the next :meth:`_end_capture`; returns its name.

        Args:
            like: name of the tensor that is sharded alike; None: not sharded.
            home: what :func:`home_of` returns, or another mark.
        """
        self._taken[name] = TensorSlice(name, read().dtype, where, read), like, home
        return name

    def _end_capture(self) -> dict[str, Any]:
        """What was taken is what :meth:`shards` returns from now on; its entries in a checkpoint's
        ``train_state``. Collective."""
        entries = self.stages.union(
            {
                name: [
                    *(str(part.dtype).removeprefix("torch."), list(part.geometry.shape)),
                    *(like, home),
                    *([part.geometry.grid.ends] if part.geometry.grid else []),
                ]
                for name, (part, like, home) in self._taken.items()
            }
        )
        slices = [
            self._taken[name][0] if name in self._taken else _of_another(name, dtype, shape)
            for name, (dtype, shape, *_) in sorted(entries.items())
        ]
        # Not those of the last load: after a rollback to before the optimizer's first update there
        # are fewer tensors than in the last save, and than slots in memory are made for.
        if self.before_change is not None:
            before, self._saved = self._saved, _layout(slices)
            if before is not None and before != self._saved:
                self.before_change()
        self._slices, self._loading, self._taken = slices, {}, {}
        return dict(sorted(entries.items()))

    def shards(self) -> list[TensorSlice]:
        """The slices to save or load, in the order of their names."""
        return self._slices

    def expected_in_memory(self) -> None:
        """Slots in memory are made for the tensors of the last :meth:`expect`."""
        self._saved = _layout(self._slices)

    def update_counts(self) -> dict[str, int]:
        """Empty: optimizers count their updates in their own state."""
        return {}

    # -- loading --------------------------------------------------------------------------

    def require_fit(self, stored: Mapping[str, Any]) -> None:
        """Before the tensors of a checkpoint are looked at; ``stored``: what a capture returned.

        Raises:
            ConfigError: it cannot be that of this run.
        """

    def expect(self, tensors: Mapping[str, Any]) -> None:
        """Allocate memory for the tensors of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        self._loading, self._slices = {}, []
        self._stored_tensors = {name: entry[:4] for name, entry in tensors.items()}
        for name, (dtype, shape, like, home, *cut) in sorted(tensors.items()):
            if not self._is_own(name):
                self._slices.append(_of_another(name, dtype, shape))
                continue
            where = self._geometry_for(name, shape, like, home)
            grid = Grid.from_json(cut[0], shape) if cut else None
            if grid == where.grid:
                part = self._loading[name] = TensorSlice(name, dtype_of(dtype), where)
                self._slices.append(part)
            else:
                parts = Regrouped(name, dtype_of(dtype), where, grid or Grid.whole(shape))
                self._loading[name] = parts
                self._slices += parts.slices or [_of_another(name, dtype, shape)]

    def _is_own(self, name: str) -> bool:
        """Whether this rank's stage has a part in a tensor of a checkpoint."""
        return True

    def _geometry_for(
        self, name: str, shape: Sequence[int], like: str | None, home: str
    ) -> Geometry:
        """The geometry of this rank's part of a tensor in a checkpoint."""
        raise NotImplementedError

    def complete_copies(self) -> None:
        """Nothing: see ``replica``."""

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        """Exchange the parts that the ranks have read. Collective."""
        for name, part in self._loading.items():
            where = part.geometry
            wholes = {name: part.staged} if part.staged is not None and where.count else {}
            complete(wholes, where.index, where.copies, device=self.device, group=where.group)

    def _loaded(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """A new tensor with the loaded values: of the stored shape, or sharded like ``like``."""
        _, shape, _, home = self._stored_tensors[name]
        values = self._loading[name].loaded()
        if like is None:
            device = self.compute_device if home == "device" else torch.device("cpu")
            return values.view(tuple(shape)).to(device)
        own = local(like)
        values = values.to(own.device).view(own.shape)
        if not isinstance(like, DTensor):
            return values.contiguous()
        distributed: torch.Tensor = DTensor.from_local(
            values,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return distributed

    def _fill(self, live: torch.Tensor, name: str) -> None:
        own = local(live)
        own.copy_(self._loading[name].loaded().view(own.shape))

    # -- digest ---------------------------------------------------------------------------

    def _live_tensors(self) -> Mapping[str, torch.Tensor]:
        """All tensors of the state by name, as they are now."""
        raise NotImplementedError

    def _whole(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The whole of a tensor that may be sharded. Collective."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor as FP32 lanes on the CPU) of weights and other state. Collective.

        For a tensor that differs between ranks, it is this rank's.
        """
        live = self._live_tensors()
        own = self.stages.number
        sources = self.stages.union({name: [own, _num_lanes(t)] for name, t in live.items()})
        for name, (stage, num_lanes) in sorted(sources.items()):
            whole = torch.empty(0)
            if name in live:
                whole = encode(self._whole(live[name].detach(), name).cpu())
            if self.stages.count > 1:
                source = self.stages.members[stage][0]
                # Never into ``whole``, which may be the live tensor.
                received = torch.empty(num_lanes, device=self.device)
                sent = whole.to(self.device) if self._ranks.rank == source else received
                dist.broadcast(sent, src=source)
                whole = sent.cpu()
            yield name, whole


def _of_another(name: str, dtype: str, shape: Sequence[int]) -> TensorSlice:
    """Nothing of a tensor, of which only other ranks have a part."""
    kind = dtype_of(dtype)
    return TensorSlice(name, kind, nowhere(shape), lambda: torch.empty(0, dtype=kind))


def home_of(tensor: torch.Tensor) -> str:
    """The stored device class of a tensor: ``cpu`` or ``device``."""
    return "cpu" if tensor.device.type == "cpu" else "device"


def _layout(slices: Sequence[TensorSlice]) -> list[tuple[str, tuple[int, ...], int, int, int]]:
    return [
        (part.name, part.shape, part.start, part.geometry.count, part.geometry.copies)
        for part in slices
    ]
