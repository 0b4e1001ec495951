"""The state of a user's loop as shards of the ring: staging, exchange between ranks, assembly.

The checkpoint's ``train_state`` has type, shape and sharding of each tensor by name, so that a
checkpoint can be loaded before the tensors exist. If several ranks hold the same values, each saves
a part, and they exchange the parts at a load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from runner.checkpoint.dtypes import ITEM_SIZES
from runner.distributed.agreement import Ranks
from runner.embed.state import lanes
from runner.embed.state.codec import dtype_of
from runner.embed.state.geometry import Geometry, geometry, local, replicated

_BUCKET_BYTES = 1 << 26  # that ranks exchange at a time


@dataclass(slots=True)
class TensorSlice:
    """This rank's slice of one tensor, in the type in which the ring stores its elements.

    ``read`` returns the slice of the live tensor; ``staged`` holds elements that are being loaded.
    Of types that the ring does not know (complex, rare FP8) each element takes ``width`` elements
    of ``element_type``.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    geometry: Geometry
    dtype: torch.dtype
    element_type: torch.dtype
    width: int
    is_old: bool
    read: Callable[[], torch.Tensor] | None = None
    staged: torch.Tensor | None = None

    @property
    def local(self) -> torch.Tensor:
        """1-D, of ``element_type``: what this rank saves or loads."""
        first, size = (number * self.width for number in self.geometry.own)
        if self.staged is not None:
            return self.staged[first : first + size]
        assert self.read is not None
        return self.read().contiguous().reshape(-1).view(self.element_type)[first : first + size]

    def stage(self) -> None:
        """Allocate memory for a load."""
        self.staged = torch.zeros(self.geometry.count * self.width, dtype=self.element_type)

    def loaded(self) -> torch.Tensor:
        """1-D, of ``dtype``: the elements that were loaded."""
        assert self.staged is not None
        if self.is_old:
            return lanes.decode(self.staged, self.dtype)
        return self.staged.view(self.dtype)

    def entry(self, like: str | None, home: str) -> list[Any]:
        """Of this tensor in a checkpoint's ``train_state``.

        Args:
            like: name of the tensor that is sharded alike; None: not sharded.
            home: what :func:`home_of` returns, or another mark.
        """
        return [str(self.dtype).removeprefix("torch."), list(self.geometry.shape), like, home]


def tensor_slice(
    name: str, dtype: torch.dtype, where: Geometry, *, is_old: bool = False
) -> TensorSlice:
    """
    Args:
        is_old: the checkpoint is from before elements were stored in their own type.
    """
    element_type, width = dtype, 1
    if is_old:
        element_type, width = torch.float32, lanes.lanes_per_element(dtype)
    elif dtype.is_complex:
        element_type, width = dtype.to_real(), 2
    elif str(dtype).removeprefix("torch.") not in ITEM_SIZES:
        element_type, width = torch.uint8, dtype.itemsize
    return TensorSlice(
        name=name,
        shape=where.shape if width == 1 else (*where.shape, width),
        start=(where.start + where.own[0]) * width,
        geometry=where,
        dtype=dtype,
        element_type=element_type,
        width=width,
        is_old=is_old,
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
            is_old = lanes.is_type_of_lanes(dtype)
            self._loading[name] = tensor_slice(name, dtype_of(dtype), where, is_old=is_old)
            self._loading[name].stage()
        self._slices = list(self._loading.values())

    def _geometry_for(
        self, name: str, shape: Sequence[int], like: str | None, home: str
    ) -> Geometry:
        """The geometry of this rank's part of a tensor in a checkpoint."""
        raise NotImplementedError

    def _replicated(self, shape: Sequence[int]) -> Geometry:
        """The geometry of a tensor that is the same on all ranks."""
        return replicated(shape, rank=self._ranks.rank, world_size=self._ranks.world_size)

    def finish_load(self, update_counts: Mapping[str, int]) -> None:
        """Exchange the parts that the ranks have read. Collective."""
        shared = [part for part in self._loading.values() if part.geometry.copies > 1]
        for group in {id(part.geometry.group): part.geometry.group for part in shared}.values():
            bucket: list[torch.Tensor] = []
            for slice_ in shared:
                if slice_.geometry.group is group and slice_.staged is not None:
                    bucket.append(slice_.staged.view(torch.uint8))
                    if sum(map(len, bucket)) >= _BUCKET_BYTES:
                        self._exchange(bucket, group)
                        bucket = []
            self._exchange(bucket, group)

    def _exchange(self, parts: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Each byte comes from one rank and is 0 on the others."""
        if not parts:
            return
        packed = torch.cat(list(parts)).to(self.device)
        dist.all_reduce(packed, group=group)
        for part, summed in zip(parts, torch.split(packed.cpu(), [*map(len, parts)]), strict=True):
            part.copy_(summed)

    def _loaded(self, name: str, like: torch.Tensor | None) -> torch.Tensor:
        """A new tensor with the loaded values: of the stored shape, or sharded like ``like``."""
        _, shape, _, home = self._stored_tensors[name]
        values = self._loading[name].loaded()
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
        own = local(live)
        own.copy_(self._loading[name].loaded().view(own.shape))


def home_of(tensor: torch.Tensor) -> str:
    """The stored device class of a tensor: ``cpu`` or ``device``."""
    return "cpu" if tensor.device.type == "cpu" else "device"


def _layout(slices: Sequence[TensorSlice]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(slice_.name, slice_.shape, slice_.start) for slice_ in slices]
