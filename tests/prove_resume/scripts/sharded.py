"""Two ranks with FSDP1 or DeepSpeed's ZeRO, by VARIANT; each saves in its own format.

``fsdp1`` has each rank save its optimizer. ``DEFECT=moments_shared`` is torch's own: on a CPU its
``optim_state_dict`` of an FSDP1 module with ``use_orig_params`` gathers ``exp_avg`` and
``exp_avg_sq`` into one buffer, so that both are the latter (torch 2.13).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import parts
import torch
import torch.distributed as dist
from parts import BATCH, DEFECT, RANK, SAMPLES, SEED, VARIANT, WORLD
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

DEFECTS = {"moments", "moments_shared", "rng", "sampler_restarted", "lr_reset"}
VARIANTS = {"fsdp1", "fsdp1_flat", "zero1", "zero2", "zero3"}


def model_and_groups() -> tuple[nn.Module, list[dict[str, Any]]]:
    """The network, and its parameters with and without weight decay."""
    model = parts.Net(norm=nn.LayerNorm)
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return model, [{"params": weights, "weight_decay": 0.1}, {"params": others}]


class Fsdp1:
    def __init__(self) -> None:
        model, groups = model_and_groups()
        self.net: Any = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=VARIANT == "fsdp1"
        )
        parameters = groups if VARIANT == "fsdp1" else self.net.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        self.is_own = VARIANT == "fsdp1" and DEFECT != "moments_shared"
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, parts.warm_up_and_decay)

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.net.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        state = {
            "model": self.net.state_dict(), "schedule": self.schedule.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(self.net, self.optimizer),
        }  # fmt: skip
        if self.is_own:
            torch.save(self.optimizer.state_dict(), folder / f"optimizer{RANK}.pt")
        if RANK == 0:
            torch.save(state, folder / "whole.pt")

    def load(self, folder: Path) -> None:
        state = parts.read(folder / "whole.pt")
        self.net.load_state_dict(state["model"])
        if self.is_own:
            own = parts.read(folder / f"optimizer{RANK}.pt")
        else:
            own = FullyShardedDataParallel.optim_state_dict_to_load(
                self.net, self.optimizer, state["optimizer"]
            )
        if DEFECT != "moments":
            self.optimizer.load_state_dict(own)
        if DEFECT != "lr_reset":
            self.schedule.load_state_dict(state["schedule"])


class Zero:
    def __init__(self) -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for minutes
        model, groups = model_and_groups()
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.net, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, dist_init_required=False,
            lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, parts.warm_up_and_decay),
            config={
                "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0,
                "zero_optimization": {"stage": int(VARIANT[-1])},
                "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
            },
        )  # fmt: skip

    def update(self, loss: torch.Tensor) -> None:
        self.net.backward(loss)
        self.net.step()

    def save(self, folder: Path) -> None:
        self.net.save_checkpoint(folder, tag="engine")

    def load(self, folder: Path) -> None:
        self.net.load_checkpoint(
            folder, tag="engine", load_optimizer_states=DEFECT != "moments",
            load_lr_scheduler_states=DEFECT != "lr_reset",
        )  # fmt: skip


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's batch of a step, in epochs of another order each."""
    epoch, place = divmod(step * BATCH * WORLD, SAMPLES)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
    chosen = order[place + RANK * BATCH :][:BATCH]
    samples = parts.Samples()
    return samples.inputs[chosen], samples.labels[chosen]


def main() -> None:
    arguments = parts.settings(defects=DEFECTS, variants=VARIANTS)
    dist.init_process_group("gloo")
    parts.seed_everything(SEED)
    training: Any = Zero() if VARIANT.startswith("zero") else Fsdp1()
    parts.seed_everything(SEED + RANK)
    first, last = 0, parts.newest(arguments.out, "step-*")
    if last is not None:
        training.load(last)
        first = parts.number_of(last)
        if DEFECT != "rng":
            parts.set_random_state(parts.read(last / f"random{RANK}.pt"))
    for step in range(first, arguments.steps):
        inputs, labels = batch_of(step - first if DEFECT == "sampler_restarted" else step)
        loss = nn.functional.cross_entropy(training.net(inputs), labels)
        training.update(loss)
        parts.report(step + 1, loss.detach())
        if (step + 1) % arguments.save_every == 0:
            folder = arguments.out / f"partial-{step + 1}"
            folder.mkdir(exist_ok=True)
            dist.barrier()
            training.save(folder)
            torch.save(parts.random_state(), folder / f"random{RANK}.pt")
            dist.barrier()
            if RANK == 0:
                os.rename(folder, arguments.out / f"step-{step + 1}")
            dist.barrier()
    own = [p.detach() for group in training.optimizer.param_groups for p in group["params"]]
    parts.report_digest(own)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
