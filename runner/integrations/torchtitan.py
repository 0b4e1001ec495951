"""The guard in torchtitan's Trainer, put in from outside.

>>> from runner.integrations.torchtitan import GuardedTitan  # doctest: +SKIP
>>> guarded = GuardedTitan(trainer, "runs/a", every=50)  # doctest: +SKIP
>>> trainer.train()  # the same script again resumes  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from runner.embed.loop.guard import Guard
from runner.system.error import ConfigError, lacking

try:
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(lacking("runner.integrations.torchtitan", "torchtitan")) from error

_REPLACED = "train train_step forward_backward_step batch_generator should_continue_training"


class GuardedTitan:
    """Guards a Trainer; make it before ``trainer.train()``.

    The Trainer's ``max_norm`` becomes the guard's clip; its steps are the applied updates. The
    methods replace the Trainer's of the same name, which they are given.

    Attributes:
        guard: exists once training has begun.

    Args:
        out: directory of the run; the same one again resumes it.
        settings: as :class:`runner.Guard` takes them.

    Raises:
        ConfigError: the Trainer has a pipeline (untried), or CUDA graphs, which hold on to
            gradients that the guard drops.
    """

    guard: Guard

    def __init__(self, trainer: Trainer, out: str | Path, **settings: Any) -> None:
        training, dims = trainer.config.training, trainer.parallel_dims
        if dims.pp_enabled or not training.disable_cuda_graphs:
            raise ConfigError("GuardedTitan: set training.disable_cuda_graphs=True, no pipeline")
        # The Trainer clips before it steps; the guard clips what it has judged.
        self._settings = {"out": out, "clip": training.max_norm, **settings}
        training.max_norm = float("inf")
        self._trainer, self._num_losses = trainer, dims.dp_replicate * dims.dp_shard * dims.cp
        self._loss: Any = 0.0  # of the step's batches so far
        for name in _REPLACED.split():
            setattr(trainer, name, partial(getattr(self, name), getattr(trainer, name)))
        trainer.optimizers.step = partial(self.step, trainer.optimizers.step)
        trainer.model_parts[0].register_forward_pre_hook(
            lambda model, _: None if model.training else self.guard.check_stop()
        )

    def train(self, own: Callable[[], None]) -> None:
        own()
        self.guard.close()

    def batch_generator(self, own: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        """Called when the Trainer has loaded what it begins with."""
        trainer = self._trainer
        self.guard = Guard(
            model=trainer.model_parts,
            optimizer=list(trainer.optimizers),
            scheduler=[trainer.lr_schedulers, trainer],  # whose state is what it counts
            accumulate=trainer.gradient_accumulation_steps,
            **self._settings,
        )
        self._steps_before = trainer.step - self.guard.updates
        return own(self.guard.over(loader))

    def should_continue_training(self, own: Callable[[], bool]) -> bool:
        self.guard.settle()  # whose checkpoint has the Trainer's counter, before the next step's
        self._trainer.step = self._steps_before + self.guard.updates
        return own()

    def train_step(self, own: Callable[[Any], None], batches: Iterator[Any]) -> None:
        try:
            own(batches)
        except RuntimeError as error:
            if not str(error).startswith("Loss is not finite"):  # which the guard has judged
                raise

    def forward_backward_step(self, own: Callable[..., Any], **batch: Any) -> Any:
        """The loss is a sum over the rank's tokens, divided by how many the whole step has."""
        loss = own(**batch)
        self._loss = self._loss + loss.detach() * self._num_losses
        return loss

    def step(self, own: Callable[[], None]) -> None:
        loss, self._loss = self._loss, 0.0
        if self.guard.ok(loss):
            own()
