"""The runner, or a script, with what a case does to its process: python program.py ARGUMENTS...

What is asked for stands in the environment variable SWARM as JSON:

    mark     a file that is made as the N-th phase of that name begins: ["evaluate", 1, FILE]
    advice   the step at which a file appears that says the machine may go: [12, FILE]
    slow     seconds that each forward pass takes from then on, so that a signal comes within it

A device that computes wrongly stands in ILL, see tests/ill.py.
The hooks are torch's public ones, the heartbeat's and where tokens are made, so that the program
stays what it is.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from runner.data import text
from runner.health import notice
from runner.health.heartbeat import Heartbeat
from runner.system.files import write_json
from tests import ill


class _Watch:
    """Where the program is, by its heartbeat; what is slow or wrong from there on."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._seen: dict[str, int] = {}
        self._mark = asked.get("mark")
        self._slow = float(asked.get("slow", 0.0))
        self._is_slow = False
        self._advice = asked.get("advice", (0, ""))

    def enter(self, phase: str) -> None:
        if self._mark is None:
            return
        wanted, number, file = self._mark
        self._is_slow = self._is_slow and phase == wanted
        self._seen[phase] = count = self._seen.get(phase, 0) + 1
        if phase == wanted and count == number:
            self._begin(file)

    def begin_step(self, step: int) -> None:
        if step == self._advice[0] and os.environ.get("RANK", "0") == "0":
            write_json(Path(self._advice[1]), {"reason": "may go", "advice": True})
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

    build = text._build

    def built(*arguments: Any) -> None:
        watch.enter("tokenise")
        build(*arguments)

    # A tiny run is over before the first of them.
    notice._EVERY_SECONDS, notice._AGAIN_SECONDS = 0.05, 0.02
    Heartbeat.enter, Heartbeat.begin_step = entered, begun  # type: ignore[method-assign]
    text._build = built
    if asked.get("slow"):
        register_module_forward_pre_hook(watch.before_forward)  # type: ignore[arg-type]
    if "ILL" in os.environ:
        ill.prepare()


if __name__ == "__main__":
    prepare()
    from runner.__main__ import run

    run()
