"""The runner, or a script, with what a case does to its process: python program.py ARGUMENTS...

What is asked for stands in the environment variable SWARM as JSON:

    mark     a file that is made as the N-th phase of that name begins: ["evaluate", 1, FILE]
    slow     seconds that each forward pass takes from then on, so that a signal comes within it
    sick     ["noise", 12, [1]]: from step 12 on the device of rank 1 computes wrongly

The hooks are torch's public ones and the heartbeat's, so that the program stays what it is.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from runner.engine.fsdp import FsdpEngine
from runner.health.heartbeat import Heartbeat

_WRONG = 1e5


class _Watch:
    """Where the program is, by its heartbeat; what is slow or wrong from there on."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.step = 0
        self._seen: dict[str, int] = {}
        self._mark = asked.get("mark")
        self._slow = float(asked.get("slow", 0.0))
        self._is_slow = False
        self._until = 0.0

    def enter(self, phase: str) -> None:
        if self._mark is None:
            return
        wanted, number, file = self._mark
        self._is_slow = self._is_slow and phase == wanted
        self._seen[phase] = count = self._seen.get(phase, 0) + 1
        if phase == wanted and count == number:
            self._begin(file)

    def begin_step(self, step: int) -> None:
        self.step = max(self.step, step)  # also behind a rollback
        if self._mark is None:
            return
        wanted, number, file = self._mark
        if wanted == "step" and step == number:
            self._begin(file)
        elif wanted == "step" and number < step < number + 4:
            time.sleep(0.15)

    def _begin(self, file: str) -> None:
        self._is_slow = True
        Path(file).touch()
        time.sleep(0.15)

    def before_forward(self, module: nn.Module, _: object) -> None:
        if self._is_slow and isinstance(module, nn.Embedding):
            time.sleep(self._slow)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * _WRONG


def _spoil_sums(first: int, watch: _Watch) -> None:
    """The reduced gradient is too large, on all ranks alike: the link, not a device."""
    accumulate = FsdpEngine.accumulate

    def accumulated(self: FsdpEngine, works: Any) -> Any:
        sums = accumulate(self, works)
        if watch.step >= first:
            for gradient in self.gradients().values():
                gradient.mul_(_WRONG)
            sums.grad_square.mul_(_WRONG**2)
        return sums

    FsdpEngine.accumulate = accumulated  # type: ignore[method-assign]


def _sicken(how: str, first: int, watch: _Watch) -> None:
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))

    def after_forward(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(module, nn.Embedding) or watch.step < first:
            return None
        if how == "noise":
            noise = torch.randn(output.shape, generator=generator).to(output.dtype)
            return output + 300 * noise * output.detach().abs().mean()
        if how == "gradient":
            return _Times.apply(output)
        hit = inputs[0] == 7  # "pattern"
        return torch.where(hit[..., None], torch.nan, output)

    register_module_forward_hook(after_forward)


def prepare() -> None:
    """Do what the environment asks for."""
    asked = json.loads(os.environ.get("SWARM", "{}"))
    watch = _Watch(asked)
    enter, begin = Heartbeat.enter, Heartbeat.begin_step

    def entered(self: Heartbeat, phase: str, **more: Any) -> None:
        enter(self, phase, **more)
        watch.enter(phase)

    def begun(self: Heartbeat, step: int) -> None:
        begin(self, step)
        watch.begin_step(step)

    Heartbeat.enter, Heartbeat.begin_step = entered, begun  # type: ignore[method-assign]
    if asked.get("slow"):
        register_module_forward_pre_hook(watch.before_forward)  # type: ignore[arg-type]
    how, first, ranks = asked.get("sick", ("", 0, []))
    if how == "sum":
        _spoil_sums(first, watch)
    elif how and int(os.environ.get("RANK", "0")) in ranks:
        _sicken(how, first, watch)


if __name__ == "__main__":
    prepare()
    from runner.__main__ import run

    run()
