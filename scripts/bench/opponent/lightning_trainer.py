"""Lightning's Trainer: DistributedDataParallel, bf16-mixed or FP32; bar, logs, saves off."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader

from scripts.bench.task import Task, build_loader, build_model, build_optimizer, build_schedule


class Module(lightning.LightningModule):
    """The decoder as Lightning wants it."""

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__()
        self.task = task
        self.decoder = build_model(task, device)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        logits = self.decoder(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self.task, self.decoder)
        schedule = build_schedule(self.task, optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        # gradient_clip_val refuses a fused AdamW beside bf16-mixed.
        torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), self.task.clip)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return build_loader(
            self.task,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pin=torch.cuda.is_available(),
        )


class AfterEachStep(lightning.Callback):
    """Calls ``after_step`` when an update is done."""

    def __init__(self, after_step: Callable[..., bool], num_micro: int) -> None:
        self._after_step = after_step
        self._num_micro = num_micro
        self._micro = 0
        self._total: torch.Tensor | float = 0.0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning divides the loss by accumulate_grad_batches before it tells it.
        self._micro += 1
        self._total = self._total + outputs["loss"].detach()
        if self._micro == self._num_micro:
            trainer.should_stop |= self._after_step(self._total)
            self._micro, self._total = 0, 0.0


def train(task: Task, device: torch.device, after_step: Callable[..., bool]) -> None:
    """See the package's docstring."""
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    num_micro = task.num_micro_batches(dist.get_world_size())
    trainer = lightning.Trainer(
        accelerator=device.type,
        devices=dist.get_world_size(),
        strategy="ddp",
        precision="bf16-mixed" if task.is_bf16 else "32-true",
        accumulate_grad_batches=num_micro,
        max_steps=task.total,
        callbacks=[AfterEachStep(after_step, num_micro)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(task, device))
