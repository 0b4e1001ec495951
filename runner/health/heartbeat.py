"""The heartbeat of a rank: its step and phase, written by training and read by the watchdog."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

from runner.config.schema import WatchdogConfig

# Phases that may take long although all is well.
SLOW = frozenset({"start", "save", "evaluate", "explain", "roll back", "finish"})
_REMEMBERED_STEPS = 32


class Heartbeat:
    """Step, phase, and the time of the last change of either."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: tuple[int, str, float] = (0, "start", clock())
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)

    def begin_step(self, step: int) -> None:
        """Begin an attempted step. The time since the step before began counts as its duration."""
        now = self._clock()
        if self._step_began is not None:
            self._step_seconds.append(now - self._step_began)
        self._step_began = now
        self._now = (step, "fetch", now)

    def enter(self, phase: str, *, step: int | None = None) -> None:
        """Enter another phase of this or another step, which counts as progress."""
        self._now = (self._now[0] if step is None else step, phase, self._clock())

    @property
    def step(self) -> int:
        return self._now[0]

    @property
    def phase(self) -> str:
        return self._now[1]

    @property
    def seconds(self) -> float:
        """Seconds since the rank last moved."""
        return self._clock() - self._now[2]

    def step_durations(self) -> list[float]:
        """Seconds of the last steps, oldest first; each until the next step began."""
        return list(self._step_seconds)


# Decides whether a rank hangs, from how long its own steps took.


# A step that checkpoints, compiles anew or reads a slow disk takes several times the median.
_FACTOR = 20.0


def hang_limit(heart: Heartbeat, watchdog: WatchdogConfig) -> float:
    """How many seconds the present phase may take.

    That is 20 times the median of the last steps, and never less than ``floor_seconds``.
    Slow phases and the first steps, which compile, allocate and connect, have ``slow_seconds``.
    """
    durations = heart.step_durations()
    if heart.phase in SLOW or len(durations) < 2:
        return max(watchdog.slow_seconds, watchdog.floor_seconds)
    return max(watchdog.floor_seconds, _FACTOR * statistics.median(durations))


def hang_message(heart: Heartbeat, watchdog: WatchdogConfig) -> str | None:
    """A sentence that says since when a rank hangs; None if it does not hang."""
    limit, seconds = hang_limit(heart, watchdog), heart.seconds
    return f"no progress for {seconds:.1f} s (limit {limit:.1f} s)" if seconds > limit else None
