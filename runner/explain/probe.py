"""Computes a step again, or a variation of it, with the gate closed. Collective, all ranks alike.

Shapes stay constant: a sample that is left out becomes padding, whose loss is no number times zero
(0 * Inf is NaN) but the sum over nothing. Parameters, moments, update counts and random states are
what they were; gradients are dropped.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from runner.data.cursor import BatchPlan, Indices
from runner.data.feed import Feed, MicroBatch
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine, LocalSums, MicroStep
from runner.explain.reading import Reading, Row, Share
from runner.health.heartbeat import Heartbeat

# Of each sequence of a micro-batch: what it is called in a reading; None for padding.
Names = Sequence[int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One rank's part of a step that was computed: its micro-batches on the host, their seeds,
    and what came of them."""

    plan: BatchPlan
    batches: tuple[MicroBatch, ...]
    seeds: tuple[int, ...]
    sums: LocalSums


class Bench:
    """Computes variations of one attempt on one rank."""

    def __init__(self, *, engine: Engine, feed: Feed, ranks: Ranks, heart: Heartbeat) -> None:
        self._engine = engine
        self._feed = feed
        self._ranks = ranks
        self._heart = heart
        self.num_steps = 0  # computed so far
        self._seeds: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self._ranks.world_size

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def begin(self, attempt: Attempt) -> Reading:
        """What came of the attempt itself, from all ranks."""
        self.num_steps = 0
        self._seeds = attempt.seeds
        return self._told(attempt.sums, attempt.batches, [b.positions for b in attempt.batches])

    def compute(
        self, batches: Sequence[MicroBatch], names: Sequence[Names] | None = None
    ) -> Reading:
        """Forward and backward of a whole step; nothing is applied.

        Args:
            batches: as many as the step has, of its shapes.
            names: of their sequences; None: their positions.
        """
        self._heart.enter("explain")
        works = [
            MicroStep(batch=batch.to(self._engine.device), seed=seed)
            for batch, seed in zip(batches, self._seeds, strict=True)
        ]
        with _same_randomness(self._engine.device):
            sums = self._engine.accumulate(works)
            self._drop_gradients()
        self.num_steps += 1
        return self._told(sums, batches, names or [batch.positions for batch in batches])

    def known(self, indices: Indices) -> Reading:
        """The step's computation on samples that are known to be good: a fixed set of them."""
        batches = self._fixed(indices)
        names = [[None if p is None else -1 - p for p in batch.positions] for batch in batches]
        return self.compute([_without_positions(batch) for batch in batches], names)

    def known_of(self, indices: Indices, rank: int) -> Reading:
        """The same, but that all other ranks than ``rank`` compute padding."""
        batches = self._fixed(indices)
        if rank != self.rank:
            batches = [
                batch.without([p for p in batch.positions if p is not None]) for batch in batches
            ]
        names = [[None if p is None else -1 - p for p in batch.positions] for batch in batches]
        reading = self.compute([_without_positions(batch) for batch in batches], names)
        # As if the other ranks' samples had their usual level.
        return replace(reading, tokens=reading.tokens * self.world_size)

    def _fixed(self, indices: Indices) -> list[MicroBatch]:
        with _same_randomness(self._engine.device):
            return self._feed.fixed(indices)

    def read(self, plan: BatchPlan, *, shift: int = 0) -> tuple[MicroBatch, ...]:
        """The share of the rank ``shift`` before this one, read from the data set once more."""
        self._heart.enter("explain")
        whose = (self.rank - shift) % self.world_size
        with _same_randomness(self._engine.device):
            return self._feed.read_again(plan, whose)

    def rotated(self, plan: BatchPlan, shift: int) -> Reading:
        """The slots of rank r, computed by rank r + ``shift``."""
        return self.compute(self.read(plan, shift=shift))

    def differs(
        self, batches: Sequence[MicroBatch], others: Sequence[MicroBatch]
    ) -> list[list[int]]:
        """By rank, the positions whose samples are not the same in both. Collective."""
        own = sorted({p for a, b in zip(batches, others, strict=True) for p in _differing(a, b)})
        return [list(told) for told in self._ranks.gather(own)]

    def could_all(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether every rank could read all of its samples. Collective."""
        failed = any(batch.unreadable for batch in batches)
        return self._ranks.sum([float(failed)])[0] == 0

    def hosts(self, name: str) -> list[str]:
        """Of all ranks."""
        return [str(told) for told in self._ranks.gather(name)]

    def _drop_gradients(self) -> None:
        one = torch.ones((), device=self._engine.device)
        self._engine.apply(skip=one, grad_scale=one, learning_rate=0.0)

    def _told(
        self, sums: LocalSums, batches: Sequence[MicroBatch], names: Sequence[Names]
    ) -> Reading:
        own = _share(sums, batches, names)
        told = self._ranks.gather(own)
        rows = {
            int(name): Row(rank, float(loss), float(norm), int(count))
            for rank, (_, of_rank) in enumerate(told)
            for name, loss, norm, count in of_rank
        }
        shares = [Share(loss=s[0], square=s[1], nonfinite=s[2] > 0, count=s[3]) for s, _ in told]
        return Reading(rows=rows, shares=shares, tokens=max(1.0, sum(s.count for s in shares)))


def left_out(batches: Sequence[MicroBatch], positions: Collection[int]) -> list[MicroBatch]:
    """The same, with padding for the samples at these positions."""
    return [batch.without(positions) for batch in batches]


def _share(
    sums: LocalSums, batches: Sequence[MicroBatch], names: Sequence[Names]
) -> tuple[list[float], list[list[Any]]]:
    """What one rank tells: its sums, and of each sample name, loss, norm and tokens."""
    told = sums.sequences.to_host()
    norms = told.gradient_norms or [0.0] * len(told.losses)
    counts = [count for batch in batches for count in batch.counts()]
    called = [name for of_one in names for name in of_one]
    rows = [
        [name, loss, norm, count]
        for name, loss, norm, count in zip(called, told.losses, norms, counts, strict=True)
        if name is not None
    ]
    square, count = float(sums.grad_square), float(sums.count)
    return [float(sums.loss), square, float(sums.nonfinite), count], rows


def _differing(one: MicroBatch, other: MicroBatch) -> list[int]:
    """Positions whose tensors differ in any bit."""
    tensors = [pair for pair in _pairs(one, other) if pair[0].numel()]
    return [
        position
        for row, position in enumerate(one.positions)
        if position is not None and not all(_alike(a[row], b[row]) for a, b in tensors)
    ]


def _pairs(one: MicroBatch, other: MicroBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    fields, others = one.inputs(), other.inputs()
    return [(fields[name], others[name]) for name in fields if name in others]


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # As bytes: NaN is not equal to itself.
    a, b = (x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
    return bool(torch.equal(a, b))


def _without_positions(batch: MicroBatch) -> MicroBatch:
    """Samples that have no place in the stream."""
    return batch.at((None,) * len(batch.positions))


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    """What is drawn inside was never drawn."""
    ours, theirs, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
        torch.set_rng_state(host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)
