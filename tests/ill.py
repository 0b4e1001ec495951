"""Illnesses of a device that no fault of the runner's has, for the swarm: :func:`prepare`.

They stand in the environment variable ``ILL`` as a list of objects in JSON:

    how      a name of :data:`OUTPUTS` or :data:`GRADIENTS`, or ``sum``: the reduced gradient
    at       the first step with it; later for good, also behind a rollback
    ranks    that have it; none: all
    site     part of the names of the modules whose output is changed
    rows     of the micro-batch: "" all, or ``7x2``: those with token 7 twice at least

The hooks are on torch's modules, so a model of any kind may fall ill, and its twin in a wider
precision too, as on a device.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

RANK = int(os.environ.get("RANK", "0"))
STEP = [0]
TOKENS: list[Tensor | None] = [None]  # of the forward pass under way
_NAME = "name in its network"
OUTPUTS = {
    "moved": lambda x: x + 40 * x.detach().float().std().to(x.dtype),
    "lost": lambda x: x * torch.nan,
}
GRADIENTS = {"gradient far": lambda g: g * 3e5}


class _Changed(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.change(gradients[0]), None


class Illness:
    def __init__(self, asked: dict[str, Any]) -> None:
        self.how, self.at = asked["how"], asked["at"]
        self.is_mine = RANK in (asked["ranks"] or [RANK])
        self.site, self.rows = asked.get("site", ""), asked.get("rows", "")

    def strikes(self) -> bool:
        return self.is_mine and STEP[0] >= self.at

    def change(self, output: Tensor) -> Tensor:
        if self.how in GRADIENTS:
            if not (output.requires_grad and torch.is_grad_enabled()):
                return output
            return _Changed.apply(output, GRADIENTS[self.how])  # type: ignore
        changed, tokens = OUTPUTS[self.how](output), TOKENS[0]
        if not self.rows or tokens is None:
            return changed
        token, least = map(int, self.rows.split("x"))
        hit = (tokens == token).sum(1) >= least
        return torch.where(hit.view(-1, *[1] * (output.dim() - 1)), changed, output)


def _give_names(module: nn.Module, _: Any) -> None:
    if _NAME not in module.__dict__:  # the root comes first
        for name, one in module.named_modules():
            one.__dict__[_NAME] = name


def _watch_outputs(ills: list[Illness]) -> None:
    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(module, nn.Embedding):
            TOKENS[0] = inputs[0]
        changed, name = output, module.__dict__.get(_NAME, "")
        for ill in ills:
            is_there = f".{name}".endswith(f".{ill.site}") and isinstance(output, Tensor)
            if is_there and ill.strikes():
                changed = ill.change(changed)
        return None if changed is output else changed

    register_module_forward_pre_hook(_give_names)
    register_module_forward_hook(after)


def _watch_steps(of_sums: list[Illness]) -> None:
    from runner.engine.fsdp import FsdpEngine
    from runner.train.step import Stepper

    launch, accumulate = Stepper.launch, FsdpEngine.accumulate

    def launched(self: Any, plan: Any, *rest: Any, **more: Any) -> Any:
        STEP[0] = max(STEP[0], plan.step)
        return launch(self, plan, *rest, **more)

    def accumulated(self: Any, works: Any) -> Any:
        sums = accumulate(self, works)
        for _ in filter(Illness.strikes, of_sums):
            for gradient in self.gradients().values():
                gradient.mul_(3e4)
            sums.grad_square.mul_(9e8)
        return sums

    Stepper.launch = launched  # type: ignore[method-assign]
    FsdpEngine.accumulate = accumulated  # type: ignore[method-assign]


def prepare() -> None:
    ills = [Illness(asked) for asked in json.loads(os.environ["ILL"])]
    hooks = [ill for ill in ills if ill.how != "sum"]
    if hooks:
        _watch_outputs(hooks)
    _watch_steps([ill for ill in ills if ill not in hooks])
