"""Every rank computes the same micro-batch, with the gate closed: the state stays as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.distributed.observers import ObservedRanks
from runner.engine.protocol import Engine, MicroStep
from runner.engine.randomness import same_randomness
from runner.health.preemption import StopLook
from runner.policy.odd_ranks import ByRank
from runner.system.parsing import json_text
from runner.train.own_gradients import OwnGradients

_DIGEST_BYTES = 6  # what a double holds exactly


class Feed(Protocol):
    """The part of :class:`runner.data.feed.Feed` used here."""

    def read_again(self, plan: BatchPlan, rank: int) -> tuple[MicroBatch, ...]: ...


class SameBatch:
    """Computes a micro-batch on every rank.

    Args:
        kind: of this rank's device; devices of one kind give equal bits.
        seed: dropout seed.
        takes_whole_step: whether the engine computes only whole steps.
        repeats_bits: whether this machine gives the same bits for the same computation.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        feed: Feed,
        ranks: ObservedRanks,
        kind: str,
        seed: int,
        takes_whole_step: bool,
        repeats_bits: bool,
        stop: StopLook,
    ) -> None:
        self._stop = stop
        self._engine = engine
        self._feed = feed
        self._ranks = ranks
        self._kind = kind
        self._seed = seed
        self._takes_whole_step = takes_whole_step
        self.repeats_bits = repeats_bits
        self._gradients = OwnGradients(engine.network)

    def batches(self, plan: BatchPlan, number: int) -> list[MicroBatch] | None:
        """One rank's micro-batch, the same on all ranks; None if a rank cannot read it.

        Collective.
        """
        self._stop.now()
        with same_randomness(self._engine.device):
            read = self._feed.read_again(plan, number % self._ranks.world_size)
        batches = list(read) if self._takes_whole_step else list(read[:1])
        failed = any(batch.unreadable for batch in batches)
        return None if self._ranks.sum([float(failed)])[0] else batches

    def compute(self, batches: Sequence[MicroBatch]) -> ByRank:
        """Compute once; of each rank the kind of its device and its numbers. Collective."""
        return self._ranks.gather([self._kind, self._own_numbers(batches)])

    def _own_numbers(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Compute without changing the state.

        Returns:
            The sequences' losses and gradient norms; then a digest of all gradients, or where bits
            do not repeat the norm of each.
        """
        device = self._engine.device
        works = [
            MicroStep(batch=batch.to(device), seed=self._seed + number)
            for number, batch in enumerate(batches)
        ]
        self._ranks.ready()
        with same_randomness(device):
            with self._gradients.over():
                sums = self._engine.accumulate(self._stop.over(works))
            one = torch.ones((), device=device)
            self._engine.apply(skip=one, grad_scale=one, learning_rate=0.0)
        sequences = sums.sequences.to_host()
        own = self.by_parameter()
        gradients = [_digest(own)] if self.repeats_bits else list(own.values())
        return [*sequences.losses, *sequences.gradient_norms, *gradients]

    def by_parameter(self) -> dict[str, Any]:
        """Of this rank's gradients by themselves: checksums, or norms where bits do not repeat."""
        heard = self._gradients
        return heard.checksums() if self.repeats_bits else heard.norms()


def _digest(checksums: Mapping[str, int]) -> float:
    """A number that changes with any of them, the same on every machine."""
    text = json_text(checksums, sort_keys=True)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big"))
