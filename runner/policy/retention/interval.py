"""Computes the number of steps between checkpoints from measured costs.

On disk with ``checkpoint.every=auto``; in memory if ``checkpoint.memory_every`` is not set.

The disk's formula is :func:`availability_interval`. The run measures its inputs. Its failure rate
is seldom known early, so a prior rate counts as one failure.

Saxena 2024: N. R. Saxena et al., Optimal Checkpoint Interval with Availability as an Objective
Function, arXiv 2410.18124.
Llama 3 2024: The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

FIRST_PROBATIONS = 2  # times clean_after: short at first, to measure the costs soon
_LEAST_SAVES = 2  # saves measured before the interval changes
_CALM = 1.25  # keep the interval while the best one is within this factor
_REMEMBERED_SAVES = 8
_REMEMBERED_STEPS = 256
MOST_SNAPSHOT_STEPS = 100  # between snapshots in memory
_SNAPSHOT_SHARE = 0.005  # of training's time, at most, for snapshots in memory
_OWN_HOURS = 24.0  # for one machine: people and queues end a job more often than hardware does


# Llama 3 2024: unexpected interruptions of the 405B pre-training on 16,384 H100 in 54 days. 98 of
# them leave each node's memory: 54 software bugs, 35 of switches or cables, 7 NCCL time-outs, 2
# dependencies (our reading, not the paper's).
LLAMA3_NODES = 2048
LLAMA3_FAILURES, LLAMA3_IN_MEMORY = 419, 98
NODE_MTBF_HOURS = 54 * 24 * LLAMA3_NODES / LLAMA3_FAILURES


def availability_interval(
    save_seconds: float, mtbf_seconds: float, restart_seconds: float, detect_seconds: float = 0.0
) -> float:
    """Optimal time from the start of a save to the start of the next, in seconds (Saxena 2024).

    Tc = Ts + sqrt(2 (Tf + Tr) Ts + Ts^2), and not less than the detection latency Te: a
    checkpoint made between a fault and its detection is useless.
    """
    root = 2 * (mtbf_seconds + restart_seconds) * save_seconds + save_seconds**2
    return max(save_seconds + math.sqrt(root), detect_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalRules:
    """``clean_after`` and ``most`` in steps; ``prior_seconds`` between failures of the job."""

    clean_after: int
    most: int
    prior_seconds: float

    @property
    def first(self) -> int:
        """The first interval, in steps."""
        return self.bounded(FIRST_PROBATIONS * self.clean_after)

    def bounded(self, steps: int) -> int:
        """Bound an interval by ``clean_after`` and ``most``."""
        return max(self.clean_after, min(self.most, steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """One rank's numbers, in seconds.

    Args:
        step: duration of a step while no checkpoint is being written.
        blocked: time that one save blocks training.
        slowed: slowdown of all steps while it is written.
        write: from a save to the end of its background work.
        restart: from the last sign of life to the first new step.
        failures: number of crashes and rollbacks.
        up: uptime of the run over all starts.
    """

    step: float
    blocked: float
    slowed: float
    write: float
    restart: float
    failures: int
    up: float

    @property
    def save(self) -> float:
        """Seconds that a save costs training."""
        return self.blocked + self.slowed

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def prior_seconds(num_nodes: int) -> float:
    """Prior seconds between failures, from the job's size."""
    return 3600 * min(_OWN_HOURS, NODE_MTBF_HOURS / num_nodes)


def mtbf_seconds(measured: MeasuredCosts, rules: IntervalRules) -> float:
    """Posterior mean under a gamma prior worth one failure in ``prior_seconds``."""
    return (rules.prior_seconds + measured.up) / (1 + measured.failures)


def best_steps(measured: MeasuredCosts, rules: IntervalRules) -> int:
    """Optimal steps between checkpoints, in two digits, within the bounds.

    At least the write time and the probation: a checkpoint before that could not serve a rollback.
    """
    detect = max(rules.clean_after * measured.step, measured.write)
    seconds = availability_interval(
        measured.save, mtbf_seconds(measured, rules), measured.restart, detect
    )
    work = max(0.0, seconds - measured.blocked) / max(measured.step, 1e-9)
    steps = math.ceil(work) if work < 10 else _two_digits(work)
    return rules.bounded(steps)


def _two_digits(number: float) -> int:
    unit = int(10 ** (math.floor(math.log10(number)) - 1))
    return round(number / unit) * unit


def next_steps(current: int, measured: MeasuredCosts, rules: IntervalRules) -> int:
    """The next interval: ``current``, unless the best one is far from it."""
    best = best_steps(measured, rules)
    is_near = current / _CALM <= best <= current * _CALM
    return current if is_near and current == rules.bounded(current) else best


def why(was: int, steps: int, measured: MeasuredCosts, rules: IntervalRules) -> str:
    """Explain the interval in one sentence."""
    hours = mtbf_seconds(measured, rules) / 3600
    return (
        f"a save costs {measured.save:.3g} s ({measured.blocked:.3g} of it blocking) and is "
        f"written in {measured.write:.3g} s, a step takes {measured.step:.3g} s, a failure occurs "
        f"every {hours:.3g} h ({measured.failures} seen in {measured.up / 3600:.3g} h, "
        f"{rules.prior_seconds / 3600:.3g} h expected), a restart takes {measured.restart:.3g} s: "
        f"{steps} steps cost least; before: {was}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRules:
    """Steps between snapshots in memory: ``first``, or a multiple of it up to ``most``."""

    first: int
    most: int

    def bounded(self, steps: int) -> int:
        """Round to a multiple of ``first`` between ``first`` and ``most``."""
        return max(self.first, min(steps, self.most) // self.first * self.first)


def snapshot_steps(current: int, measured: MeasuredCosts, rules: SnapshotRules) -> int:
    """The fewest steps between snapshots at which they cost little.

    Keeps ``current`` if it is close. Ignores recomputation after rollbacks, which are rare.
    """
    steps = math.ceil(measured.save / (_SNAPSHOT_SHARE * max(measured.step, 1e-9)))
    best = rules.bounded(-(-steps // rules.first) * rules.first)
    return current if current / _CALM <= best <= current * _CALM else best


def why_snapshots(was: int, measured: MeasuredCosts) -> str:
    """Explain the snapshot interval in one sentence."""
    return (
        f"a snapshot costs {measured.save:.3g} s ({measured.blocked:.3g} of it blocking), a step "
        f"takes {measured.step:.3g} s: every {was} steps that is "
        f"{measured.save / (was * max(measured.step, 1e-9)):.2%} of the time; the target is "
        f"{_SNAPSHOT_SHARE:.1%}"
    )


class SaveCosts:
    """Collects the costs of steps and saves, on one rank."""

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._busy: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        # For each save: seconds blocked, steps while it was in progress, their seconds.
        self._saves: deque[tuple[float, int, float]] = deque(maxlen=_REMEMBERED_SAVES)
        self._pending: tuple[float, int, float] | None = None

    def step(self, seconds: float, *, busy: bool) -> None:
        """Record a step; ``busy`` while a checkpoint is written, proven or uploaded."""
        (self._busy if busy else self._idle).append(seconds)
        if busy and self._pending is not None:
            blocked, steps, spent = self._pending
            self._pending = blocked, steps + 1, spent + seconds

    def saved(self, blocked_seconds: float) -> None:
        """Record a save that blocked ``blocked_seconds``; the previous save is now complete."""
        if self._pending is not None:
            self._saves.append(self._pending)
        self._pending = blocked_seconds, 0, 0.0

    @property
    def is_known(self) -> bool:
        return len(self._saves) >= _LEAST_SAVES

    def measured(self, *, restart: float, failures: int, up: float) -> MeasuredCosts:
        """The medians, which are robust to one slow step or write."""
        step = statistics.median(self._idle or self._busy or [0.0])
        slowed = [max(0.0, spent - steps * step) for _, steps, spent in self._saves]
        return MeasuredCosts(
            step=step,
            blocked=statistics.median([blocked for blocked, _, _ in self._saves] or [0.0]),
            slowed=statistics.median(slowed or [0.0]),
            write=statistics.median([spent for _, _, spent in self._saves] or [0.0]),
            restart=restart,
            failures=failures,
            up=up,
        )
