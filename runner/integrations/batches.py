"""The guard beside a loop that reads its own data and reports each batch and each epoch.

After a rollback the data continues, as with any iterable. At a restart the framework reads its data
from the beginning; batches that the run has already used are skipped without training on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from runner.embed.loop.guard import Guard
from runner.embed.state.randomness import Randomness


class GuardedBatches:
    """Counts the batches of a framework's loop and decides which are trained on.

    Args:
        make: makes the guard, which restores the run's random generators. They are set back to
            their states before, because the framework still has to shuffle its data.
        callbacks: what is saved of them.
        scaler: of the framework, in FP16; None: there is none.
    """

    def __init__(
        self, make: Any, callbacks: Callbacks, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        generators = Randomness()
        self.guard: Guard = make()
        generators.restore()
        self._callbacks, self._scaler = callbacks, scaler
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
        self._loss = loss.detach() * self._callbacks.share
        self.guard.note(self._loss)  # at once, or it would count as the next batch's

    def may_step(self, optimizer: Any) -> bool:
        """Whether the optimizer may step; if not, there are no gradients, as where no batch was
        trained on."""
        loss, self._loss = self._loss, None
        if loss is not None and self._scaler is not None:
            unscale(self._scaler, optimizer)
        is_allowed = loss is not None and self.guard.ok(loss)
        for group in [] if is_allowed else optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        return is_allowed


def unscale(scaler: torch.amp.GradScaler, optimizer: Any) -> None:
    """Divide the gradients by the loss scale, unless that was done since the last step.

    Args:
        optimizer: the framework's wrapper of it, or itself.
    """
    try:
        scaler.unscale_(getattr(optimizer, "optimizer", optimizer))
    except RuntimeError as error:
        if "already been called" not in str(error):
            raise


class Callbacks:
    """The state of a framework's callbacks that compare evaluations, such as early stopping.

    Args:
        read: its state, by names that a restart finds again.
        load: takes what ``read`` returned.
        accumulate: batches of a step.

    Attributes:
        share: of the loss, in what the guard is told. Runs of 0.1.0 divided it by ``accumulate``;
            they go on so, for their loss would seem to rise.
    """

    are_callbacks = True

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        load: Callable[[dict[str, Any]], None],
        accumulate: int,
    ) -> None:
        self._read, self._load, self._accumulate = read, load, accumulate
        self.share = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"share": self.share, "callbacks": self._read()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """``None``: of a run of 0.1.0, which saved none."""
        self.share = state["share"] if state else 1.0 / self._accumulate
        if state:
            self._load(state["callbacks"])


def carried(scheduler: Any, scaler: torch.amp.GradScaler | None) -> list[Any]:
    """What the guard saves and rolls back beside the weights and the optimizer."""
    schedulers = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
    return [one for one in (*schedulers, scaler) if one is not None]


class HasBatches:
    """A framework's trainer that has a guard once training has begun."""

    _batches: GuardedBatches | None = None

    @property
    def batches(self) -> GuardedBatches:
        """The batches of the current training."""
        assert self._batches is not None, "training has not begun"
        return self._batches

    _before_evaluation: Randomness | None = None

    def evaluation(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """The function, after which the random generators are as before it.

        A DataLoader draws a seed from them for each pass. An evaluation at a step whose checkpoint
        is resumed, or between steps that a rollback undoes, would leave other draws than none.
        """

        @functools.wraps(evaluate)
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            before = self._before_evaluation = Randomness()
            try:
                return evaluate(*args, **kwargs)
            finally:
                before.restore()

        return evaluated

    def check_stop(self) -> None:
        """As the guard's, in an evaluation; does nothing before training has begun."""
        if self._batches is not None:
            self.guard.check_stop(before=self._before_evaluation)

    @property
    def guard(self) -> Guard:
        """The guard of the current or the last training."""
        return self.batches.guard
