"""Computes something with the weights of a checkpoint, at the present cursor: probe D, and audits.

The state is copied to host memory, and restored bit for bit afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from runner.checkpoint.memory.node_dir import free_memory_bytes
from runner.checkpoint.ring import CheckpointRing
from runner.engine.protocol import Engine
from runner.policy.retention.records import Record
from runner.system.error import CheckpointError, ReadError
from runner.train.run import EngineRun

Result = TypeVar("Result")
_SHARE = 0.5


@contextmanager
def state_restored(engine: Engine, ring: CheckpointRing) -> Iterator[None]:
    """Copy the engine's state to host memory, and put it back at the end."""
    kept = [shard.local.detach().to("cpu", copy=True) for shard in engine.shards()]
    counts = engine.update_counts()
    try:
        yield
    finally:
        ring.before_update()
        with torch.no_grad():
            for shard, copy in zip(engine.shards(), kept, strict=True):
                shard.local.copy_(copy)
            engine.finish_load(counts)


class CleanWeights:
    """Puts the weights of a checkpoint in place for a while, for observers."""

    def __init__(self, run: EngineRun) -> None:
        self._engine, self._ring = run.engine, run.ring
        self._ranks = run.observers.ranks
        self._num_local_ranks = run.group.place.local_world_size  # they share a node's memory
        self._stop = run.group.stop_look.through(self._ranks)

    def compute(self, record: Record, compute: Callable[[], Result]) -> Result | None:
        """Call ``compute`` with the weights of ``record``; None if it cannot be loaded, or if a
        node has no memory for a copy of the state.

        Collective.
        """
        self._stop.now()
        if self._ranks.sum([float(not self._has_room())])[0]:
            return None
        with state_restored(self._engine, self._ring):
            try:
                self._ring.restore([record])
            except (CheckpointError, ReadError):  # the same on all ranks
                return None
            return compute()

    def _has_room(self) -> bool:
        """Whether the copies of this node's ranks take at most half of its free memory."""
        tensors = [shard.local for shard in self._engine.shards()]
        needed = sum(one.numel() * one.element_size() for one in tensors) * self._num_local_ranks
        free = free_memory_bytes()
        return free is None or needed <= _SHARE * free
