"""``python -m runner`` that signals itself in the midst of a phase, for tests/drills/test_stop.py.

``STOPPED_IN`` is "MODULE:CLASS.METHOD CALL BATCH": at the start of that micro-batch (from 1 on; 0:
at once) inside that call of the method, the ranks of ``STOPPED_RANKS`` get ``STOPPED_SIGNAL``; a
path is a notice: the file is made, and the rank waits until it was read. ``STOPPED_LOG`` then gets
a line for each further micro-batch of a rank.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.__main__ import run
from runner.engine.forward import Forward


class Phase:
    """One call of a method, in which this rank may be asked to stop."""

    def __init__(self, enter: Callable[..., Any], call: int, batch: int) -> None:
        self._enter = enter
        self._compute = Forward._sums
        self._call = call
        self._batch = batch
        self._calls = self._batches = 0
        self._is_inside = self._is_over = False

    def entered(self, *arguments: Any, **more: Any) -> Any:
        self._calls += 1
        self._is_inside = self._calls == self._call
        if self._is_inside and not self._batch:
            self._stop()
        try:
            return self._enter(*arguments, **more)
        finally:
            self._is_inside = False

    def computed(self, *arguments: Any) -> Any:
        if self._is_over:
            with Path(os.environ["STOPPED_LOG"]).open("a") as file:
                file.write(f"rank {os.environ['RANK']}\n")
        elif self._is_inside:
            self._batches += 1
            if self._batches == self._batch:
                self._stop()
        return self._compute(*arguments)

    def _stop(self) -> None:
        self._is_over = True
        if os.environ["RANK"] in os.environ["STOPPED_RANKS"].split(","):
            asked = os.environ["STOPPED_SIGNAL"]
            if asked.isdecimal():
                os.kill(os.getpid(), int(asked))
                return
            Path(asked).touch()
            while any(thread.name == "notices" for thread in threading.enumerate()):
                time.sleep(0.01)


place, call, batch = os.environ["STOPPED_IN"].split()
module, _, name = place.partition(":")
owner, _, method = name.partition(".")
kind = getattr(importlib.import_module(module), owner)
phase = Phase(getattr(kind, method), int(call), int(batch))
# Functions, not methods: they are given the object.
setattr(kind, method, lambda *arguments, **more: phase.entered(*arguments, **more))
Forward._sums = lambda *arguments: phase.computed(*arguments)  # type: ignore[method-assign]
run()
