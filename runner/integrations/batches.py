"""The guard beside a loop that reads its own data and reports each batch and each epoch.

After a rollback the data continues, as with any iterable. At a restart the framework reads its data
from the beginning; batches that the run has already used are skipped without training on them.
"""

from __future__ import annotations

from typing import Any

import torch

from runner.embed.loop.guard import Guard
from runner.embed.state.generators import Randomness


class GuardedBatches:
    """Counts the batches of a framework's loop and decides which are trained on.

    Args:
        make: makes the guard, which restores the run's random generators. They are set back to
            their states before, because the framework still has to shuffle its data.
    """

    def __init__(self, make: Any) -> None:
        generators = Randomness()
        self.guard: Guard = make()
        generators.restore()
        self._number = 0
        self._epoch = -1
        self._loss: torch.Tensor | None = None

    def begin_epoch(self) -> None:
        """Call before the framework shuffles the data of its next epoch."""
        self._epoch += 1
        self.guard.begin_epoch(self._epoch)

    def take(self) -> bool:
        """Whether to train on the batch that was just read."""
        number, self._number = self._number, self._number + 1
        return self.guard.take(number)

    def note(self, loss: torch.Tensor) -> None:
        """Record the loss of the current batch; of a step's losses the guard judges the mean."""
        if self._loss is not None:
            self.guard.note(self._loss)
        self._loss = loss.detach()

    def may_step(self, optimizer: Any) -> bool:
        """Whether the optimizer may step; if not, there are no gradients, as where no batch was
        trained on."""
        loss, self._loss = self._loss, None
        is_allowed = loss is not None and self.guard.ok(loss)
        for group in [] if is_allowed else optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return is_allowed


class HasBatches:
    """A framework's trainer that has a guard once training has begun."""

    _batches: GuardedBatches | None = None

    @property
    def batches(self) -> GuardedBatches:
        """The batches of the current training."""
        assert self._batches is not None, "training has not begun"
        return self._batches

    @property
    def guard(self) -> Guard:
        """The guard of the current or the last training."""
        return self.batches.guard
