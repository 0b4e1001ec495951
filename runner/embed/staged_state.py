"""The state of a user's loop as shards of the ring: staging, exchange between ranks, assembly.

The checkpoint's ``train_state`` has dtype, shape and sharding of each tensor by name, so that a
checkpoint can be loaded before the tensors exist. If several ranks hold the same values, each saves
a part, and they exchange the parts at a load.
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
from runner.embed.fp32_encoding import decode, encode, lanes_per_element
from runner.embed.geometry import Geometry, geometry, local

_BUCKET = 1 << 24  # lanes that ranks exchange at a time


@dataclass(slots=True)
class TensorSlice:
    """This rank's slice of one tensor, as FP32 lanes for the ring.

    ``read`` returns the slice of the live tensor; ``staged`` holds lanes that are being loaded.
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
        """FP32 1-D: the lanes that this rank saves or loads."""
        width = lanes_per_element(self.dtype)
        first, size = (number * width for number in self.geometry.own)
        if self.staged is not None:
            return self.staged[first : first + size]
        assert self.read is not None
        return encode(self.read())[first : first + size]


def tensor_slice(name: str, dtype: torch.dtype, where: Geometry) -> TensorSlice:
    width = lanes_per_element(dtype)
    first, _ = where.own
    return TensorSlice(
        name=name,
        shape=where.shape if width == 1 else (*where.shape, width),
        start=(where.start + first) * width,
        geometry=where,
        dtype=dtype,
    )


class StagedState:
    """State as the shards that :class:`runner.checkpoint.ring.Ring` saves and loads.

    ``before_change`` is called before a save with other tensors than the last one. Collective.
    """

    replica = (0, 1)  # this class handles copies itself, tensor by tensor

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.device = device
        self.before_change: Callable[[], None] = lambda: None
        self._ranks = ranks
        self._slices: list[TensorSlice] = []
        self._loading: dict[str, TensorSlice] = {}
        self._stored_tensors: dict[
            str, Any
        ] = {}  # the entries of the checkpoint that is being loaded

    @property
    def compute_device(self) -> torch.device:
        """Where the numbers of a step are, and tensors that are like no parameter."""
        return self.device

    def geometry_of(self, tensor: torch.Tensor, name: str) -> Geometry:
        """The geometry of this rank's part of a live tensor."""
        ranks = self._ranks
        return geometry(tensor, name, rank=ranks.rank, world_size=ranks.world_size)

    # -- saving ---------------------------------------------------------------------------

    def _set_slices(self, slices: Mapping[str, TensorSlice]) -> None:
        """Set what :meth:`shards` returns from now on. Collective."""
        ordered = [slices[name] for name in sorted(slices)]
        if self._slices and _layout(ordered) != _layout(self._slices):
            self.before_change()
        self._slices, self._loading = ordered, {}

    def shards(self) -> list[TensorSlice]:
        """The slices to save or load, in the order of their names."""
        return self._slices

    def update_counts(self) -> dict[str, int]:
        """Empty: optimizers count their updates in their own state."""
        return {}

    # -- loading --------------------------------------------------------------------------

    def expect(self, tensors: Mapping[str, Any]) -> None:
        """Allocate memory for the tensors of a checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        self._loading, self._stored_tensors = {}, dict(tensors)
        for name, (dtype, shape, like, home) in sorted(tensors.items()):
            where = self._geometry_for(name, shape, like, home)
            slice_ = tensor_slice(name, dtype_of(dtype), where)
            slice_.staged = torch.zeros(where.count * lanes_per_element(slice_.dtype))
            self._loading[name] = slice_
        self._slices = list(self._loading.values())

    def _geometry_for(
        self, name: str, shape: Sequence[int], like: str | None, home: str
    ) -> Geometry:
        """The geometry of this rank's part of a tensor in a checkpoint."""
        raise NotImplementedError

    def _replicated(self, shape: Sequence[int]) -> Geometry:
        """The geometry of a tensor that is the same on all ranks."""
        ranks = self._ranks
        return Geometry(
            shape=tuple(shape),
            start=0,
            count=math.prod(shape),
            index=ranks.rank,
            copies=ranks.world_size,
        )

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        """Exchange the parts that the ranks have read. Collective."""
        bucket: list[TensorSlice] = []
        groups: dict[int, dist.ProcessGroup | None] = {}
        for slice_ in self._loading.values():
            groups[id(slice_.geometry.group)] = slice_.geometry.group
        for key, group in groups.items():
            lanes = 0
            for slice_ in self._loading.values():
                if slice_.geometry.copies > 1 and id(slice_.geometry.group) == key:
                    bucket.append(slice_)
                    lanes += slice_.geometry.count * lanes_per_element(slice_.dtype)
                    if lanes >= _BUCKET:
                        self._exchange(bucket, group)
                        bucket, lanes = [], 0
            self._exchange(bucket, group)
            bucket = []

    def _exchange(self, slices: Sequence[TensorSlice], group: dist.ProcessGroup | None) -> None:
        if not slices:
            return
        staged = [place.staged for place in slices if place.staged is not None]
        # Summed as integers, because 0.0 + -0.0 would lose the sign.
        packed = torch.cat([lanes.view(torch.int32) for lanes in staged]).to(self.device)
        dist.all_reduce(packed, group=group)
        packed = packed.cpu()
        offset = 0
        for lanes in staged:
            lanes.copy_(packed[offset : offset + len(lanes)].view(torch.float32))
            offset += len(lanes)

    def _loaded(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """A new tensor with the loaded values: of the stored shape, or sharded like ``like``."""
        place, (_, shape, _, home) = self._loading[name], self._stored_tensors[name]
        assert place.staged is not None
        values = decode(place.staged, place.dtype)
        if like is not None:
            own = local(like)
            values = values.to(own.device).view(own.shape)
            if isinstance(like, DTensor):
                distributed: torch.Tensor = DTensor.from_local(
                    values,
                    like.device_mesh,
                    like.placements,
                    run_check=False,
                    shape=like.shape,
                    stride=like.stride(),
                )
                return distributed
            return values.contiguous()
        device = self.compute_device if home == "device" else torch.device("cpu")
        return values.view(tuple(shape)).to(device)

    def _fill(self, live: torch.Tensor, name: str) -> None:
        place = self._loading[name]
        assert place.staged is not None
        own = local(live)
        own.copy_(decode(place.staged, place.dtype).view(own.shape))


def home_of(tensor: torch.Tensor) -> str:
    """The stored device class of a tensor: ``cpu`` or ``device``."""
    return "cpu" if tensor.device.type == "cpu" else "device"


def _layout(slices: Sequence[TensorSlice]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(slice_.name, slice_.shape, slice_.start) for slice_ in slices]
