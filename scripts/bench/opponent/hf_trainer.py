"""Hugging Face transformers' Trainer: DistributedDataParallel, bf16 or FP32; logs and saves off."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from scripts.bench.task import Task, build_loader, build_model, build_optimizer, build_schedule


class Module(torch.nn.Module):
    """The decoder as the Trainer wants it: a loss comes out."""

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__()
        self.decoder = build_model(task, device)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.decoder(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss}


class _Trainer(Trainer):
    """Takes the batches in the task's order, and remembers the loss."""

    def __init__(self, task: Task, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._task = task
        self.step_loss = torch.zeros(())

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = build_loader(
            self._task,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pin=self.args.device.type == "cuda",
            as_mapping=True,
        )
        return loader

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*arguments, **named)
        self.step_loss = self.step_loss + loss.detach()  # where it is: nothing waits
        return loss


class _AfterEachStep(TrainerCallback):
    def __init__(self, after_step: Callable[..., bool]) -> None:
        self._after_step = after_step
        self.trainer: _Trainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        assert self.trainer is not None
        control.should_training_stop |= self._after_step(self.trainer.step_loss)
        self.trainer.step_loss = torch.zeros(())


def train(task: Task, device: torch.device, after_step: Callable[..., bool]) -> None:
    """See the package's docstring."""
    module = Module(task, device)
    optimizer = build_optimizer(task, module)
    callback = _AfterEachStep(after_step)
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=device.type == "cpu",
        bf16=task.is_bf16,
        max_steps=task.total,
        per_device_train_batch_size=task.micro_size,
        gradient_accumulation_steps=task.num_micro_batches(dist.get_world_size()),
        max_grad_norm=task.clip,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = _Trainer(
        task,
        model=module,
        args=arguments,
        optimizers=(optimizer, build_schedule(task, optimizer)),
        callbacks=[callback],
    )
    callback.trainer = trainer
    trainer.train()
