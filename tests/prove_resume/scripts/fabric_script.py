"""Lightning's Fabric: setup, save, load; the loop is the user's."""

from __future__ import annotations

from typing import Any

import parts
import torch
from lightning.fabric import Fabric
from parts import BATCH, DEFECT, SAMPLES, SEED, WORLD
from torch import nn
from torch.utils.data import DataLoader

DEFECTS = {"moments", "rng", "sampler_restarted", "lr_reset"}


class Loop:
    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        fabric.seed_everything(SEED, verbose=False)
        net = parts.Net(norm=nn.LayerNorm)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, parts.warm_up_and_decay)
        self.model, self.optimizer = fabric.setup(net, optimizer)
        self.step = 0
        fabric.seed_everything(SEED + fabric.global_rank, verbose=False)

    def saved(self) -> dict[str, Any]:
        """What save writes, and load puts in place."""
        state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        if DEFECT == "moments":
            del state["optimizer"]
        if DEFECT == "lr_reset":
            del state["schedule"]
        return {**state, "step": self.step, "random": self.fabric.all_gather(torch.get_rng_state())}

    def load(self, path: Any) -> None:
        state = self.saved()
        self.fabric.load(path, state, weights_only=False)
        self.step = state["step"]
        if DEFECT != "rng":
            states = state["random"].view(WORLD, -1)
            torch.set_rng_state(states[self.fabric.global_rank].clone())

    def train(self, out: Any, steps: int, every: int) -> None:
        first = 0 if DEFECT == "sampler_restarted" else self.step
        while self.step < steps:
            epoch, done = divmod(first, SAMPLES // BATCH // WORLD)
            seeded = torch.Generator().manual_seed(SEED + epoch)
            order = torch.randperm(SAMPLES, generator=seeded).tolist()[
                self.fabric.global_rank :: WORLD
            ]
            loader = DataLoader(
                parts.Samples(), BATCH, sampler=order[done * BATCH :], generator=seeded
            )
            for inputs, labels in loader:
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.fabric.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                self.step, first = self.step + 1, first + 1
                parts.report(self.step, loss)
                if self.step % every == 0:
                    partial = out / f"partial-{self.step}"
                    self.fabric.save(partial, self.saved())
                    if self.fabric.is_global_zero:
                        partial.rename(out / f"step-{self.step}.ckpt")
                    self.fabric.barrier()
                if self.step == steps:
                    return


def main() -> None:
    arguments = parts.settings(defects=DEFECTS)
    fabric = Fabric(accelerator="cpu", devices=WORLD, strategy="ddp" if WORLD > 1 else "auto")
    fabric.launch()
    path = parts.newest(arguments.out, "step-*.ckpt")
    loop = Loop(fabric)
    if path is not None:
        loop.load(path)
    loop.train(arguments.out, arguments.steps, arguments.save_every)
    parts.report_digest(loop.model.state_dict(), loop.optimizer.state_dict()["state"])


if __name__ == "__main__":
    main()
