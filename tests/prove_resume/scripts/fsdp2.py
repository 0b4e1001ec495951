"""Two ranks with fully_shard: DCP folders, files of a rank's own shards, or a full state dict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parts import BATCH, DEFECT, RANK, SAMPLES, SEED, VARIANT, WORLD
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEFECTS = {
    "moments", "step_counts", "rng", "epoch_seed", "sampler_restarted", "batch_skipped",
    "batch_repeated", "lr_reset", "weights_bf16", "ema_lost", "older_checkpoint", "param_groups",
    "other_shard",
}  # fmt: skip
VARIANTS = {"local", "full", "evaluate"}  # the first two are how it saves; the default is DCP
FULL = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Trainer:
    def __init__(self, out: Path) -> None:
        self.out = out
        parts.seed_everything(SEED)
        self.model: Any = parts.Net(norm=nn.LayerNorm)
        mesh = init_device_mesh("cpu", (WORLD,))
        for tower in (self.model.left, self.model.right, self.model):
            fully_shard(tower, mesh=mesh)
        self.last = parts.newest(out, "step-*")
        swapped = DEFECT == "param_groups" and self.last is not None
        groups = parts.groups_of(self.model, swapped=swapped)
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, parts.warm_up_and_decay)
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.epoch = self.batch = self.step = self.first_epoch = 0
        parts.seed_everything(SEED + RANK)
        if self.last is not None:
            self.load(self.last)

    # -- checkpoints: a folder each, renamed when all ranks have written to it

    def save(self) -> None:
        folder = self.out / f"partial-{self.step}"
        folder.mkdir(exist_ok=True)
        dist.barrier()
        self._save_model(folder)
        own = {
            "epoch": self.epoch, "batch": self.batch, "step": self.step,
            "schedule": self.schedule.state_dict(), "random": parts.random_state(),
            "ema": {name: tensor.to_local() for name, tensor in self.ema.items()},
        }  # fmt: skip
        parts.write(own, folder / f"rank{RANK}.pt")
        dist.barrier()
        if RANK == 0:
            os.rename(folder, self.out / f"step-{self.step}")
        dist.barrier()

    def _save_model(self, folder: Path) -> None:
        if VARIANT == "local":
            state = self.model.state_dict(), self.optimizer.state_dict()
            parts.write(
                _mapped(state, lambda tensor: tensor.to_local()), folder / f"shard{RANK}.pt"
            )
            return
        options = FULL if VARIANT == "full" else None
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer, options=options)
        if DEFECT == "weights_bf16":
            model = _mapped(model, lambda tensor: tensor.bfloat16().float())
        if VARIANT == "full":
            if RANK == 0:
                parts.write((model, optimizer), folder / "full.pt")
        else:
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        own = parts.read(folder / f"rank{RANK}.pt")
        self.epoch, self.batch, self.step = own["epoch"], own["batch"], own["step"]
        self.batch += parts.BATCH_SHIFT
        if DEFECT == "sampler_restarted":
            self.batch = 0
        if DEFECT == "epoch_seed":
            self.first_epoch = self.epoch
        {"local": self._load_local, "full": self._load_full}.get(VARIANT, self._load_dcp)(folder)
        if DEFECT == "step_counts":
            for one in self.optimizer.state.values():
                one["step"].zero_()
        if DEFECT != "lr_reset":
            self.schedule.load_state_dict(own["schedule"])
        for name, parameter in self.model.named_parameters():
            is_lost = DEFECT == "ema_lost"
            self.ema[name].to_local().copy_(
                parameter.detach().to_local() if is_lost else own["ema"][name]
            )
        if DEFECT != "rng":
            parts.set_random_state(own["random"])

    def _load_local(self, folder: Path) -> None:
        model, optimizer = parts.read(folder / f"shard{RANK}.pt")
        if DEFECT == "other_shard":  # the first rank's, on all of them
            optimizer = parts.read(folder / "shard0.pt")[1]
        own = self.model.state_dict()
        for name, tensor in model.items():
            own[name].to_local().copy_(tensor)
        # DTensors again, laid out as the parameters are
        in_order = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, one in optimizer["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                one[name] = torch.distributed.tensor.DTensor.from_local(
                    one[name], in_order[number].device_mesh, in_order[number].placements,
                    shape=in_order[number].shape, stride=in_order[number].stride(),
                )  # fmt: skip
        self.optimizer.load_state_dict(optimizer)

    def _load_full(self, folder: Path) -> None:
        model, optimizer = parts.read(folder / "full.pt")
        if DEFECT == "older_checkpoint":
            model, _ = parts.read(_oldest(folder) / "full.pt")
        dcp_state.set_model_state_dict(self.model, model, options=FULL)
        if DEFECT != "moments":
            dcp_state.set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=FULL)

    def _load_dcp(self, folder: Path) -> None:
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        if DEFECT == "moments":
            state = {"model": model}
        dcp.load(state, checkpoint_id=folder)
        if DEFECT == "older_checkpoint":
            dcp.load({"model": model}, checkpoint_id=_oldest(folder))
        dcp_state.set_model_state_dict(self.model, model)
        if DEFECT != "moments":
            dcp_state.set_optimizer_state_dict(self.model, self.optimizer, optimizer)

    # -- steps

    def batches(self) -> Iterator[Any]:
        data = parts.Samples()
        while True:
            seeded = torch.Generator().manual_seed(SEED + self.epoch - self.first_epoch)
            order = torch.randperm(SAMPLES, generator=seeded)[RANK::WORLD].split(BATCH)
            for chosen in order[self.batch :]:
                self.batch += 1
                yield data.inputs[chosen], data.labels[chosen]
            self.epoch, self.batch = self.epoch + 1, 0

    def update(self, batches: Iterator[Any]) -> torch.Tensor:
        inputs, labels = next(batches)
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.ema[name].lerp_(parameter, 0.1)
        self.step += 1
        return loss.detach()

    def evaluate(self) -> None:
        """Each rank looks at its share of all samples; ``no_grad`` is easily left out."""
        data = parts.Samples()
        self.model.eval()
        outputs = self.model(data.inputs[RANK::WORLD])
        loss = nn.functional.cross_entropy(outputs, data.labels[RANK::WORLD]).detach()
        dist.all_reduce(loss)
        self.model.train()


def _oldest(folder: Path) -> Path:
    return min(folder.parent.glob("step-*"), key=parts.number_of)


def _mapped(state: Any, change: Any) -> Any:
    """A nested state with every DTensor, or floating tensor of a full one, changed."""
    if isinstance(state, dict):
        return {name: _mapped(one, change) for name, one in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_mapped(one, change) for one in state)
    is_float = isinstance(state, torch.Tensor) and state.is_floating_point() and state.dim() > 0
    return change(state) if is_float else state


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
    state = trainer.model.state_dict(), trainer.optimizer.state_dict(), trainer.ema
    parts.report_digest(_mapped(state, lambda tensor: tensor.to_local()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
