"""Lion (Chen et al., arXiv 2302.06675) with a gate on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def opened(new: Tensor, old: Tensor, skip: Tensor) -> Tensor:
    """Return ``new``, or ``old`` bit for bit if ``skip`` is 1, even where ``new`` is not finite."""
    return torch.where(skip > 0, old, new)


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of gradient and momentum, with decoupled weight decay.

    Reads ``found_inf`` and ``grad_scale``, FP32 scalars, as torch's fused optimizers do.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor
    grad_scale: Tensor

    def __init__(
        self, params: list[dict[str, Any]], *, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(params, {"betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Equation 1 of the paper; state ``exp_avg`` must exist."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rate, decay = group["lr"], group["weight_decay"]
            for shard in group["params"]:
                if shard.grad is None:
                    continue
                grad = shard.grad / self.grad_scale
                momentum = self.state[shard]["exp_avg"]
                update = torch.sign(momentum * beta1 + grad * (1 - beta1)) + shard * decay
                shard.copy_(opened(shard - update * rate, shard, self.found_inf))
                follow = momentum * beta2 + grad * (1 - beta2)
                momentum.copy_(opened(follow, momentum, self.found_inf))
