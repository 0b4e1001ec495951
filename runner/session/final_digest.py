"""Computes the state digest at the end of a run, on all ranks; it never delays a stop.

:mod:`runner.checkpoint.state_digest` defines it. A small state is sent to rank 0 tensor by tensor;
for a large one each rank sums its own shards in place, without a copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from runner.checkpoint.disk.shards import own_share
from runner.checkpoint.state_digest import (
    LANES,
    Summing,
    Sums,
    added,
    digest_of_sums,
    is_whole,
    state_digest,
)
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine

_STOP_SECONDS = 5.0
_CLOCK_INTERVAL = 1 << 23  # elements
_HALF = 32


def at_a_stop(is_late: Callable[[], bool]) -> Callable[[], bool]:
    """Make a clock that says when to give up: after a few seconds, or when the grace period
    ends."""
    due = time.monotonic() + _STOP_SECONDS
    return lambda: is_late() or time.monotonic() > due


def collect_digest(engine: Engine, ranks: Ranks, is_late: Callable[[], bool]) -> str | None:
    """Compute the state digest; None except on rank 0, or when any rank is late. Collective."""
    shapes = {shard.name: shard.shape for shard in engine.shards()}
    if not is_whole(shapes.values()):
        return _digest_by_sums(engine, ranks, is_late)
    tensors = _WholeTensors(engine, ranks, is_late)
    counts = engine.update_counts()
    if ranks.rank == 0:
        digest = state_digest(tensors, counts)
    else:
        digest = None
        for _ in tensors:
            pass
    return None if tensors.was_late else digest


class _WholeTensors:
    """Iterates over all tensors by name; stops early on every rank if one is late."""

    def __init__(self, engine: Engine, ranks: Ranks, is_late: Callable[[], bool]) -> None:
        self._engine = engine
        self._ranks = ranks
        self._is_late = is_late
        self.was_late = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        since = _CLOCK_INTERVAL
        for shard in sorted(self._engine.shards(), key=lambda one: one.name):
            if since >= _CLOCK_INTERVAL:
                self.was_late = self._ranks.sum([float(self._is_late())])[0] > 0
                since = 0
            if self.was_late:
                return
            yield shard.name, self._engine.full(shard.name)
            since += math.prod(shard.shape)


def _digest_by_sums(engine: Engine, ranks: Ranks, is_late: Callable[[], bool]) -> str | None:
    shards, counts = engine.shards(), engine.update_counts()
    totals: dict[str, Sums] = {shard.name: (0,) * LANES for shard in shards}
    summing, late = Summing(), False
    # Replicas of a shard are equal: each rank sums a part of it.
    for part in own_share(((s.name, s.start, s.local.detach()) for s in shards), engine.replica):
        for first in range(0, len(part.values), _CLOCK_INTERVAL):
            late = late or is_late()
            if not late:
                values = part.values[first : first + _CLOCK_INTERVAL]
                sums = summing.of(part.name, part.start + first, values)
                totals[part.name] = added(totals[part.name], sums)
    names = sorted(totals)
    # In halves: FP64 adds integers exactly up to 2^53, enough for 2 million ranks.
    mask = (1 << _HALF) - 1
    halves = [float(x) for n in names for lane in totals[n] for x in (lane & mask, lane >> _HALF)]
    *summed, num_late = ranks.sum([*halves, float(late)])
    if num_late or ranks.rank != 0:
        return None
    shapes = {shard.name: shard.shape for shard in shards}
    lanes = [int(low) + (int(high) << _HALF) for low, high in zip(*[iter(summed)] * 2, strict=True)]
    of_all = {
        name: (shapes[name], added(tuple(lanes[LANES * at : LANES * at + LANES]), (0,) * LANES))
        for at, name in enumerate(names)
    }
    return digest_of_sums(of_all, counts)
