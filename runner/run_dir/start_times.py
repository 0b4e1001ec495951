"""Where the time of a start went, from the death before it to the first step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping

from runner.distributed.env import RESTART
from runner.system.process import started_at


class StartTimes:
    """What one rank notes while it starts.

    The phases, in their order. evidence: from the first sign of the end of the attempt before to
    its last process's end. decision: whether to start again, and the pause. processes: the
    launcher, up to this process. imports. rendezvous. opening: the lease, the data, what the run
    directory holds. model. state: loading it. What follows is in metrics.jsonl.

    Args:
        restart: when the attempt before showed its end (``noticed``), when the last of its
            processes had ended (``ended``), and when this one was started (``started``), in seconds
            since the epoch; empty without a supervisor or for its first attempt.
        is_first: of the attempt's starts. Of later ones, by torchrun, nobody told the times.
    """

    def __init__(self, restart: Mapping[str, float], *, is_first: bool = True) -> None:
        began = process_began()
        self.is_restart = bool(restart)  # by a supervisor, after an attempt of its own
        self._last = began
        self._seconds: dict[str, float] = {}
        if restart and is_first:
            self._last = restart["noticed"]
            self._mark("evidence", restart["ended"])
            self._mark("decision", restart["started"])
            self._mark("processes", began)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> StartTimes:
        """Of this process, as its supervisor tells."""
        is_first = environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        return cls(json.loads(environment.get(RESTART, "{}")), is_first=is_first)

    def mark(self, phase: str) -> None:
        """Note that ``phase`` has ended now."""
        self._mark(phase, time.time())

    def _mark(self, phase: str, now: float) -> None:
        self._seconds[phase] = round(max(0.0, now - self._last), 3)
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, of those that have ended."""
        return dict(self._seconds)


def process_began() -> float:
    """When this process was forked, in seconds since the epoch; the kernel counts in 10 ms."""
    ticks = started_at(os.getpid())
    if ticks is None:
        return time.time()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
