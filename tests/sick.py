"""A model that falls ill on some ranks from a step on, in ways that no fault of ours has.

Unlike a fault, the illness stays when the step is computed again, with other samples or other
weights: it is the device's, or the operation's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from runner.distributed.observers import Observers
from runner.engine.fsdp import FsdpEngine
from runner.explain.repeated_steps import RateProbe, RepeatedSteps
from runner.system.error import CheckpointError
from runner.train.step import Stepper

_IS_FIRST_START = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
_PATTERN = 7  # a token that one in eighty samples of the synthetic language has three times


class _Now:
    """The step that is computed, known to no module otherwise."""

    step = 0
    bad = frozenset[int]()
    how = ""
    since = 1 << 40
    observer = ""  # what looks at it now

    @classmethod
    def is_sick(cls, how: str) -> bool:
        rank = int(os.environ.get("RANK", "0"))
        return how == cls.how and cls.step >= cls.since and (not cls.bad or rank in cls.bad)


def level(updates: int) -> float:
    """A schedule that does not depend on the number of steps."""
    return 3e-3 * min(1.0, (updates + 1) / 5)


def bump(updates: int) -> float:
    """A schedule that is far too high for two updates."""
    return level(updates) * (300 if updates in (24, 25) else 1)


def _watch_steps() -> None:
    launch, accumulate, together = Stepper.launch, FsdpEngine.accumulate, Observers.together

    def launched(self: Any, plan: Any, ledger: Any, **more: Any) -> Any:
        if _Now.how == "in begin" and _Now.step < plan.step == _Now.since and _IS_FIRST_START:
            for shard in self._engine.shards():
                shard.local.mul_(50 if shard.name.startswith("param/") else 1)
        _Now.step = max(_Now.step, plan.step)  # for good, also after a rollback
        return launch(self, plan, ledger, **more)

    def accumulated(self: Any, works: Any) -> Any:
        sums = accumulate(self, works)
        if _Now.is_sick("sum"):  # the reduced gradient, on all ranks alike
            for gradient in self.gradients().values():
                gradient.mul_(1e5)
            sums.grad_square.mul_(1e10)
        return sums

    def observed(self: Any, name: str, *arguments: Any, **more: Any) -> Any:
        _Now.observer = name
        result = together(self, name, *arguments, **more)
        _Now.observer = ""
        return result

    def begun(self: Any, *arguments: Any, **more: Any) -> Any:
        _Now.observer = "begin"
        return begin(self, *arguments, **more)

    begin = RepeatedSteps.begin
    setattr(RepeatedSteps, "begin", begun)  # noqa: B010
    setattr(Observers, "together", observed)  # noqa: B010
    setattr(Stepper, "launch", launched)  # noqa: B010
    setattr(FsdpEngine, "accumulate", accumulated)  # noqa: B010


_watch_steps()


def _spoil_and_tear() -> None:
    """What the moments of step 30 and probe G meet."""

    def applied(self: Any, **more: Any) -> Any:
        result = apply(self, **more)
        if _Now.step == 30 and os.environ.get("SICK_MOMENTS") and not more["skip"]:
            for shard in self.shards():
                shard.local.mul_(1e-8 if shard.name.startswith("exp_avg_sq/") else 1)
        return result

    def cured(self: Any, *arguments: Any) -> Any:
        result = is_cured(self, *arguments)  # it loads a checkpoint, and trains
        if _Now.how == "torn":
            raise CheckpointError("it was damaged meanwhile")
        return result

    apply, is_cured = FsdpEngine.apply, RateProbe._is_cured
    setattr(FsdpEngine, "apply", applied)  # noqa: B010
    setattr(RateProbe, "_is_cured", cured)  # noqa: B010


_spoil_and_tear()


class _Times(torch.autograd.Function):
    """The identity, whose gradient is too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 1e5


def _times(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Times.apply(x)  # type: ignore[no-untyped-call]
    return result


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, hidden)
        self.tap = nn.Identity()
        self.dice = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _Now.observer and _Now.is_sick(f"in {_Now.observer}"):
            raise RuntimeError("no probes on this device")
        weight = self.up.weight
        if torch.is_grad_enabled():
            if _Now.is_sick("weight"):
                weight = _times(weight)
            if _Now.is_sick("at times") and self.dice.random() < 0.3:
                x = _times(x)
        return self.tap(x + torch.tanh(F.linear(x, weight, self.up.bias)))


class Net(nn.Module):
    """
    Args:
        how: the illness; ``bad``: the sick ranks, empty for all; ``since``: its first step.
    """

    def __init__(
        self,
        vocab_size: int,
        how: str = "",
        bad: Sequence[int] = (),
        since: int = 33,
        hidden: int = 32,
    ) -> None:
        super().__init__()
        _Now.how, _Now.bad, _Now.since = how, frozenset(bad), since
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(2))
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        if _Now.how == "statistic":  # of all samples that a micro-batch has
            x = x - x.mean((0, 1))
        if _Now.is_sick("noise"):
            x = x + 30 * torch.randn_like(x) * x.detach().abs().mean()
        if _Now.is_sick("pattern"):
            rare = (input_ids == _PATTERN).sum(1) >= 3
            x = torch.where(rare[:, None, None], torch.nan, x)
        if _Now.how == "half":  # a kernel for half precisions only, as FlashAttention's
            x = x.to(torch.bfloat16)
            if x.dtype not in (torch.float16, torch.bfloat16):
                raise RuntimeError("only fp16 and bf16 are supported")
            x = x.to(self.head.weight.dtype)
        result: torch.Tensor = self.head(F.layer_norm(x, x.shape[-1:]))
        return result


class Scaled(Net):
    """Its losses are in another unit than nats."""

    def losses(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = self(batch["input_ids"]), batch["labels"]
        losses = 100 * F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return losses.sum(1), (labels != -100).sum(1)
