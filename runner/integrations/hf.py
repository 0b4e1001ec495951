"""The guard in the Hugging Face Trainer, and in trainers derived from it such as TRL's.

>>> from runner.integrations.hf import guard_trainer  # doctest: +SKIP
>>> guard = guard_trainer(trainer, "runs/a", every=50)  # doctest: +SKIP
>>> trainer.train()  # the same script again resumes  # doctest: +SKIP
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from runner.embed.loop.guard import Guard
from runner.integrations.batches import GuardedBatches, HasBatches, carried
from runner.integrations.rollouts import Rollouts
from runner.system.error import ConfigError

_UNSUPPORTED = {
    "deepspeed": "its engine applies the update itself; use python -m runner parallel=zero3",
}


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Calls the guard from the Trainer's callbacks."""

    def __init__(self, guarded: GuardedTrainer) -> None:
        self._guarded = guarded

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.begin(kwargs["model"], kwargs["optimizer"], kwargs["lr_scheduler"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.batches.begin_epoch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.before_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.batches.guard.settle()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.check_stop()  # in an evaluation, whose batches are as many on each rank

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.batches.guard.close()


class GuardedTrainer(HasBatches):
    """A Trainer with a guard, which exists once training has begun."""

    def __init__(self, trainer: Trainer, out: str | Path, settings: dict[str, Any]) -> None:
        self._trainer = trainer
        self._out = out
        self._settings = settings
        self._optimizer: Any = None
        self._rollouts = Rollouts.of(trainer)
        self._training_step = trainer.training_step
        self._clip = float(trainer.args.max_grad_norm or 0.0)
        trainer.args.max_grad_norm = (
            0.0  # the Trainer clips before its callback; the guard clips after it
        )
        trainer.training_step = self._step
        trainer.evaluate = self.evaluation(trainer.evaluate)
        trainer.add_callback(_Callback(self))

    def begin(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Create the guard when training begins; resumes the run in ``out``."""
        # Accelerate's wrapper; the Trainer reads from it whether to step its schedule.
        self._optimizer = optimizer
        args, scaler = self._trainer.args, self._trainer.accelerator.scaler
        if scaler is not None:
            # A start may begin with steps that are passed over: they unscale what nobody scaled.
            scaler.scale(torch.zeros((), device=args.device))
        self._batches = GuardedBatches(
            lambda: Guard(
                self._out,
                model=model,
                optimizer=getattr(optimizer, "optimizer", optimizer),
                scheduler=carried(scheduler, scaler),
                clip=self._clip or None,
                accumulate=args.gradient_accumulation_steps,
                **self._settings,
            ),
            scaler,
        )

    def before_step(self) -> None:
        """Call after the backward passes; a step that is not allowed is one that overflowed, but
        for the scaler, which does not hear of it."""
        is_allowed = self.batches.may_step(self._optimizer)
        self._optimizer._is_overflow = not is_allowed
        scaler = self._trainer.accelerator.scaler
        if scaler is not None:
            self._optimizer.scaler = scaler if is_allowed else None
            if not is_allowed:
                scaler.update(scaler.get_scale())  # the next step may unscale its own gradients

    def _step(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces ``Trainer.training_step``: forward and backward of one batch."""
        if not self.batches.take():
            return torch.zeros((), device=self._trainer.args.device)
        loss: torch.Tensor = self._training_step(model, inputs, *rest, **kwargs)
        judged = loss
        if self._rollouts is not None:
            judged = loss * math.nan if self._rollouts.have_failed else loss
            self.guard.log(self._rollouts.numbers())
        self.batches.note(judged)
        return loss


def guard_trainer(trainer: Trainer, out: str | Path, **settings: Any) -> GuardedTrainer:
    """Guard a Trainer; call it before ``trainer.train()``, without ``resume_from_checkpoint``.

    The Trainer's ``max_grad_norm`` becomes the guard's clip. Its step counter also counts skipped
    batches; so a restart reads the data again, skips what was used before, and ends where an
    uninterrupted run ends. ``save_strategy="no"`` saves disk space: the ring has the checkpoints.

    Args:
        out: directory of the run; the same one again resumes it.
        settings: as :class:`runner.Guard` takes them.

    Raises:
        ConfigError: the Trainer uses DeepSpeed, which cannot be guarded; or it trains on its
            rollouts in several steps.
    """
    for name, why in _UNSUPPORTED.items():
        if getattr(trainer.args, name, None):
            raise ConfigError(f"guard_trainer: {name}={getattr(trainer.args, name)!r}: {why}")
    return GuardedTrainer(trainer, out, settings)
