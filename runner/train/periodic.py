"""Checks at intervals of updates: the held-out loss, and the health of the ranks."""

from __future__ import annotations

from collections.abc import Callable

from runner.health.heartbeat import Heartbeat
from runner.train.collection import collect
from runner.train.report import Reporter


class Periodic:
    """Runs the checks that are due after an update.

    Args:
        evaluate: returns the held-out loss in nats per token; None if nothing is held out.
        evaluate_every: in applied updates; 0 means never.
        inspect: called after each update with the update count; it knows when it is due.
        is_inspection_due: whether ``inspect`` uses the state after exactly so many updates.
    """

    def __init__(
        self,
        *,
        evaluate: Callable[[], float | None],
        evaluate_every: int,
        inspect: Callable[[int], None],
        is_inspection_due: Callable[[int], bool],
        reporter: Reporter,
        heart: Heartbeat,
    ) -> None:
        self._evaluate = evaluate
        self._evaluate_every = evaluate_every
        self._inspect = inspect
        self._is_inspection_due = is_inspection_due
        self._reporter = reporter
        self._heart = heart
        self._evaluated_at: tuple[int, float | None] = (-1, None)

    def is_due(self, updates: int) -> bool:
        """Whether anything here uses the state after exactly ``updates`` updates."""
        return falls_due(self._evaluate_every, updates) or self._is_inspection_due(updates)

    def evaluate(self, updates: int) -> float | None:
        """The held-out loss, if it is due. Collective."""
        if not falls_due(self._evaluate_every, updates):
            return None
        self._heart.enter("evaluate")
        with self._reporter.stall("evaluation"):
            loss = self._evaluate()
        self._evaluated_at = updates, loss
        return loss

    def held_out_loss(self, updates: int) -> float | None:
        """The held-out loss of the current state, computed at most once. Collective."""
        known, loss = self._evaluated_at
        return loss if known == updates else self._evaluate()

    def inspect(self, updates: int) -> None:
        """Check for slow ranks and differing replicas. Collective."""
        self._inspect(updates)
        collect(updates)


def falls_due(every: int, updates: int) -> bool:
    """Whether ``updates`` is a multiple of the interval; 0 means never."""
    return every > 0 and updates % every == 0
