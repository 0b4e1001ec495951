"""Where this rank's part of a tensor lies in the whole, and how many ranks hold that part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from runner.distributed.agreement import Ranks
from runner.system.error import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A part of a tensor of ``shape``: ``count`` elements of the flattened tensor from ``start``.

    ``copies`` ranks hold the same part, and this one is number ``index`` of them; they are the
    ranks of ``group`` (None: all ranks).
    """

    shape: tuple[int, ...]
    start: int
    count: int
    index: int
    copies: int
    group: dist.ProcessGroup | None = None


def replicated(shape: Sequence[int], ranks: Ranks) -> Geometry:
    """Of a tensor that is the same on all ranks."""
    count = math.prod(shape)
    return Geometry(
        shape=tuple(shape), start=0, count=count, index=ranks.rank, copies=ranks.world_size
    )


def row(shape: Sequence[int], number: int, num_rows: int) -> Geometry:
    """Of a tensor that differs between ranks: each rank's is one row."""
    count = math.prod(shape)
    return Geometry(shape=(num_rows, *shape), start=number * count, count=count, index=0, copies=1)


def geometry(tensor: torch.Tensor, name: str, ranks: Ranks) -> Geometry:
    """The geometry of a DTensor, or of a plain tensor that is the same on all ranks.

    Raises:
        ConfigError: the ring does not support its placements.
    """
    if not isinstance(tensor, DTensor):
        return replicated(tensor.shape, ranks)
    mesh, shards = tensor.device_mesh, [p for p in tensor.placements if not p.is_replicate()]
    copied = [n for n, placement in enumerate(tensor.placements) if placement.is_replicate()]
    is_plain = all(type(p) is Replicate or p == Shard(0) for p in tensor.placements)
    is_one = len(shards) <= 1 and not (shards and len(copied) > 1)
    if not is_plain or not is_one or mesh.size() != ranks.world_size:
        raise ConfigError(
            f"{name}: is laid out as {tensor.placements} over {mesh.size()} of "
            f"{ranks.world_size} ranks; only parameters replicated, or sharded along dimension 0 "
            "on one dimension of a mesh of all ranks (FSDP2, HSDP), can be saved"
        )
    if not shards:
        return replicated(tensor.shape, ranks)
    shape, sharded_dim = tuple(tensor.shape), next(n for n in range(mesh.ndim) if n not in copied)
    index, copies, group = 0, 1, None
    if copied:
        index, copies = mesh.get_local_rank(copied[0]), mesh.size(copied[0])
        group = mesh.get_group(copied[0])
    # FSDP2 gives each rank ceil(rows / ranks) rows (torch.chunk).
    per_rank = -(-shape[0] // mesh.size(sharded_dim))
    rows_before = min(shape[0], per_rank * mesh.get_local_rank(sharded_dim))
    return Geometry(
        shape=shape,
        start=rows_before * math.prod(shape[1:]),
        count=tensor.to_local().numel(),
        index=index,
        copies=copies,
        group=group,
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, detached from autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
