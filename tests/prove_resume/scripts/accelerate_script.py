"""Accelerate: prepare, save_state, load_state, skip_first_batches; on one rank or several."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import parts
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from parts import BATCH, DEFECT, RANK, SEED, VARIANT
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

DEFECTS = {
    "moments", "step_counts", "rng", "epoch_seed", "sampler_restarted", "batch_skipped",
    "batch_repeated", "lr_reset", "weights_bf16", "ema_lost", "worker_seeds", "shuffle_buffer",
    "older_checkpoint", "param_groups", "batchnorm", "other_rank", "rng_early",
}  # fmt: skip
VARIANTS = {"workers", "stream", "accumulate", "bf16"}


class Progress:
    """What Accelerate is asked to save beside its own."""

    def __init__(self) -> None:
        self.epoch = self.batch = self.step = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Run:
    def __init__(self, out: Path) -> None:
        self.out = out
        parts.seed_everything(SEED)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2 if VARIANT == "accumulate" else 1,
            mixed_precision="bf16" if VARIANT == "bf16" else "no",
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
            step_scheduler_with_optimizer=False,
        )
        self.last = parts.newest(out, "step_*")
        net = parts.Net()
        swapped = DEFECT == "param_groups" and self.last is not None
        optimizer = torch.optim.AdamW(parts.groups_of(net, swapped=swapped), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, parts.warm_up_and_decay)
        data = parts.Noisy() if DEFECT == "worker_seeds" else parts.Samples()
        loader = DataLoader(data, BATCH, shuffle=True, num_workers=int(VARIANT == "workers"))
        self.progress, self.ema = Progress(), copy.deepcopy(net)
        self.stream = parts.Stream(keeps_buffer=DEFECT != "shuffle_buffer")
        self.model, self.optimizer, self.loader = self.accelerator.prepare(net, optimizer, loader)
        # One that is not prepared is not saved.
        self.schedule = (
            schedule if DEFECT == "lr_reset" else self.accelerator.prepare_scheduler(schedule)
        )
        self.accelerator.register_for_checkpointing(self.progress, self.stream)
        if DEFECT != "ema_lost":
            self.accelerator.register_for_checkpointing(self.ema)
        self.accelerator.register_save_state_pre_hook(_smaller)
        parts.seed_everything(SEED + RANK)

    def save(self) -> None:
        partial = self.out / f"partial_{self.progress.step}"
        self.accelerator.save_state(str(partial))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            os.rename(partial, self.out / f"step_{self.progress.step}")
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path) -> None:
        if DEFECT == "rng":  # it says so at level info, and goes on
            (folder / f"random_states_{RANK}.pkl").unlink()
        if DEFECT == "other_rank" and RANK == 1:
            shutil.copy(folder / "random_states_0.pkl", folder / "random_states_1.pkl")
        self.accelerator.load_state(str(folder), strict=DEFECT != "batchnorm")
        net = self.accelerator.unwrap_model(self.model)
        if DEFECT == "older_checkpoint":
            first = sorted(self.out.glob("step_*"))[-1]
            net.load_state_dict(load_file(first / "model.safetensors"))
        if DEFECT == "moments":
            self.optimizer.optimizer.state.clear()
        if DEFECT == "step_counts":
            for one in self.optimizer.optimizer.state.values():
                one["step"].zero_()
        if DEFECT == "ema_lost":
            self.ema.load_state_dict(net.state_dict())
        self.progress.batch += parts.BATCH_SHIFT
        if DEFECT == "sampler_restarted":
            self.progress.batch = 0

    def batches(self) -> Any:
        if VARIANT == "stream":
            loader = iter(DataLoader(self.stream, BATCH, generator=torch.Generator()))
            self._load()
            yield from loader
        self._load()
        late = parts.random_state() if self.last is not None else None
        first_epoch = 0 if DEFECT == "epoch_seed" else self.progress.epoch
        for epoch in itertools.count(first_epoch):
            self.loader.set_epoch(epoch)
            for batch in skip_first_batches(self.loader, self.progress.batch):
                # By now the loader has drawn from what load_state put back.
                if late is not None and DEFECT != "rng_early":
                    parts.set_random_state(late)
                late = None
                self.progress.batch += 1
                yield batch
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def _load(self) -> None:
        if self.last is not None:
            self.load(self.last)

    def update(self, batches: Any) -> torch.Tensor:
        for inputs, labels in batches:
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast():
                    loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.accelerator.backward(loss)
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                break
        net = self.accelerator.unwrap_model(self.model)
        parts.average_into(self.ema, net)
        self.progress.step += 1
        return loss.detach()


def _smaller(models: Any, weights: list[Any], output_dir: str) -> None:
    """Called by save_state with the weights that it is about to write."""
    weights[:] = [parts.weights(state) for state in weights]


def main() -> None:
    arguments = parts.settings(defects=DEFECTS, variants=VARIANTS)
    run = Run(arguments.out)
    batches = run.batches()
    while run.progress.step < arguments.steps:
        loss = run.update(batches)
        parts.report(run.progress.step, loss)
        if run.progress.step % arguments.save_every == 0:
            run.save()
    net = run.accelerator.unwrap_model(run.model)
    parts.report_digest(net.state_dict(), run.ema.state_dict(), run.optimizer.state_dict()["state"])
    run.accelerator.end_training()


if __name__ == "__main__":
    main()
