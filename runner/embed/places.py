"""State that is not ours as the ring's shards: staging, passing on, putting together.

A tensor has a name, and a line in the checkpoint's ``train_state`` that says of what type it is and
how it is cut; so a checkpoint is loaded where the tensors are not made yet. What several ranks hold
alike is saved by each in part, and passed on between them at a load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runner.distributed.agreement import Ranks
from runner.embed.codec import dtype_of
from runner.embed.geometry import Geometry, geometry, local
from runner.embed.lanes import decode, encode, lanes_of

_BUCKET = 1 << 24  # lanes that ranks pass on to each other at a time


@dataclass(slots=True)
class Place:
    """One tensor of the state: its lanes, as the ring sees them.

    ``read`` gives the live tensor's part; ``staged`` holds what is being loaded.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    geometry: Geometry
    dtype: torch.dtype
    read: Callable[[], torch.Tensor] | None = None
    staged: torch.Tensor | None = None
    element_type: torch.dtype = torch.float32  # of ``local``

    @property
    def local(self) -> torch.Tensor:
        """FP32 1-D: what this rank saves, or has to load."""
        width = lanes_of(self.dtype)
        first, size = (number * width for number in self.geometry.own)
        if self.staged is not None:
            return self.staged[first : first + size]
        assert self.read is not None
        return encode(self.read())[first : first + size]


def place_of(name: str, dtype: torch.dtype, where: Geometry) -> Place:
    width = lanes_of(dtype)
    first, _ = where.own
    return Place(
        name=name,
        shape=where.shape if width == 1 else (*where.shape, width),
        start=(where.start + first) * width,
        geometry=where,
        dtype=dtype,
    )


class StagedState:
    """The shards of a state, as :class:`runner.checkpoint.ring.Ring` saves and loads them.

    ``before_change`` is called before other tensors than the last time are saved. Collective.
    """

    replica = (0, 1)  # copies are dealt with here, tensor by tensor

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.device = device
        self.before_change: Callable[[], None] = lambda: None
        self._ranks = ranks
        self._places: list[Place] = []
        self._loading: dict[str, Place] = {}
        self._lines: dict[str, Any] = {}  # of what is being loaded

    def geometry_of(self, tensor: torch.Tensor, name: str) -> Geometry:
        """Where this rank's part of a live tensor lies."""
        ranks = self._ranks
        return geometry(tensor, name, rank=ranks.rank, world_size=ranks.world_size)

    # -- saving ---------------------------------------------------------------------------

    def _hold(self, places: Mapping[str, Place]) -> None:
        """These are what :meth:`shards` gives from now on. Collective."""
        ordered = [places[name] for name in sorted(places)]
        if self._places and _layout(ordered) != _layout(self._places):
            self.before_change()
        self._places, self._loading = ordered, {}

    def shards(self) -> list[Place]:
        """What :meth:`capture` or :meth:`expect` has prepared, in order of names."""
        return self._places

    def update_counts(self) -> dict[str, int]:
        """Optimizers count for themselves, in their state."""
        return {}

    # -- loading --------------------------------------------------------------------------

    def expect(self, tensors: Mapping[str, Any]) -> None:
        """Make room for the tensors of a checkpoint, as its ``train_state`` tells of them.

        Raises:
            CheckpointError: it is of another model.
        """
        self._loading, self._lines = {}, dict(tensors)
        for name, (dtype, shape, like, home) in sorted(tensors.items()):
            where = self._room(name, shape, like, home)
            place = place_of(name, dtype_of(dtype), where)
            place.staged = torch.zeros(where.count * lanes_of(place.dtype))
            self._loading[name] = place
        self._places = list(self._loading.values())

    def _room(self, name: str, shape: Sequence[int], like: str | None, home: str) -> Geometry:
        """Where this rank's part of a tensor belongs that a checkpoint holds."""
        raise NotImplementedError

    def _replicated(self, shape: Sequence[int]) -> Geometry:
        """Of a tensor that all ranks hold alike."""
        ranks = self._ranks
        return Geometry(
            shape=tuple(shape),
            start=0,
            count=math.prod(shape),
            index=ranks.rank,
            copies=ranks.world_size,
        )

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        """Every rank has read its part; now each gets what its copies have read. Collective."""
        bucket: list[Place] = []
        groups: dict[int, dist.ProcessGroup | None] = {}
        for place in self._loading.values():
            groups[id(place.geometry.group)] = place.geometry.group
        for key, group in groups.items():
            lanes = 0
            for place in self._loading.values():
                if place.geometry.copies > 1 and id(place.geometry.group) == key:
                    bucket.append(place)
                    lanes += place.geometry.count * lanes_of(place.dtype)
                    if lanes >= _BUCKET:
                        self._pass_on(bucket, group)
                        bucket, lanes = [], 0
            self._pass_on(bucket, group)
            bucket = []

    def _pass_on(self, places: Sequence[Place], group: dist.ProcessGroup | None) -> None:
        if not places:
            return
        staged = [place.staged for place in places if place.staged is not None]
        # As whole numbers: 0.0 + -0.0 would lose a sign.
        packed = torch.cat([lanes.view(torch.int32) for lanes in staged]).to(self.device)
        dist.all_reduce(packed, group=group)
        packed = packed.cpu()
        at = 0
        for lanes in staged:
            lanes.copy_(packed[at : at + len(lanes)].view(torch.float32))
            at += len(lanes)

    def _loaded(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """A new tensor with what was loaded, of the shape told; or cut and placed as ``like``."""
        place, (_, shape, _, home) = self._loading[name], self._lines[name]
        assert place.staged is not None
        values = decode(place.staged, place.dtype)
        if like is not None:
            own = local(like)
            values = values.to(own.device).view(own.shape)
            if isinstance(like, DTensor):
                made: torch.Tensor = DTensor.from_local(
                    values,
                    like.device_mesh,
                    like.placements,
                    run_check=False,
                    shape=like.shape,
                    stride=like.stride(),
                )
                return made
            return values.contiguous()
        device = self.device if home == "device" else torch.device("cpu")
        return values.view(tuple(shape)).to(device)

    def _fill(self, live: torch.Tensor, name: str) -> None:
        place = self._loading[name]
        assert place.staged is not None
        own = local(live)
        own.copy_(decode(place.staged, place.dtype).view(own.shape))


def home_of(tensor: torch.Tensor) -> str:
    """Where a tensor that is like no parameter belongs."""
    return "cpu" if tensor.device.type == "cpu" else "device"


def _layout(places: Sequence[Place]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(place.name, place.shape, place.start) for place in places]
