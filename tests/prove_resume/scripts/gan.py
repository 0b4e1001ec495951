"""Two networks, two optimizers: each iteration updates the critic, then the generator.

VARIANT critics: the critic three times, with the generator frozen meanwhile, which has BatchNorm.
"""

from __future__ import annotations

from typing import Any

import parts
import torch
from parts import BATCH, DEFECT, SEED, VARIANT
from torch import nn

DEFECTS = {"moments", "rng", "weights_bf16"}  # of the generator alone, but for the random state
VARIANTS = {"critics"}


class Gan:
    def __init__(self) -> None:
        parts.seed_everything(SEED)
        norm = [nn.BatchNorm1d(16)] if VARIANT == "critics" else []
        self.generator = nn.Sequential(nn.Linear(4, 16), *norm, nn.ReLU(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.of_critic = torch.optim.RMSprop(self.critic.parameters(), lr=1e-3)
        self.samples, self.step = parts.Samples().inputs, 0

    def state(self) -> dict[str, Any]:
        return {
            "generator": self.generator.state_dict(),
            "of_generator": self.of_generator.state_dict(),
            "critic": self.critic.state_dict(), "of_critic": self.of_critic.state_dict(),
            "step": self.step, "random": parts.random_state(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.generator.load_state_dict(parts.weights(state["generator"]))
        self.critic.load_state_dict(state["critic"])
        if DEFECT != "moments":
            self.of_generator.load_state_dict(state["of_generator"])
        self.of_critic.load_state_dict(state["of_critic"])
        self.step = state["step"]
        if DEFECT != "rng":
            parts.set_random_state(state["random"])

    def update(self) -> torch.Tensor:
        self.generator.requires_grad_(VARIANT != "critics")
        for _ in range(3 if VARIANT == "critics" else 1):
            real = self.samples[torch.randint(0, len(self.samples), (BATCH,))]
            made = self.generator(torch.randn(BATCH, 4))
            criticism = self.critic(made.detach()).mean() - self.critic(real).mean()
            self.of_critic.zero_grad()
            criticism.backward()
            self.of_critic.step()
        if VARIANT == "critics":
            self.generator.requires_grad_(True)
            made = self.generator(torch.randn(BATCH, 4))
        self.of_generator.zero_grad()
        loss = -self.critic(made).mean()
        loss.backward()
        self.of_generator.step()
        self.step += 1
        return loss.detach()


def main() -> None:
    arguments = parts.settings(defects=DEFECTS, variants=VARIANTS)
    gan = Gan()
    path = parts.newest(arguments.out, "gan-*.pt")
    if path is not None:
        gan.load(parts.read(path))
    while gan.step < arguments.steps:
        loss = gan.update()
        parts.report(gan.step, loss)
        if gan.step % arguments.save_every == 0:
            parts.write(gan.state(), arguments.out / f"gan-{gan.step}.pt")
    parts.report_digest({**gan.state(), "random": None})


if __name__ == "__main__":
    main()
