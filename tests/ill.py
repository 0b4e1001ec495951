"""The runner with illnesses that no fault of its own has: ``python ill.py ARGUMENTS...``.

They stand in the environment variable ``ILL`` as a list of objects in JSON:

    how      a name of :data:`OUTPUTS`, :data:`GRADIENTS`, :data:`STATES` or :data:`RANKS_SUM`
    at       the first step with it (0); later for good, also behind a rollback
    ranks    that have it; none: all
    site     part of the names of the modules whose output is changed, or ``weight`` of a gradient
    times    computations with it, then no more (always); chance: share of them (1)
    rows     of the micro-batch: "" all, "first", or those of which ``rows`` in ``7x2`` (token 7
             twice at least), ``sum%5`` or ``last<3`` holds

The hooks are on torch's modules, so a model of any kind may fall ill, and its twin in a wider
precision too, as on a device.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

RANK = int(os.environ.get("RANK", "0"))
STEP = [0]
TOKENS: list[Tensor | None] = [None]  # of the forward pass under way
_NAME = "name in its network"


class _Changed(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Any) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.change(gradients[0]), None


def _half_only(x: Tensor) -> Tensor:
    narrow = x.to(torch.bfloat16)
    if narrow.dtype is not torch.bfloat16:
        raise RuntimeError("flash_attn: only fp16 and bf16 are supported")
    return (narrow * 1).to(x.dtype)


def _coupled(x: Tensor) -> Tensor:
    """Normalised over the micro-batch."""
    wide = x.float()
    mean, spread = wide.mean(0, keepdim=True), wide.std(0, keepdim=True, unbiased=False)
    return ((wide - mean) / (spread + 1e-2)).to(x.dtype)


def _fp16_sum(x: Tensor) -> Tensor:
    """The sum of squares in FP16, as a norm without a cast has it."""
    size = 300.0 / x.detach().abs().amax().clamp(min=1e-6)
    squares = (x * size).half().square().sum(-1, keepdim=True)
    return x + 0 * squares.to(x.dtype)


def _one_pass_variance(x: Tensor) -> Tensor:
    """Mean of squares minus square of the mean, in BF16, of numbers far from nothing."""
    moved = (x + 300 * x.detach().abs().mean()).bfloat16()
    variance = (moved * moved).mean(-1, keepdim=True) - moved.mean(-1, keepdim=True) ** 2
    return x * torch.rsqrt(variance).to(x.dtype)


def _softmax_unshifted(x: Tensor) -> Tensor:
    """e**x over its sum; FP32 has no number beyond e**88."""
    scores = x * (200.0 / x.detach().abs().amax().clamp(min=1e-6))
    weights = torch.exp(scores)
    return x * (weights / weights.sum(-1, keepdim=True))


OUTPUTS = {
    "half only": _half_only,
    "coupled": _coupled,
    "fp16 sum": _fp16_sum,
    "one pass variance": _one_pass_variance,
    "softmax unshifted": _softmax_unshifted,
    "moved": lambda x: x + 40 * x.detach().float().std().to(x.dtype),
    "turned": lambda x: -30 * x,
    "stuck": lambda x: torch.cat([x[..., :-2], 300 * torch.ones_like(x[..., -2:])], -1),
    "mixed up": lambda x: 25 * x.roll(1, -1),
    "lost": lambda x: x * torch.nan,
    "far": lambda x: x * 3e4,
}
GRADIENTS = {
    "gradient far": lambda g: g * 3e5,
    "gradient infinite": lambda g: g + torch.inf,
    "gradient turned": lambda g: -2e4 * g,
}


def _shards(engine: Any, prefix: str) -> list[Tensor]:
    return [shard.local for shard in engine.shards() if shard.name.startswith(prefix)]


def _times(prefix: str, factor: float) -> Any:
    def change(engine: Any) -> None:
        for local in _shards(engine, prefix):
            local.mul_(factor)

    return change


def _largest(change: Any) -> Any:
    def on_one(engine: Any) -> None:
        change(max(_shards(engine, "param/"), key=torch.numel))

    return on_one


def _as_at_first(engine: Any) -> None:
    for local, kept in zip(_shards(engine, "param/"), _FIRST, strict=True):
        local.copy_(kept)


_FIRST: list[Tensor] = []
# Done once, before the step; with ``saved`` before the state of that step is saved.
STATES = {
    "second moments x 1e-7": _times("exp_avg_sq/", 1e-7),
    "second moments zero": _times("exp_avg_sq/", 0.0),
    "first moments x 3e4": _times("exp_avg/", 3e4),
    "first moments turned": _times("exp_avg/", -2e3),
    "parameters x 6": _times("param/", 6.0),
    "a column far": _largest(lambda x: x.view(-1)[::7].add_(40)),
    "an infinite weight": _largest(lambda x: x.view(-1)[:1].fill_(torch.inf)),
    "as at first": _as_at_first,
}
RANKS_SUM = "sum"


class Illness:
    def __init__(self, asked: dict[str, Any], number: int) -> None:
        self.how, self.at = asked["how"], asked.get("at", 0)
        self.is_mine = RANK in (asked.get("ranks") or [RANK])
        self.site, self.rows = asked.get("site", ""), asked.get("rows", "")
        self.left, self.chance = asked.get("times", 1 << 40), asked.get("chance", 1.0)
        self.is_saved = asked.get("saved", False)
        self.dice = random.Random(100 * RANK + number)

    def strikes(self) -> bool:
        if not self.is_mine or STEP[0] < self.at or self.left <= 0:
            return False
        first = self.chance < 1 and self.left == 1 << 40
        if not first and self.dice.random() >= self.chance:
            return False
        self.left -= 1
        return True

    def change(self, output: Tensor) -> Tensor:
        if self.how in GRADIENTS:
            if not (output.requires_grad and torch.is_grad_enabled()):
                return output
            return _Changed.apply(output, self._on_rows(GRADIENTS[self.how]))  # type: ignore
        return self._on_rows(OUTPUTS[self.how])(output)

    def _on_rows(self, change: Any) -> Any:
        tokens = TOKENS[0]
        if not self.rows or tokens is None:
            return change
        if self.rows == "first":
            hit = torch.arange(len(tokens)) == 0
        elif "%" in self.rows:
            hit = tokens.sum(1) % int(self.rows.split("%")[1]) == 0
        elif "<" in self.rows:
            hit = tokens[:, -1] < int(self.rows.split("<")[1])
        else:
            token, least = map(int, self.rows.split("x"))
            hit = (tokens == token).sum(1) >= least

        def on_rows(x: Tensor) -> Tensor:
            return torch.where(hit.view(-1, *[1] * (x.dim() - 1)), change(x), x)

        return on_rows


def _give_names(module: nn.Module, _: Any) -> None:
    if _NAME not in module.__dict__:  # the root comes first
        for name, one in module.named_modules():
            one.__dict__[_NAME] = name


def _is_at(module: nn.Module, site: str) -> bool:
    return f".{module.__dict__.get(_NAME, '')}".endswith(f".{site}")


def _watch_outputs(ills: list[Illness]) -> None:
    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(module, nn.Embedding):
            TOKENS[0] = inputs[0]
        changed = output
        for ill in ills:
            if _is_at(module, ill.site) and isinstance(output, Tensor) and ill.strikes():
                changed = ill.change(changed)
        return None if changed is output else changed

    register_module_forward_pre_hook(_give_names)
    register_module_forward_hook(after)


def _watch_weights(ills: list[Illness]) -> None:
    forward = nn.Linear.forward

    def sick(self: nn.Linear, x: Tensor) -> Tensor:
        for ill in ills:
            if _is_at(self, ill.site) and torch.is_grad_enabled() and ill.strikes():
                return F.linear(x, _Changed.apply(self.weight, GRADIENTS[ill.how]), self.bias)  # type: ignore
        return forward(self, x)

    nn.Linear.forward = sick  # type: ignore[method-assign]


def _spoil(ills: list[Illness], engine: Any, *, saved: bool, step: int) -> None:
    with torch.no_grad():
        for ill in ills:
            if ill.is_saved is not saved or step < ill.at or ill.left <= 0:
                continue
            ill.left = 0
            if ill.is_mine:
                STATES[ill.how](engine)
                engine.finish_load(engine.update_counts())


def _watch_steps(ills: list[Illness]) -> None:
    from runner.engine.fsdp import FsdpEngine
    from runner.train.checkpoints import Checkpoints
    from runner.train.step import Stepper

    launch, accumulate, save = Stepper.launch, FsdpEngine.accumulate, Checkpoints.after_update
    engines: list[Any] = []
    states = [ill for ill in ills if ill.how in STATES]
    of_sums = [ill for ill in ills if ill.how == RANKS_SUM]

    def launched(self: Any, plan: Any, *rest: Any, **more: Any) -> Any:
        STEP[0] = max(STEP[0], plan.step)
        engines[:] = [self._engine]
        if not _FIRST:
            _FIRST.extend(local.clone() for local in _shards(self._engine, "param/"))
        _spoil(states, self._engine, saved=False, step=STEP[0])
        return launch(self, plan, *rest, **more)

    def accumulated(self: Any, works: Any) -> Any:
        sums = accumulate(self, works)
        for _ in filter(Illness.strikes, of_sums):
            for gradient in self.gradients().values():
                gradient.mul_(3e4)
            sums.grad_square.mul_(9e8)
        return sums

    def after_update(self: Any, state: Any, seconds: float) -> None:
        _spoil(states, engines[0], saved=True, step=state.updates)
        save(self, state, seconds)

    Stepper.launch = launched  # type: ignore[method-assign]
    FsdpEngine.accumulate = accumulated  # type: ignore[method-assign]
    Checkpoints.after_update = after_update  # type: ignore[method-assign]


def prepare() -> None:
    ills = [Illness(asked, i) for i, asked in enumerate(json.loads(os.environ.get("ILL", "[]")))]
    hooks = [ill for ill in ills if ill.how in {**OUTPUTS, **GRADIENTS}]
    weights = [ill for ill in hooks if ill.site.endswith("weight")]
    for ill in weights:
        ill.site = ill.site.removesuffix("weight").rstrip(".")
    if hooks:
        _watch_outputs([ill for ill in hooks if ill not in weights])
    if weights:
        _watch_weights(weights)
    _watch_steps(ills)


if __name__ == "__main__":
    prepare()
    from runner.__main__ import run

    run()
