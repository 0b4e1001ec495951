"""Shards one global batch over ranks and micro-batches, for any world size."""

from __future__ import annotations


def shard_batch(
    global_size: int, micro_size: int, world_size: int, rank: int
) -> tuple[tuple[int | None, ...], ...]:
    """Return the slots of the global batch that ``rank`` computes, by micro-batch.

    Every rank gets the same number of micro-batches of the same sizes, because collectives
    run in lockstep; if the world size does not divide the batch, ``None`` marks a padding sequence
    of zero weight. Slots are assigned round robin, so no rank gets only padding.

    Raises:
        ValueError: fewer slots than ranks, or a size below one.
    """
    if min(global_size, micro_size, world_size) < 1 or not 0 <= rank < world_size:
        raise ValueError("sizes must be positive and 0 <= rank < world_size")
    if world_size > global_size:
        raise ValueError(f"{world_size} ranks but only {global_size} sequences")
    return share_out(global_size, micro_size, world_size, rank)


def share_out(
    count: int, micro_size: int, world_size: int, rank: int
) -> tuple[tuple[int | None, ...], ...]:
    """Like :func:`shard_batch`, for any number of slots; with fewer slots than ranks some ranks get
    padding only."""
    per_rank = -(-count // world_size)
    slots = [
        slot if slot < count else None for slot in range(rank, per_rank * world_size, world_size)
    ]
    return tuple(tuple(slots[at : at + micro_size]) for at in range(0, per_rank, micro_size))
