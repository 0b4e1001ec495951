"""What this rank is doing since when. Written by the training thread, read by the watchdog."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Phases that may take long without anything being wrong.
SLOW = frozenset({"start", "save", "evaluate", "explain", "roll back", "finish"})
_REMEMBERED_STEPS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class HangTimeouts:
    """Limits in seconds; see ``watchdog.*``."""

    floor_seconds: float
    factor: float
    slow_seconds: float


class Heartbeat:
    """Step, phase, and the time of the last change of either."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: tuple[int, str, float] = (0, "start", clock())
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)

    def begin_step(self, step: int) -> None:
        """An attempted step begins; what lay before it, from the last begin on, was one."""
        now = self._clock()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began = now
        self._now = (step, "fetch", now)

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """The rank is moving: it is about to do something else, for this step or another."""
        self._now = (self._now[0] if step is None else step, phase, self._clock())

    @property
    def step(self) -> int:
        return self._now[0]

    @property
    def phase(self) -> str:
        return self._now[1]

    @property
    def seconds(self) -> float:
        """Since the last sign of movement."""
        return self._clock() - self._now[2]

    def limit(self, patience: HangTimeouts) -> float:
        """How many seconds the present phase may take."""
        durations = list(self._step_seconds)
        # The first steps compile, allocate and connect.
        if self.phase in SLOW or len(durations) < 2:
            return max(patience.slow_seconds, patience.floor_seconds)
        return max(patience.floor_seconds, patience.factor * statistics.median(durations))
