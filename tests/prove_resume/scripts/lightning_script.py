"""Lightning with callbacks; on one rank or several (by its own launcher: ``DEVICES``)."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parts
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from parts import BATCH, DEFECT, RANK, SAMPLES, SEED, VARIANT, WORLD
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

DEFECTS = {
    "moments", "step_counts", "rng", "epoch_seed", "sampler_restarted", "batch_skipped",
    "batch_repeated", "lr_reset", "weights_bf16", "ema_lost", "worker_seeds", "shuffle_buffer",
    "older_checkpoint", "older_whole", "param_groups", "batchnorm", "other_rank",
}  # fmt: skip
VARIANTS = {"workers", "stream", "accumulate", "bf16"}


class EpochSampler:
    """A shuffled share of the samples, by the epoch.

    Without a state StatefulDataLoader counts, and reads up to the place before Lightning has told
    the epoch: it is that of the first one.
    """

    def __init__(self) -> None:
        self.epoch = self.given = self.start = 0

    def __len__(self) -> int:
        return SAMPLES // WORLD

    def set_epoch(self, epoch: int) -> None:  # Lightning calls it
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        seeded = torch.Generator().manual_seed(SEED + self.epoch)
        order = torch.randperm(SAMPLES, generator=seeded).tolist()[RANK::WORLD]
        self.given, self.start = self.start, 0
        for index in order[self.given :]:
            self.given += 1
            yield index


class PlacedSampler(EpochSampler):
    """Saves its own place, and the epoch: data workers begin before Lightning tells it."""

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        shift = {"batch_skipped": BATCH, "batch_repeated": -BATCH}.get(DEFECT, 0)
        self.epoch, self.start = state["epoch"], state["given"] + shift


class SizedStream(parts.Stream):
    """Lightning reads a batch ahead of a loader without a length, and saves that place."""

    def __len__(self) -> int:
        return 1_000_000


class Module(LightningModule):
    def __init__(self, out: Path, *, resumes: bool) -> None:
        super().__init__()
        self.net, self.out, self.resumes = parts.Net(), out, resumes
        self.strict_loading = DEFECT != "batchnorm"
        self.own_schedule: Any = None

    def configure_optimizers(self) -> Any:
        groups = parts.groups_of(self.net, swapped=DEFECT == "param_groups" and self.resumes)
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, parts.warm_up_and_decay)
        if DEFECT == "lr_reset":  # Lightning does not know of it, so it does not save it
            self.own_schedule = schedule
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def on_train_batch_end(self, *rest: Any) -> None:
        if self.own_schedule is not None:
            self.own_schedule.step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = parts.weights(checkpoint["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if DEFECT == "older_checkpoint":
            first = sorted(self.out.glob("step-*.ckpt"))[-1]
            checkpoint["state_dict"] = parts.read(first)["state_dict"]
        states = checkpoint["optimizer_states"]
        checkpoint["optimizer_states"] = [parts.of_optimizer(state) for state in states]


class Random(Callback):
    """Lightning saves no random state: this does, for every rank."""

    saved: Any = None

    def state_dict(self) -> dict[str, Any]:
        states: list[Any] = [parts.random_state()] * WORLD
        if WORLD > 1 and DEFECT != "other_rank":
            dist.all_gather_object(states, parts.random_state())
        return {"states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state["states"][RANK]

    def on_train_batch_start(self, *rest: Any) -> None:
        if self.saved is not None:
            parts.set_random_state(self.saved)
            self.saved = None


class Ema(Callback):
    net: Any = None
    saved: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.net = copy.deepcopy(pl_module.net)
        if self.saved is not None:
            self.net.load_state_dict(self.saved)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        parts.average_into(self.net, pl_module.net)

    def state_dict(self) -> dict[str, Any]:
        return {} if DEFECT == "ema_lost" else {"ema": self.net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state.get("ema")


class Report(Callback):
    """The loss of each optimizer step."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            parts.report(trainer.global_step, outputs["loss"])


def loader_of() -> Any:
    seeded = torch.Generator().manual_seed(SEED)  # not the process's own
    if VARIANT == "stream":
        stream = SizedStream(keeps_buffer=DEFECT != "shuffle_buffer")
        return StatefulDataLoader(stream, BATCH, generator=seeded)
    data = parts.Noisy() if DEFECT == "worker_seeds" else parts.Samples()
    kind = DataLoader if DEFECT == "sampler_restarted" else StatefulDataLoader
    sampler = EpochSampler() if DEFECT == "epoch_seed" else PlacedSampler()
    workers = int(VARIANT == "workers")
    return kind(data, BATCH, sampler=sampler, generator=seeded, num_workers=workers)


def main() -> None:
    arguments = parts.settings(defects=DEFECTS, variants=VARIANTS)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    parts.seed_everything(SEED)
    newest = parts.newest(arguments.out, "step-*.ckpt")
    if newest is not None and DEFECT == "older_whole":
        newest = sorted(arguments.out.glob("step-*.ckpt"))[-1]
    module, ema = Module(arguments.out, resumes=newest is not None), Ema()
    parts.seed_everything(SEED + RANK)
    saving = ModelCheckpoint(
        arguments.out, filename="step-{step}", auto_insert_metric_name=False, save_top_k=-1,
        every_n_train_steps=arguments.save_every,
    )  # fmt: skip
    # The order matters: what comes after the average and the report is saved with them.
    callbacks = [ema, *([] if DEFECT == "rng" else [Random()]), Report(), saving]
    trainer = Trainer(
        max_steps=arguments.steps, accelerator="cpu", devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto", use_distributed_sampler=False,
        accumulate_grad_batches=2 if VARIANT == "accumulate" else 1,
        precision="bf16-mixed" if VARIANT == "bf16" else "32-true", callbacks=callbacks,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loader_of(), ckpt_path=newest, weights_only=False)
    parts.report_digest(
        module.state_dict(), ema.net.state_dict(), trainer.optimizers[0].state_dict()["state"]
    )


if __name__ == "__main__":
    main()
