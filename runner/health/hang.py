"""Decides whether a rank hangs, from how long its own steps took."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from runner.health.heartbeat import SLOW, Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class HangTimeouts:
    """Limits in seconds; see ``watchdog.*``."""

    floor_seconds: float
    factor: float
    slow_seconds: float


def hang_limit(heart: Heartbeat, timeouts: HangTimeouts) -> float:
    """How many seconds the present phase may take.

    That is ``factor`` times the median of the last steps, and never less than ``floor_seconds``.
    Slow phases and the first steps, which compile, allocate and connect, have ``slow_seconds``.
    """
    durations = heart.step_durations()
    if heart.phase in SLOW or len(durations) < 2:
        return max(timeouts.slow_seconds, timeouts.floor_seconds)
    return max(timeouts.floor_seconds, timeouts.factor * statistics.median(durations))


def is_moving(heart: Heartbeat, timeouts: HangTimeouts) -> bool:
    """Whether the training thread is within its limit."""
    return heart.seconds <= hang_limit(heart, timeouts)


def hang_message(heart: Heartbeat, timeouts: HangTimeouts) -> str | None:
    """A sentence that says since when a rank hangs; None if it does not hang."""
    limit, seconds = hang_limit(heart, timeouts), heart.seconds
    return f"no progress for {seconds:.1f} s (limit {limit:.1f} s)" if seconds > limit else None
