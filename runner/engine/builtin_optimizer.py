"""The built-in optimizers, torch's fused ones and our own, and the gate that they share.

All read ``found_inf`` and ``grad_scale``, FP32 scalars: the step changes nothing where the former
is 1.

One more of them: its word in :class:`runner.config.schema.OptimKind`, its state and what makes it
here, a preset in ``configs/optim``; then ``scripts/docs.py``, and a row in docs/optimizers.md. One
that a package has, and that the host may gate, is a preset with ``_target_`` alone, as
``configs/optim/adafactor.yaml`` is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from runner.config.schema import OptimConfig, OptimKind


def state_kinds(optim: OptimConfig, name: str, num_dims: int) -> tuple[str, ...]:
    """Kinds of state that ``optim.kind`` keeps for a parameter: FP32 in its shape, in order."""
    if optim.kind is OptimKind.muon and is_hidden_matrix(name, num_dims):
        return ("momentum_buffer",)
    if optim.kind is OptimKind.sgd:
        return ("momentum_buffer",) if optim.momentum else ()
    return ("exp_avg",) if optim.kind is OptimKind.lion else ("exp_avg", "exp_avg_sq")


def make_optimizer(optim: OptimConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that ``optim.kind`` names, but for the matrices that Muon takes."""
    if optim.kind is OptimKind.sgd:
        return torch.optim.SGD(groups, momentum=optim.momentum, fused=True)
    betas = (optim.beta1, optim.beta2)
    if optim.kind is OptimKind.lion:
        return Lion(groups, betas=betas)
    return torch.optim.AdamW(groups, betas=betas, eps=optim.eps, fused=True)


def counts_updates(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it keeps a number ``step`` for each parameter, beside its kinds of state."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


def opened(new: Tensor, old: Tensor, skip: Tensor) -> Tensor:
    """Return ``new``, or ``old`` bit for bit if ``skip`` is 1, even where ``new`` is not finite."""
    return torch.where(skip > 0, old, new)


@contextmanager
def restored(shards: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the shards their values again afterwards: computing them back would round."""
    values = [(shard, shard.detach().clone()) for shard in shards.values()]
    try:
        yield
    finally:
        for shard, value in values:
            shard.detach().copy_(value)


class Lion(torch.optim.Optimizer):
    """The sign of a mixture of gradient and momentum, with decoupled weight decay.

    Chen et al., arXiv 2302.06675.
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


def set_gate(
    optimizer: torch.optim.Optimizer, *, skip: torch.Tensor, grad_scale: torch.Tensor
) -> None:
    """Have the next step divide gradients by ``grad_scale``, or change nothing if ``skip`` is 1.

    These are the hooks of torch.amp.GradScaler, which only the fused kernels honour: parameters,
    moments and step counts stay bit-identical. Multiplying by zero would not do: 0 * NaN is NaN.
    """
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]


# (name, this rank's rows) -> the whole matrix, and where this rank's rows begin. Collective.
Whole = Callable[[str, Tensor], tuple[Tensor, int]]

# Coefficients of x -> a x + b x^3 + c x^5, which moves singular values toward 1 (Jordan et al.).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_LIKE_ADAMW = 0.2
_IN_A_NUMBERED_LAYER = re.compile(r"(?:^|\.)\d+\.")


def is_hidden_matrix(name: str, num_dims: int) -> bool:
    """Whether Muon applies: a matrix in a numbered layer, not an embedding or a head."""
    return num_dims == 2 and _IN_A_NUMBERED_LAYER.search(name) is not None


def orthogonalised(matrix: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrix: singular values between 0.7 and 1.2."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / (torch.linalg.matrix_norm(wide) + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x if wide is matrix else x.T


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay, for sharded matrices.

    Jordan et al. 2024, kellerjordan.github.io/posts/muon. The whole matrix is orthogonalised: each
    rank gathers it and keeps its own rows, so that the result does not depend on the number of
    ranks. The update is scaled to AdamW's (Liu et al., arXiv 2502.16982, section 2.2), so that
    AdamW's learning rate and decay fit.

    Groups have ``names`` beside ``params``. :meth:`step` is collective.
    """

    _step_supports_amp_scaling = True
    found_inf: Tensor
    grad_scale: Tensor

    def __init__(self, params: list[dict[str, Any]], *, momentum: float, whole: Whole) -> None:
        super().__init__(params, {"momentum": momentum, "weight_decay": 0.0})
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all groups; state ``momentum_buffer`` must exist."""
        for group in self.param_groups:
            for name, shard in zip(group["names"], group["params"], strict=True):
                # A rank without rows takes part as well, because the gather is collective.
                grad = torch.zeros_like(shard) if shard.grad is None else shard.grad
                self._update(name, shard, grad / self.grad_scale, group)

    def _update(self, name: str, shard: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        share = group["momentum"]
        buffer = self.state[shard]["momentum_buffer"]
        follow = buffer * share + grad * (1 - share)
        whole, first = self._whole(name, grad * (1 - share) + follow * share)
        # Twice as fast in a GPU's matrix units, and enough (Jordan et al.); a CPU gains nothing.
        dtype = torch.bfloat16 if shard.is_cuda else torch.float32
        turned = orthogonalised(whole.to(dtype))[first : first + len(shard)].to(shard.dtype)
        size = _LIKE_ADAMW * max(whole.shape) ** 0.5
        rate = group["lr"]
        new = shard * (1 - rate * group["weight_decay"]) - turned * (rate * size)
        shard.copy_(opened(new, shard, self.found_inf))
        buffer.copy_(opened(follow, buffer, self.found_inf))
