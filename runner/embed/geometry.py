"""Where this rank's part of a tensor lies in the whole, and who else holds the same part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from runner.system.error import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """``count`` elements from ``start`` on of the flattened tensor of ``shape``.

    The same part is held by ``copies`` ranks, of which this is number ``index``; they are the
    ranks of ``group`` (None: all ranks).
    """

    shape: tuple[int, ...]
    start: int
    count: int
    index: int
    copies: int
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> tuple[int, int]:
        """(first, size) of the elements of this part that this rank saves for all its copies."""
        size = -(-self.count // self.copies)
        first = min(self.count, self.index * size)
        return first, min(size, self.count - first)


def geometry(tensor: torch.Tensor, name: str, *, rank: int, world_size: int) -> Geometry:
    """Of a plain tensor, the same on all ranks; or of a DTensor.

    Raises:
        ConfigError: it is cut in a way that the ring cannot hold.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Geometry(shape=shape, start=0, count=math.prod(shape), index=rank, copies=world_size)
    mesh, shards = tensor.device_mesh, [p for p in tensor.placements if not p.is_replicate()]
    others = [n for n, placement in enumerate(tensor.placements) if placement.is_replicate()]
    is_plain = all(type(p) in (Shard, Replicate) for p in tensor.placements)
    if (
        not is_plain
        or any(shard.dim != 0 for shard in shards if isinstance(shard, Shard))
        or len(shards) > 1
        or (shards and len(others) > 1)
        or mesh.size() != world_size
    ):
        raise ConfigError(
            f"{name}: is laid out as {tensor.placements} over {mesh.size()} of {world_size} ranks; "
            "only parameters replicated, or sharded along dimension 0 on one dimension of a mesh "
            "of all ranks (FSDP2, HSDP), can be saved"
        )
    return _of_dtensor(tensor, others, rank=rank, world_size=world_size)


def _of_dtensor(tensor: DTensor, others: list[int], *, rank: int, world_size: int) -> Geometry:
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    cut = next((n for n in range(mesh.ndim) if n not in others), None)
    if cut is None:
        return Geometry(shape=shape, start=0, count=math.prod(shape), index=rank, copies=world_size)
    index, copies, group = 0, 1, None
    if others:
        index, copies = mesh.get_local_rank(others[0]), mesh.size(others[0])
        group = mesh.get_group(others[0])
    # FSDP2 gives each rank ceil(rows / ranks) rows (torch.chunk).
    per_rank = -(-shape[0] // mesh.size(cut))
    rows_before = min(shape[0], per_rank * mesh.get_local_rank(cut))
    return Geometry(
        shape=shape,
        start=rows_before * math.prod(shape[1:]),
        count=tensor.to_local().numel(),
        index=index,
        copies=copies,
        group=group,
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, without a way back through autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
