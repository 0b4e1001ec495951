"""Optimizers that keep more than moments in FP32, as others' packages have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class EightBit(torch.optim.Optimizer):
    """Momentum as uint8 with a scale for the whole tensor; factors of rows in FP64.

    Of vectors an FP32 moment alone: what is kept differs from parameter to parameter. The number of
    steps is a plain int.
    """

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group["lr"])

    def _update(self, p: Tensor, grad: Tensor, lr: float) -> None:
        state: dict[str, Any] = self.state[p]
        if p.dim() < 2:
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg"].lerp_(grad, 0.1)
            p.sub_(state["exp_avg"], alpha=lr)
            return
        if not state:
            state |= {
                "calls": 0,
                "codes": torch.full_like(p, 128, dtype=torch.uint8),
                "scale": torch.ones((), dtype=p.dtype, device=p.device),
                "rows": torch.zeros(len(p), 1, dtype=torch.float64, device=p.device),
            }
        state["calls"] += 1
        state["rows"].lerp_(grad.double().square().mean(dim=1, keepdim=True), 0.1)
        moment = (state["codes"].float() - 128) / 127 * state["scale"] * 0.9 + grad * 0.1
        state["scale"].copy_(moment.abs().max().clamp(min=1e-12))
        state["codes"].copy_((moment / state["scale"] * 127).round() + 128)
        share = 1 - 0.9 ** state["calls"]
        p.sub_(moment / ((state["rows"] / share).sqrt().float() + 1e-6), alpha=lr / share)


class ScheduleFree(torch.optim.Optimizer):
    """SGD with the average as the weights to evaluate (Defazio et al., arXiv 2405.15682).

    Numbers in ``param_groups``, a state that begins as the weights, weights swapped by ``eval``.
    """

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        defaults = {"lr": lr, "beta": beta, "k": 0, "weight_sum": 0.0, "is_training": False}
        super().__init__(params, defaults)

    def train(self) -> None:
        self._swap(training=True)

    def eval(self) -> None:
        self._swap(training=False)

    @torch.no_grad()
    def _swap(self, *, training: bool) -> None:
        for group in self.param_groups:
            if group["is_training"] is training:
                continue
            beta = group["beta"]
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], (1 - beta) if training else (1 - 1 / beta))
            group["is_training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            share = group["lr"] ** 2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.sub_(p.grad, alpha=group["lr"] * (1 - group["beta"] * (1 - share)))
                z.sub_(p.grad, alpha=group["lr"])
