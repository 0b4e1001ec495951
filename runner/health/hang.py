"""Decides whether a rank hangs, from how long its own steps took."""

from __future__ import annotations

import statistics

from runner.config.schema import WatchdogConfig
from runner.health.heartbeat import SLOW, Heartbeat


def hang_limit(heart: Heartbeat, watchdog: WatchdogConfig) -> float:
    """How many seconds the present phase may take.

    That is ``factor`` times the median of the last steps, and never less than ``floor_seconds``.
    Slow phases and the first steps, which compile, allocate and connect, have ``slow_seconds``.
    """
    durations = heart.step_durations()
    if heart.phase in SLOW or len(durations) < 2:
        return max(watchdog.slow_seconds, watchdog.floor_seconds)
    return max(watchdog.floor_seconds, watchdog.factor * statistics.median(durations))


def is_moving(heart: Heartbeat, watchdog: WatchdogConfig) -> bool:
    """Whether the training thread is within its limit."""
    return heart.seconds <= hang_limit(heart, watchdog)


def hang_message(heart: Heartbeat, watchdog: WatchdogConfig) -> str | None:
    """A sentence that says since when a rank hangs; None if it does not hang."""
    limit, seconds = hang_limit(heart, watchdog), heart.seconds
    return f"no progress for {seconds:.1f} s (limit {limit:.1f} s)" if seconds > limit else None
