"""Held-out loss on a fixed set of samples."""

from __future__ import annotations

from runner.data.cursor import Indices
from runner.data.feed import Feed
from runner.dist.agree import Ranks
from runner.engine.protocol import Engine


class Evaluator:
    """``indices`` are data set indices, the same at every evaluation and on any world size."""

    def __init__(self, *, engine: Engine, feed: Feed, ranks: Ranks, indices: Indices) -> None:
        self._engine = engine
        self._ranks = ranks
        self._batches = feed.fixed(indices) if len(indices) else []

    def loss(self) -> float | None:
        """Nats per token over the whole set; None when nothing is held out. Collective."""
        if not self._batches:
            return None
        batches = [batch.to(self._engine.device) for batch in self._batches]
        total, tokens = self._engine.evaluate(batches)
        loss, count = self._ranks.sum([float(total.item()), float(tokens)])
        return loss / count
