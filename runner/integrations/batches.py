"""The guard beside a loop that reads its own data: it is told of each batch, and each epoch.

After a rollback the data goes on, as with any iterable. At a restart the framework reads its data
from the beginning; what the run has behind it is passed over without being trained on.
"""

from __future__ import annotations

from typing import Any

import torch

from runner.embed.guard import Guard
from runner.embed.randomness import Randomness


class GuardedBatches:
    """Counts the batches of a framework's loop and says which are trained on.

    Args:
        make: makes the guard, which puts the random generators to where the run was; they are
            put back to what they were, since the framework has its data to order first.
    """

    def __init__(self, make: Any) -> None:
        before = Randomness()
        self.guard: Guard = make()
        before.put_back()
        self._number = 0
        self._epoch = -1
        self._loss: torch.Tensor | None = None

    def begin_epoch(self) -> None:
        """The framework is about to order the data of its next epoch."""
        self._epoch += 1
        self.guard.begin_epoch(self._epoch)

    def take(self) -> bool:
        """A batch is in hand: whether to train on it."""
        number, self._number = self._number, self._number + 1
        return self.guard.take(number)

    def note(self, loss: torch.Tensor) -> None:
        """The loss of the batch in hand."""
        self._loss = loss.detach()

    def may_step(self) -> bool:
        """Whether the optimizer may step; False as well where no batch was trained on."""
        loss, self._loss = self._loss, None
        return loss is not None and self.guard.ok(loss)


class HasBatches:
    """A framework's trainer with a guard, from the moment that training begins."""

    _batches: GuardedBatches | None = None

    @property
    def batches(self) -> GuardedBatches:
        """The batches of the training that goes on."""
        assert self._batches is not None, "the Trainer has not begun"
        return self._batches

    @property
    def guard(self) -> Guard:
        """The guard of the training that goes on, or was the last."""
        return self.batches.guard
