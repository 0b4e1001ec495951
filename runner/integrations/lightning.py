"""The guard as a callback of the Lightning Trainer; with Fabric use :class:`runner.Guard` itself.

>>> from runner.integrations.lightning import GuardCallback  # doctest: +SKIP
>>> trainer = Trainer(callbacks=[GuardCallback("runs/a", every=50)])  # doctest: +SKIP
>>> trainer.fit(module, loader)  # the same script again resumes  # doctest: +SKIP
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from runner.embed.loop.device_gate import HostSide
from runner.embed.loop.guard import Guard
from runner.integrations.batches import Callbacks, GuardedBatches, HasBatches, carried
from runner.system.error import ConfigError, lacking

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        Checkpoint,
        EarlyStopping,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.strategies import (
        DDPStrategy,
        ModelParallelStrategy,
        SingleDeviceStrategy,
    )
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(lacking("runner.integrations.lightning", "lightning")) from error


_COMPARING = (Checkpoint, EarlyStopping)  # callbacks that compare evaluations


class GuardCallback(HasBatches, Callback):  # type: ignore[misc]
    """Guards ``Trainer.fit`` with automatic optimization and one optimizer.

    Lightning counts every attempted step, also skipped ones; so a restart reads the data again,
    skips what was used before, and ends where an uninterrupted run ends.

    Args:
        out: directory of the run; the same one again resumes it.
        settings: those of :class:`runner.Guard`; Lightning clips by itself.
    """

    def __init__(self, out: str | Path, **settings: Any) -> None:
        self._out = out
        self._settings = settings
        self._before: HostSide | None = None  # a refused step
        self._looks_in_validation = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse trainers that cannot be guarded."""
        if trainer.ckpt_path:
            raise ConfigError(
                f"GuardCallback: ckpt_path={str(trainer.ckpt_path)!r}: the guard resumes the run "
                f"in {self._out} by itself; leave it out (to begin a run with these weights, "
                "load them into the module)"
            )
        strategy = type(trainer.strategy).__name__
        if "DeepSpeed" in strategy:
            raise ConfigError(
                f"GuardCallback: {strategy}: its engine applies the update itself; use python -m "
                "runner parallel=zero3, or another strategy"
            )
        if not isinstance(
            trainer.strategy, DDPStrategy | SingleDeviceStrategy | ModelParallelStrategy
        ):
            raise ConfigError(
                f"GuardCallback: {strategy}: a batch can be skipped only on one device, with "
                "strategy='ddp', and with ModelParallelStrategy and fully_shard (FSDP2) in "
                "configure_model; use one of these, or runner.Guard in a loop of your own"
            )
        for callback in trainer.callbacks:
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ConfigError(
                    f"GuardCallback: {type(callback).__name__}: its average of the weights is not "
                    "in the guard's checkpoints, so that a restart would begin it anew; leave it "
                    "out, or average in a loop of your own, where runner.Guard takes the average "
                    "as a second model"
                )
        if not pl_module.automatic_optimization or len(trainer.optimizers) > 1:
            raise ConfigError(
                "GuardCallback: needs automatic optimization and one optimizer; with manual "
                "optimization put runner.Guard into your training_step"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the guard, which resumes the run in ``out``."""
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        comparing = _callbacks(trainer)
        self._batches = GuardedBatches(
            lambda: Guard(
                self._out,
                model=pl_module,
                optimizer=trainer.optimizers[0],
                scheduler=[*self._schedulers(trainer), comparing],
                accumulate=trainer.accumulate_grad_batches,
                **self._settings,
            ),
            comparing,
            self._scaler,
        )
        callbacks = trainer.callbacks
        if self.guard.is_catching_up:  # what is evaluated meanwhile is the state resumed
            trainer.callbacks = [one for one in callbacks if not isinstance(one, _COMPARING)]
            # What ``step`` below gives Lightning for each used batch.
            warnings.filterwarnings("ignore", "`training_step` returned `None`")
        train = pl_module.training_step
        batches = self._batches

        def step(*args: Any, **kwargs: Any) -> Any:
            """Replaces ``training_step``; returns None, which is no loss, for a skipped batch."""
            is_taken = batches.take()
            self._has_trained |= is_taken
            if not self.guard.is_catching_up:
                trainer.callbacks = callbacks
            if not is_taken:
                # On several ranks Lightning refuses None, and DDP waits for every gradient.
                return None if trainer.world_size == 1 else _no_loss(pl_module)
            result = train(*args, **kwargs)
            loss = result["loss"] if isinstance(result, Mapping) else result
            if loss is not None:
                # Before backward it is divided by the batches of a step, and multiplied by a scale.
                batches.note(loss)
            return result

        pl_module.training_step = step
        precision = trainer.precision_plugin
        clip, precision.clip_grad_by_value = precision.clip_grad_by_value, _clip_if_any(precision)
        validation = trainer.fit_loop.epoch_loop.val_loop
        validate, validation.run = validation.run, self.evaluation(validation.run)

        def restore() -> None:
            pl_module.training_step, validation.run = train, validate
            trainer.callbacks, precision.clip_grad_by_value = callbacks, clip

        self._restore = restore

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_trained = False
        self.batches.begin_epoch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before the callbacks that compare: an epoch whose batches were all used before this start
        has no numbers of training."""
        if not self._has_trained:
            known = (None, *trainer.callback_metrics)
            trainer.callbacks = [
                one
                for one in trainer.callbacks
                if not isinstance(one, _COMPARING) or getattr(one, "monitor", None) in known
            ]

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """After the backward passes: drop the gradients if the step is not allowed."""
        self._before = None
        if not self.batches.may_step(optimizer):
            # Lightning steps the schedulers, and updates the loss scale, even so.
            self._before = HostSide([optimizer], self._schedulers(trainer))

    def _schedulers(self, trainer: Trainer) -> list[Any]:
        return carried([each.scheduler for each in trainer.lr_scheduler_configs], self._scaler)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After the schedulers stepped: undo that for a refused step, or count the step."""
        if self._before is not None:
            self._before.restore()
            self._before = None
        else:
            self.guard.settle()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Learn whether the ranks have equally many batches, so that they can agree at each."""
        own, strategy = float(sum(trainer.num_val_batches)), trainer.strategy
        mean = strategy.reduce(torch.tensor(own, device=pl_module.device), reduce_op="mean")
        is_even = strategy.reduce_boolean_decision(math.isfinite(own) and own == float(mean))
        self._looks_in_validation = is_even

    def on_validation_batch_start(self, *_: Any) -> None:
        """Look at the request to stop."""
        if self._looks_in_validation:
            self.check_stop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()
        self.guard.close()


def _callbacks(trainer: Trainer) -> Callbacks:
    comparing = {one.state_key: one for one in trainer.callbacks if isinstance(one, _COMPARING)}

    def load(state: dict[str, Any]) -> None:
        for key in comparing.keys() & state.keys():
            comparing[key].load_state_dict(state[key])

    def read() -> dict[str, Any]:
        return {key: one.state_dict() for key, one in comparing.items()}

    return Callbacks(read, load, trainer.accumulate_grad_batches)


def _clip_if_any(precision: Any) -> Callable[..., None]:
    """Its clipping by value, which torch refuses where there are no gradients."""
    own = precision.clip_grad_by_value

    def clip(optimizer: Any, value: float) -> None:
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            own(optimizer, value)

    return clip


def _no_loss(module: torch.nn.Module) -> torch.Tensor:
    """A zero loss whose gradient is zero for every parameter, even if a weight is NaN."""
    trained = [p for p in module.parameters() if p.requires_grad]
    own = [p.to_local() if isinstance(p, DTensor) else p for p in trained]
    return torch.stack([p.flatten()[:0].sum() for p in own]).sum()
