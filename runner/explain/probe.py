"""Computes a step again, or a variation of it, with the gate closed. Collective, all ranks alike.

Shapes stay constant: a sample that is left out becomes padding, whose loss is no number times zero
(0 * Inf is NaN) but the sum over nothing. Parameters, moments, update counts and random states are
what they were; gradients are dropped.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from runner.data.cursor import BatchPlan, Indices
from runner.data.feed import Feed, MicroBatch
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine, LocalSums, MicroStep, Shard
from runner.engine.randomness import same_randomness
from runner.explain.layers import ModuleWatch, first_bad, largest_by_module
from runner.explain.reading import Reading, Row, Share
from runner.health.checks import checksum
from runner.health.heartbeat import Heartbeat
from runner.system.error import RankError, RunnerError

# Of each sequence of a micro-batch: what it is called in a reading; None for padding.
Names = Sequence[int | None]
_CALLED = {torch.float32: "FP32", torch.float64: "FP64"}
# No weight is so large, and so much larger than its neighbours.
_STRAY, _STRAY_SIGMAS = 1e4, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One rank's part of a step that was computed: its micro-batches on the host, their seeds,
    and what came of them."""

    plan: BatchPlan
    batches: tuple[MicroBatch, ...]
    seeds: tuple[int, ...]
    sums: LocalSums


class Bench:
    """Computes variations of one attempt on one rank.

    Args:
        may_watch: modules can be looked into; compiled ones cannot.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        feed: Feed,
        ranks: Ranks,
        heart: Heartbeat,
        may_watch: bool = True,
    ) -> None:
        self._may_watch = may_watch
        self._narrow: ModuleWatch | None = None
        self._wide = ModuleWatch()
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
        self._narrow = None
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
        with same_randomness(self._engine.device):
            sums = self._engine.accumulate(self._works(batches))
            self._drop_gradients()
        self.num_steps += 1
        return self._told(sums, batches, names or [batch.positions for batch in batches])

    def compute_watched(self, batches: Sequence[MicroBatch]) -> Reading:
        """The same, with every module looked into."""
        if not self._may_watch:
            return self.compute(batches)
        self._narrow = ModuleWatch()
        with self._narrow.over(self._engine.network):
            return self.compute(batches)

    @property
    def wider(self) -> str:
        """The wider precision that there is; empty where there is none."""
        dtype = self._engine.twin.dtype
        return "" if dtype is None else _CALLED[dtype]

    @property
    def applies_wider(self) -> bool:
        """Whether an update can be made of it."""
        return self._engine.applies_wider

    def compute_wider(self, batches: Sequence[MicroBatch]) -> Reading | None:
        """:meth:`compute` in the wider precision, every module looked into; None: no memory."""
        self._heart.enter("explain")
        twin = self._engine.twin
        try:
            self._ranks.all_or_none(f"building the model in {self.wider}", self._open_twin)
            with same_randomness(self._engine.device):
                sums = self._engine.accumulate_wider(self._works(batches), watch=self._wide.over)
                if self._engine.applies_wider:
                    self._drop_gradients()
        except RunnerError:  # of all_or_none: alike on all ranks
            return None
        finally:
            twin.close()
        self.num_steps += 1
        return self._told(sums, batches, [batch.positions for batch in batches])

    def _open_twin(self) -> None:
        """
        Raises:
            RankError: the device may not have the memory. To find out in the middle of a step would
                end the run.
        """
        device = self._engine.device
        if device.type == "cuda":
            # Activations and parameters are twice as wide, besides what is there.
            needed = 2 * torch.cuda.max_memory_allocated(device)
            total = torch.cuda.get_device_properties(device).total_memory
            if needed > total:
                raise RankError(f"needs about {needed} bytes, the device has {total}")
        self._engine.twin.open()

    def first_bad_module(self) -> tuple[str, dict[str, list[float]]]:
        """The module that made the first bad number of the last watched computation, against the
        wider one's; empty where nobody can be named. And of each module the largest output in both.
        Collective."""
        if self._narrow is None:
            return "", {}
        calls, right = self._narrow.calls(), self._wide.calls()
        named = {str(one) for one in self._ranks.gather(first_bad(calls, right)) if one}
        return named.pop() if len(named) == 1 else "", largest_by_module(calls, right)

    def copies_differ(self) -> bool:
        """Whether ranks that hold copies of the same weights hold other bits. Collective."""
        group, tensors = self._engine.replicated()
        told = {(int(of), str(told)) for of, told in self._ranks.gather([group, checksum(tensors)])}
        return len(told) > len({of for of, _ in told})

    def strayed_weights(self) -> list[str]:
        """Parameters of which one element is no weight any more, against all others. Collective."""
        told = self._ranks.gather([_extent(shard) for shard in _parameters(self._engine)])
        found = set()
        for rows in zip(*told, strict=True):
            largest = max((row[1] for row in rows), default=0.0)
            rest = sum(row[2] for row in rows) / max(1, sum(row[3] for row in rows))
            if largest > max(_STRAY, _STRAY_SIGMAS * math.sqrt(rest)):
                found.add(str(rows[0][0]))
        return sorted(found)

    def _works(self, batches: Sequence[MicroBatch]) -> list[MicroStep]:
        return [
            MicroStep(batch=batch.to(self._engine.device), seed=seed)
            for batch, seed in zip(batches, self._seeds, strict=True)
        ]

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
        with same_randomness(self._engine.device):
            return self._feed.fixed(indices)

    def read(self, plan: BatchPlan, *, shift: int = 0) -> tuple[MicroBatch, ...]:
        """The share of the rank ``shift`` before this one, read from the data set once more."""
        self._heart.enter("explain")
        whose = (self.rank - shift) % self.world_size
        with same_randomness(self._engine.device):
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


def _parameters(engine: Engine) -> list[Shard]:
    """In one order on all ranks; of some this one may hold nothing."""
    return [shard for shard in engine.shards() if shard.name.startswith("param/")]


def _extent(shard: Shard) -> tuple[str, float, float, int]:
    """Name, largest magnitude, squares of all others together, how many they are."""
    if not len(shard.local):
        return shard.name.partition("/")[2], 0.0, 0.0, 0
    size = shard.local.detach().double().abs()
    largest, at = size.max(dim=0)
    size[at] = 0.0
    worst = float(largest)
    square = float(size.square().sum())
    if not (math.isfinite(worst) and math.isfinite(square)):
        worst, square = sys.float_info.max, 0.0
    return shard.name.partition("/")[2], worst, square, len(size) - 1


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
