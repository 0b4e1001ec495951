"""A bare loop: epochs of shuffled data, AdamW with groups, a schedule, an EMA of the weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parts
import torch
from parts import BATCH, DEFECT, SAMPLES, SEED, VARIANT
from torch import nn
from torch.utils.data import DataLoader

DEFECTS = {
    "moments", "step_counts", "rng", "epoch_seed", "sampler_restarted", "batch_skipped",
    "batch_repeated", "lr_reset", "weights_bf16", "ema_lost", "scaler_lost", "worker_seeds",
    "shuffle_buffer", "older_checkpoint", "older_whole", "param_groups", "batchnorm", "numpy_rng",
}  # fmt: skip
VARIANTS = {
    "workers", "stream", "scaler", "bf16", "compile", "accumulate", "mixup", "no_random", "sgd",
}  # fmt: skip
ACCUMULATE = 2 if VARIANT == "accumulate" else 1


def precision() -> Any:
    kinds = {"bf16": torch.bfloat16, "scaler": torch.float16}
    if VARIANT not in kinds:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=kinds[VARIANT])


class Training:
    """Everything that a step reads or changes."""

    def __init__(self, *, resumes: bool) -> None:
        parts.seed_everything(SEED)
        self.model = parts.Net(dropout=0.0 if VARIANT == "no_random" else 0.2)
        swapped = DEFECT == "param_groups" and resumes
        groups = parts.groups_of(self.model, swapped=swapped)
        if VARIANT == "sgd":
            self.optimizer: Any = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, parts.warm_up_and_decay)
        self.ema = copy.deepcopy(self.model)
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=VARIANT == "scaler", init_scale=2.0**10, growth_interval=2
        )
        self.forward: Any = torch.compile(self.model) if VARIANT == "compile" else self.model
        self.stream = parts.Stream(keeps_buffer=DEFECT != "shuffle_buffer")
        self.step = self.epoch = self.batch = 0
        self.first_epoch = 0
        self.saved_random: Any = None

    # -- checkpoints

    def save(self, out: Path) -> None:
        state = {
            "step": self.step, "epoch": self.epoch, "batch": self.batch,
            "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict(),
            "ema": self.ema.state_dict(), "scaler": self.scaler.state_dict(),
            "stream": self.stream.state_dict(), "random": parts.random_state(),
        }  # fmt: skip
        parts.write(parts.weights(self.model.state_dict()), out / f"model-{self.step}.pt")
        parts.write(state, out / f"trainer-{self.step}.pt")

    def load(self, path: Path) -> None:
        state = parts.read(path)
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]
        weights = path.with_name(f"model-{self.step}.pt")
        if DEFECT == "older_checkpoint":  # "model-5.pt" comes after "model-15.pt"
            weights = sorted(path.parent.glob("model-*.pt"))[-1]
        self.model.load_state_dict(parts.read(weights), strict=DEFECT != "batchnorm")
        self.optimizer.load_state_dict(parts.of_optimizer(state["optimizer"]))
        if DEFECT != "lr_reset":
            self.schedule.load_state_dict(state["schedule"])
        self.ema.load_state_dict(self.model.state_dict() if DEFECT == "ema_lost" else state["ema"])
        if DEFECT != "scaler_lost":
            self.scaler.load_state_dict(state["scaler"])
        self.batch += parts.BATCH_SHIFT
        if DEFECT == "sampler_restarted":
            self.batch = 0
        if DEFECT == "epoch_seed":
            self.first_epoch = self.epoch
        self.stream.load_state_dict(state["stream"])
        self.saved_random = state["random"]

    def _restore_random(self) -> None:
        """Put the generators back; last, because a loader draws from them when it begins."""
        state, self.saved_random = self.saved_random, None
        if state is None or DEFECT == "rng" or VARIANT == "no_random":
            return
        if DEFECT == "numpy_rng":
            torch.set_rng_state(state["torch"])
        else:
            parts.set_random_state(state)

    # -- steps

    def batches(self) -> Iterator[Any]:
        if VARIANT == "stream":
            self._restore_random()
            yield from DataLoader(self.stream, BATCH, generator=torch.Generator())
        while True:
            yield from self._rest_of_epoch()
            self.epoch, self.batch = self.epoch + 1, 0

    def _rest_of_epoch(self) -> Iterator[Any]:
        seeded = torch.Generator().manual_seed(SEED + self.epoch - self.first_epoch)
        order = torch.randperm(SAMPLES, generator=seeded).tolist()
        has_workers = VARIANT == "workers"
        loader = DataLoader(
            parts.Noisy() if has_workers else parts.Samples(),
            BATCH,
            sampler=order,
            num_workers=2 if has_workers else 0,
            # Else the workers' seeds come from torch's own generator, wherever that stands now.
            generator=None if DEFECT == "worker_seeds" else seeded,
        )
        batches = iter(loader)
        for _ in range(self.batch):
            next(batches)
        self._restore_random()
        for batch in batches:
            self.batch += 1
            yield batch

    def update(self, batches: Iterator[Any]) -> torch.Tensor:
        """One optimizer step; returns the loss of its last batch."""
        for _ in range(ACCUMULATE):
            inputs, labels = next(batches)
            if VARIANT == "mixup":
                inputs = _mixed(inputs)
            with precision():
                loss = nn.functional.cross_entropy(self.forward(inputs), labels) / ACCUMULATE
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        parts.average_into(self.ema, self.model)
        self.step += 1
        return loss.detach()

    def digest_parts(self) -> list[Any]:
        kept = self.model.state_dict(), self.ema.state_dict(), self.optimizer.state_dict()
        return [*kept, self.scaler.state_dict()]


def _mixed(inputs: torch.Tensor) -> torch.Tensor:
    share = float(parts.np.random.beta(0.4, 0.4))
    return share * inputs + (1 - share) * inputs.flip(0)


def main() -> None:
    arguments = parts.settings(defects=DEFECTS, variants=VARIANTS)
    path = parts.newest(arguments.out, "trainer-*.pt")
    if path is not None and DEFECT == "older_whole":
        path = sorted(arguments.out.glob("trainer-*.pt"))[-1]
    training = Training(resumes=path is not None)
    if path is not None:
        training.load(path)
    batches = training.batches()
    while training.step < arguments.steps:
        loss = training.update(batches)
        parts.report(training.step, loss)
        if training.step % arguments.save_every == 0:
            training.save(arguments.out)
    parts.report_digest(*training.digest_parts())


if __name__ == "__main__":
    main()
