"""Two ranks with DistributedDataParallel and DistributedSampler; the first one saves."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parts
import torch
import torch.distributed as dist
from parts import BATCH, DEFECT, RANK, SEED, VARIANT
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

DEFECTS = {
    "moments", "step_counts", "rng", "epoch_seed", "sampler_restarted", "batch_skipped",
    "batch_repeated", "lr_reset", "weights_bf16", "ema_lost", "scaler_lost", "worker_seeds",
    "shuffle_buffer", "older_checkpoint", "param_groups", "batchnorm", "other_rank",
}  # fmt: skip
VARIANTS = {"workers", "stream", "scaler", "bf16", "accumulate", "evaluate"}
ACCUMULATE = 2 if VARIANT == "accumulate" else 1


class Trainer:
    def __init__(self, out: Path) -> None:
        self.out = out
        parts.seed_everything(SEED)
        self.net = parts.Net()
        self.last = parts.newest(out, "step-*.pt")
        swapped = DEFECT == "param_groups" and self.last is not None
        self.optimizer = torch.optim.Adam(parts.groups_of(self.net, swapped=swapped), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=[2e-2, 5e-3, 1e-2], total_steps=100
        )
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler(
            "cpu", enabled=VARIANT == "scaler", init_scale=2.0**12, growth_interval=4
        )
        self.stream = parts.Stream(keeps_buffer=DEFECT != "shuffle_buffer")
        self.epoch = self.batches_done = self.step = 0
        self.own: dict[str, Any] = {}  # what only this rank knows
        parts.seed_everything(SEED + RANK)
        if self.last is not None:
            self.load(self.last)
        self.model = DistributedDataParallel(self.net)

    def save(self) -> None:
        own = {"random": parts.random_state(), "stream": self.stream.state_dict()}
        parts.write(own, self.out / f"rank{RANK}-{self.step}.pt")
        dist.barrier()
        if RANK == 0:
            state = {
                "epoch": self.epoch, "batches_done": self.batches_done, "step": self.step,
                "model": parts.weights(self.net.state_dict()), "ema": self.ema.state_dict(),
                "scaler": self.scaler.state_dict(),
                "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict(),
            }  # fmt: skip
            parts.write(state, self.out / f"step-{self.step}.pt")
        dist.barrier()

    def load(self, path: Path) -> None:
        state = parts.read(path)
        self.epoch, self.step = state["epoch"], state["step"]
        self.batches_done = state["batches_done"] + parts.BATCH_SHIFT
        model = state["model"]
        if DEFECT == "older_checkpoint":  # the first in the folder, in no particular order
            model = parts.read(sorted(path.parent.glob("step-*.pt"))[0])["model"]
        self.net.load_state_dict(model, strict=DEFECT != "batchnorm")
        self.optimizer.load_state_dict(parts.of_optimizer(state["optimizer"]))
        if DEFECT != "lr_reset":
            self.schedule.load_state_dict(state["schedule"])
        if DEFECT != "ema_lost":
            self.ema.load_state_dict(state["ema"])
        if DEFECT != "scaler_lost":
            self.scaler.load_state_dict(state["scaler"])
        rank = 0 if DEFECT == "other_rank" else RANK
        self.own = parts.read(path.with_name(f"rank{rank}-{self.step}.pt"))
        self.stream.load_state_dict(self.own["stream"])

    def batches(self) -> Iterator[Any]:
        if VARIANT == "stream":
            self._restore_random()
            yield from DataLoader(self.stream, BATCH, generator=torch.Generator())
        data = parts.Noisy() if VARIANT == "workers" else parts.Samples()
        sampler = DistributedSampler(data, seed=SEED)
        loader = DataLoader(
            data, BATCH, sampler=sampler, num_workers=VARIANT == "workers",
            generator=None if DEFECT == "worker_seeds" else torch.Generator().manual_seed(RANK),
        )  # fmt: skip
        done = 0 if DEFECT == "sampler_restarted" else self.batches_done
        for epoch in itertools.count():
            first = 0 if DEFECT == "epoch_seed" else self.epoch
            if epoch < first:
                iter(loader)  # it takes its random numbers, as it did then
                continue
            sampler.set_epoch(epoch)
            batches = iter(loader)
            for _ in range(done):
                next(batches)
            self._restore_random()
            for batch in batches:
                self.batches_done += 1
                yield batch
            done = self.batches_done = 0
            self.epoch += 1

    def _restore_random(self) -> None:
        random_state = self.own.pop("random", None)
        if random_state is not None and DEFECT != "rng":
            parts.set_random_state(random_state)

    def update(self, batches: Iterator[Any]) -> torch.Tensor:
        kinds = {"bf16": torch.bfloat16, "scaler": torch.float16}
        for number in range(ACCUMULATE):
            inputs, labels = next(batches)
            is_last = number == ACCUMULATE - 1
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                with torch.autocast("cpu", dtype=kinds.get(VARIANT), enabled=VARIANT in kinds):
                    loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.scaler.scale(loss / ACCUMULATE).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.net)
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(self) -> None:
        """The first rank looks at all samples, the other one waits."""
        if RANK == 0:
            self.net.eval()
            self.net(parts.Samples().inputs)
            self.net.train()
        dist.barrier()


def main() -> None:
    arguments = parts.settings(defects=DEFECTS, variants=VARIANTS)
    dist.init_process_group("gloo")
    trainer = Trainer(arguments.out)
    batches = trainer.batches()
    while trainer.step < arguments.steps:
        loss = trainer.update(batches)
        parts.report(trainer.step, loss)
        if VARIANT == "evaluate" and trainer.step % 3 == 0:
            trainer.evaluate()
        if trainer.step % arguments.save_every == 0:
            trainer.save()
    kept = trainer.ema.state_dict(), trainer.optimizer.state_dict(), trainer.scaler.state_dict()
    parts.report_digest(trainer.net.state_dict(), *kept)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
