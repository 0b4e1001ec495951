"""The guard in the Hugging Face Trainer, and in trainers derived from it such as TRL's.

>>> from runner.integrations.hf import guard_trainer  # doctest: +SKIP
>>> guard = guard_trainer(trainer, "runs/a", every=50)  # doctest: +SKIP
>>> trainer.train()  # the same script again resumes  # doctest: +SKIP
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.embed.loop.guard import Guard
from runner.integrations.batches import Callbacks, GuardedBatches, HasBatches, carried
from runner.system.error import ConfigError, lacking

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(lacking("runner.integrations.hf", "hf", "transformers")) from error


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

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.batches.guard.settle()
        self._guarded.pass_over(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.pass_over(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.check_stop()  # in an evaluation, whose batches are as many on each rank

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.evaluated(kwargs.get("metrics") or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._guarded.batches.guard.close()


# Of the Trainer's state; the rest of it counts steps.
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


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
        self._begins_behind = False
        trainer.args.max_grad_norm = (
            0.0  # the Trainer clips before its callback; the guard clips after it
        )
        trainer.training_step = self._step
        trainer.evaluate = self.evaluation(trainer.evaluate)
        trainer.add_callback(_Callback(self))

    def begin(self, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Create the guard when training begins; resumes the run in ``out``."""
        if step := self._trainer.state.global_step:
            raise ConfigError(
                f"guard_trainer: resume_from_checkpoint: the Trainer begins at step {step}, but "
                f"the guard resumes the run in {self._out} by itself; leave it out (to begin a "
                "run with these weights, load them into the model)"
            )
        # Accelerate's wrapper; the Trainer reads from it whether to step its schedule.
        self._optimizer = optimizer
        args, scaler = self._trainer.args, self._trainer.accelerator.scaler
        if scaler is not None:
            # A start may begin with steps that are passed over: they unscale what nobody scaled.
            scaler.scale(torch.zeros((), device=args.device))
        callbacks = Callbacks(self._callbacks, self._restore, args.gradient_accumulation_steps)
        self._batches = GuardedBatches(
            lambda: Guard(
                self._out,
                model=model,
                optimizer=getattr(optimizer, "optimizer", optimizer),
                scheduler=[*carried(scheduler, scaler), callbacks],
                clip=self._clip or None,
                accumulate=args.gradient_accumulation_steps,
                **self._settings,
            ),
            callbacks,
            scaler,
        )

    def _callbacks(self) -> dict[str, Any]:
        """What the Trainer itself would save: the best evaluation, and its callbacks' states."""
        best = {name: getattr(self._trainer.state, name) for name in _BEST}
        states = {name: one.state()["attributes"] for name, one in self._exported()}
        return {"best": best, "callbacks": states}

    def _restore(self, state: dict[str, Any]) -> None:
        vars(self._trainer.state).update(state["best"])
        for name, callback in self._exported():
            vars(callback).update(state["callbacks"].get(name, {}))

    def _exported(self) -> list[tuple[str, Any]]:
        callbacks = self._trainer.callback_handler.callbacks
        return [(type(one).__name__, one) for one in callbacks if isinstance(one, ExportableState)]

    def begin_step(self) -> None:
        self._begins_behind = self.guard.is_catching_up

    def pass_over(self, control: Any) -> None:
        """After a step, or an epoch, whose batches were used before this start: no evaluation and
        no checkpoint, which would be of the state resumed, and no loss, but at the last one what
        comes after it."""
        if self._begins_behind:
            control.should_log = False
            self._trainer._globalstep_last_logged = self._trainer.state.global_step
        if self.guard.is_catching_up:
            control.should_evaluate = control.should_save = False

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

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of an evaluation during training with the next step."""
        if self._batches is None:
            return
        sets = self._trainer.eval_dataset
        for name, value in metrics.items():
            is_number = isinstance(value, int | float) and name.startswith("eval_")
            if not is_number or name.endswith(("_time", "_runtime", "_per_second")):
                continue
            of_set = name.removeprefix("eval_").removesuffix("_loss")
            if isinstance(sets, Mapping) and of_set in sets and name.endswith("_loss"):
                # The mean over the sets, each of which is evaluated by itself, is the loss.
                self.guard.log({"eval_loss": value, f"eval_loss/{_column(of_set)}": value})
            else:
                self.guard.log({_column(name): value})

    def _step(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces ``Trainer.training_step``: forward and backward of one batch."""
        if not self.batches.take():
            return torch.zeros((), device=self._trainer.args.device)
        loss: torch.Tensor = self._training_step(model, inputs, *rest, **kwargs)
        # It is divided by the batches of the step, of which an epoch's last one may have fewer.
        judged = loss * self._trainer.current_gradient_accumulation_steps
        if self._rollouts is not None:
            judged = judged * math.nan if self._rollouts.have_failed else judged
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
    if trainer.args.deepspeed:
        raise ConfigError(
            f"guard_trainer: deepspeed={trainer.args.deepspeed!r}: its engine applies the update "
            "itself; use python -m runner parallel=zero3"
        )
    return GuardedTrainer(trainer, out, settings)


# Rewards of trainers that train on what they sample (TRL's GRPO and RLOO): a failure is no zero.
#
# TRL gives a completion without a reward the advantage 0, and adds up rewards without those that
# are NaN; so it trains on what nobody has scored. Here the step of such rollouts is discarded.


_log = logging.getLogger(__name__)


class Rollouts:
    """Watches the rewards of one trainer on one rank.

    Attributes:
        have_failed: whether a reward of the rollouts that are trained on now failed: its function
            raised or gave NaN or Inf, or no function gave any.
        rewards: FP32 ``[completions of all ranks, functions]``, of these rollouts.

    Args:
        trainer: has ``reward_funcs``.

    Raises:
        ConfigError: rollouts are trained on in other steps than the one that made them.
    """

    def __init__(self, trainer: Any) -> None:
        _require_one_step(trainer.args)
        self.have_failed = False
        self.rewards: torch.Tensor | None = None
        self._calculate = trainer._calculate_rewards
        self._names: Sequence[str] = trainer.reward_func_names
        trainer.reward_funcs = [
            self._watched(function, name)
            for function, name in zip(trainer.reward_funcs, self._names, strict=True)
        ]
        trainer._calculate_rewards = self._begin

    @classmethod
    def of(cls, trainer: Any) -> Rollouts | None:
        """None for a trainer that samples nothing."""
        return cls(trainer) if hasattr(trainer, "reward_funcs") else None

    def numbers(self) -> dict[str, float]:
        """The mean of each function's rewards, of completions that it has scored; by column."""
        if self.rewards is None:
            return {}
        means = self.rewards.double().nanmean(dim=0).tolist()
        return {f"rewards/{_column(n)}": m for n, m in zip(self._names, means, strict=True)}

    def _begin(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces the trainer's ``_calculate_rewards``, which begins each set of rollouts."""
        self.have_failed = False
        rewards: torch.Tensor = self._calculate(*args, **kwargs)
        self.rewards = rewards
        if bool(rewards.isnan().all(dim=1).any()):
            self._failed("no function gave a reward for a completion", "all functions")
        return rewards

    def _watched(self, function: Any, name: str) -> Any:
        if isinstance(function, nn.Module):
            function.register_forward_hook(partial(self._at_model, name))
            return function
        if inspect.iscoroutinefunction(function):

            async def awaited(**given: Any) -> Any:
                try:
                    return self._checked(await function(**given), name)
                except Exception as error:  # a user's, on this rank alone
                    return self._raised(error, name, given)

            return awaited

        def called(**given: Any) -> Any:
            try:
                return self._checked(function(**given), name)
            except Exception as error:  # a user's, on this rank alone
                return self._raised(error, name, given)

        return called

    def _at_model(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not bool(torch.isfinite(output.logits).all()):
            self._failed("gave a reward that is not finite", name)

    def _checked(self, rewards: Sequence[float | None], name: str) -> Sequence[float | None]:
        odd = [one for one in rewards if one is not None and not math.isfinite(one)]
        if odd:
            self._failed(f"gave the reward {float(odd[0])}", name)
        return rewards

    def _raised(self, error: Exception, name: str, given: dict[str, Any]) -> list[None]:
        """The other ranks wait for these rewards, so that the error cannot leave this rank."""
        self._failed(f"raised {type(error).__name__}: {error}", name)
        return [None] * len(given["completions"])

    def _failed(self, what: str, name: str) -> None:
        self.have_failed = True
        _log.warning("reward function %s %s; the step is discarded", name, what)


def _require_one_step(args: Any) -> None:
    generation, iterations = args.steps_per_generation, args.num_iterations
    if generation * iterations != args.gradient_accumulation_steps:
        raise ConfigError(
            f"guard_trainer: steps_per_generation={generation} and num_iterations={iterations} "
            f"with gradient_accumulation_steps={args.gradient_accumulation_steps}: rollouts made "
            "in one step would be trained on in other steps too, which could not be skipped "
            "exactly; set steps_per_generation to gradient_accumulation_steps, and "
            "num_iterations=1"
        )


def _column(name: str) -> str:
    return "".join(one if one.isalnum() and one.isascii() else "_" for one in name)[:60] or "_"
