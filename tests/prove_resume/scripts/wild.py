"""Loops of other kinds, one for each VARIANT: what people write who use no trainer.

nano      random windows of one array, the learning rate a function of the iteration
masters   a BF16 model whose FP32 weights only the optimizer has
adapter   a frozen base that is made anew at each start, and an adapter that is saved
queue     negatives in a buffer that the forward pass fills
closure   LBFGS, which asks for the loss several times a step
midway    checkpoints between two batches of one step, with the gradients so far
annealed  a dropout rate that the loop lowers
rehearsed the update is run once at each start, with a closed gate and a rate of 0
towers    an augmentation and two networks, called one after the other, once with zeros
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parts
import torch
from parts import BATCH, DEFECT, SEED, VARIANT
from torch import nn

DEFECTS = {
    "rng", "moments", "lr_reset", "options_lost", "masters_lost", "base_reseeded", "queue_lost",
    "gradients_lost", "dropout_rate_lost", "batchnorm",
}  # fmt: skip


class Nano:
    """The others change something of it."""

    def __init__(self) -> None:
        parts.seed_everything(SEED)
        self.step, self.steps_here = 0, 0
        self.samples = parts.Samples()
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()

    def make_model(self) -> nn.Module:
        return parts.Net(norm=nn.LayerNorm)

    def make_optimizer(self) -> torch.optim.Optimizer:
        weights = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": weights}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(0, parts.SAMPLES, (BATCH,))
        return self.samples.inputs[chosen], self.samples.labels[chosen]

    def loss(self) -> torch.Tensor:
        inputs, labels = self.batch()
        return nn.functional.cross_entropy(self.model(inputs), labels)

    def update(self) -> torch.Tensor:
        counted = self.steps_here if DEFECT == "lr_reset" else self.step
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * parts.warm_up_and_decay(counted)
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
            "step": self.step, "random": parts.random_state(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"], strict=DEFECT != "queue_lost")
        own = self.optimizer.param_groups
        optimizer = state["optimizer"]
        if DEFECT == "options_lost":  # those of the arguments, which have changed
            for group, new in zip(optimizer["param_groups"], own, strict=True):
                group.update(betas=(0.9, 0.999), weight_decay=new["weight_decay"])
        if DEFECT != "moments":
            self.optimizer.load_state_dict(optimizer)
        self.step = state["step"]
        if DEFECT != "rng":
            parts.set_random_state(state["random"])


class Masters(Nano):
    def make_model(self) -> nn.Module:
        model = super().make_model()
        self.masters = [p.detach().clone() for p in model.parameters()]
        return model.bfloat16()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.masters, lr=1e-2)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = super().batch()
        return inputs.bfloat16(), labels

    def update(self) -> torch.Tensor:
        loss = self.loss()
        loss.backward()
        pairs = list(zip(self.masters, self.model.parameters(), strict=True))
        for master, parameter in pairs:
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in pairs:
                parameter.copy_(master)
        return loss.detach().float()

    def state(self) -> dict[str, Any]:
        return super().state() | {"masters": self.masters}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        is_lost = DEFECT == "masters_lost"
        saved = list(self.model.parameters()) if is_lost else state["masters"]
        with torch.no_grad():
            for master, tensor in zip(self.masters, saved, strict=True):
                master.copy_(tensor)


class Adapter(Nano):
    def make_model(self) -> nn.Module:
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.adapter = super().make_model()
        return nn.Sequential(self.base, self.adapter)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.adapter.parameters(), lr=1e-2, momentum=0.9)

    def state(self) -> dict[str, Any]:
        return super().state() | {"model": self.adapter.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        whole = {f"1.{name}": tensor for name, tensor in state["model"].items()}
        super().load(state | {"model": self.model.state_dict() | whole})
        if DEFECT == "base_reseeded":
            seeded = torch.Generator().manual_seed(self.step)
            self.base.weight.normal_(0, 0.3, generator=seeded)


class WithQueue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = parts.Net(norm=nn.LayerNorm)
        self.register_buffer("queue", torch.zeros(16, 8), persistent=DEFECT != "queue_lost")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.queue.copy_(torch.cat([inputs, self.queue[: -len(inputs)]]))
        return self.net(inputs) - self.net(self.queue).mean(0)


class Queue(Nano):
    def make_model(self) -> nn.Module:
        return WithQueue()


class Closure(Nano):
    def make_model(self) -> nn.Module:
        return parts.Net(norm=nn.LayerNorm, dropout=0.0)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def update(self) -> torch.Tensor:
        inputs, labels = self.batch()

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            loss.backward()
            return loss

        loss: Any = self.optimizer.step(closure)
        return loss.detach()


class Midway(Nano):
    """Its checkpoint is made after the first of the next step's two batches."""

    begun = False

    def begin_step(self) -> None:
        (self.loss() / 2).backward()
        self.begun = True

    def update(self) -> torch.Tensor:
        if not self.begun:
            self.begin_step()
        loss = self.loss() / 2
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.begun = False
        return loss.detach()

    def state(self) -> dict[str, Any]:
        self.begin_step()
        gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
        return super().state() | {"gradients": gradients}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.begun = True
        if DEFECT != "gradients_lost":
            for parameter, saved in zip(self.model.parameters(), state["gradients"], strict=True):
                parameter.grad = saved


class Annealed(Nano):
    rate = 0.5

    def update(self) -> torch.Tensor:
        self.rate *= 0.95
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = self.rate
        return super().update()

    def state(self) -> dict[str, Any]:
        return super().state() | {"rate": self.rate}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        if DEFECT != "dropout_rate_lost":
            self.rate = state["rate"]


class Rehearsed(Nano):
    def rehearse(self) -> None:
        """Two steps of which nothing remains: does the machine repeat its bits?"""
        before = parts.random_state()
        optimizer: Any = self.optimizer
        optimizer.found_inf = torch.tensor(1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(2):
            self.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
        del optimizer.found_inf
        parts.set_random_state(before)

    def update(self) -> torch.Tensor:
        if not self.steps_here:
            self.rehearse()
        return super().update()


class Jitter(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + 0.1 * torch.randn_like(inputs)


class Towers(Nano):
    def make_model(self) -> nn.Module:
        encoder = parts.Net(norm=nn.LayerNorm)
        head = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.jitter = Jitter()
        assert encoder(torch.zeros(1, 8)).shape == (1, 4)
        return nn.ModuleList([encoder, head])

    def loss(self) -> torch.Tensor:
        inputs, labels = self.batch()
        encoder, head = self.model
        return nn.functional.cross_entropy(head(encoder(self.jitter(inputs))), labels)

    def load(self, state: dict[str, Any]) -> None:
        if DEFECT == "batchnorm":
            fresh = {n: t for n, t in self.model.state_dict().items() if "running" in n}
            state = state | {"model": state["model"] | fresh}
        super().load(state)


VARIANTS: dict[str, type[Nano]] = {
    "nano": Nano, "masters": Masters, "adapter": Adapter, "queue": Queue, "closure": Closure,
    "midway": Midway, "annealed": Annealed, "towers": Towers, "rehearsed": Rehearsed,
}  # fmt: skip


def main() -> None:
    arguments = parts.settings(defects=DEFECTS, variants=VARIANTS)
    out: Path = arguments.out
    training = VARIANTS[VARIANT or "nano"]()
    path = parts.newest(out, "ckpt-*.pt")
    if path is not None:
        training.load(parts.read(path))
    while training.step < arguments.steps:
        loss = training.update()
        training.step += 1
        training.steps_here += 1
        parts.report(training.step, loss)
        if training.step % arguments.save_every == 0 and training.step < arguments.steps:
            parts.write(training.state(), out / f"ckpt-{training.step}.pt")
    kept = training.model.state_dict(), training.optimizer.state_dict()
    parts.report_digest(*kept, getattr(training, "masters", None), getattr(training, "rate", None))


if __name__ == "__main__":
    main()
