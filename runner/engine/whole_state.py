"""State that every rank has whole: each saves a slice of it, and all get the whole at a load."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from runner.engine.protocol import Shard


def slice_of(name: str, whole: torch.Tensor, index: int, count: int) -> Shard:
    """Slice number ``index`` of ``count``; a view."""
    flat = whole.view(-1)
    size = -(-len(flat) // count)
    start = min(len(flat), size * index)
    return Shard(name=name, shape=tuple(whole.shape), start=start, local=flat[start : start + size])


def complete(
    wholes: Mapping[str, torch.Tensor],
    index: int,
    count: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Complete the tensors from the slices that the ranks of ``group`` have loaded. Collective."""
    if not wholes or count == 1:
        return
    # As bytes, each non-zero on one rank only: the sum changes no bit.
    parts = []
    for name, whole in wholes.items():
        shard = slice_of(name, whole, index, count)
        alone = torch.zeros_like(whole.view(-1))
        alone[shard.start : shard.start + len(shard.local)] = shard.local
        parts.append(alone.view(torch.uint8).to(device))
    packed = torch.cat(parts)
    dist.all_reduce(packed, group=group)
    sizes = [part.numel() for part in parts]
    for whole, summed in zip(wholes.values(), torch.split(packed, sizes), strict=True):
        whole.view(-1).copy_(summed.clone().view(whole.dtype))
