"""Models the cost of checkpoints and failures in a large run. Numbers only.

Failures are a Poisson process over the whole job, or those of a trace. A run alternates between
work and stalls of the training thread; a failure loses the work since the last usable checkpoint,
is detected, and the job restarts; failures also occur during a restart. Sources, by the names used
below:

Young 1974: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9).
Daly 2006: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
dumps, Future Generation Computer Systems 22(3).
Saxena 2024 and Llama 3 2024: see :mod:`runner.policy.retention.interval`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from runner.policy.retention.interval import LLAMA3_FAILURES, LLAMA3_IN_MEMORY
from runner.run_dir.paths import RunDir
from runner.system.json_lines import iter_lines
from runner.tools.report.run_reader import stored_checkpoints

# FP32 weights and both moments of AdamW, as the ring keeps them.
BYTES_PER_PARAMETER = 12

_TOO_LARGE = 500.0  # largest exponent; such a run makes no progress
_LONGEST = 20.0  # the best interval is at most this many times the time between failures
LLAMA3_PARAMETERS = 405_000_000_000


def share_in_memory(*, mirrored: bool) -> float:
    """The share of Llama 3's failures after which every rank's memory snapshot can still be read.

    With each snapshot mirrored to a peer on another node, that includes the loss of one node.
    """
    return 1.0 if mirrored else LLAMA3_IN_MEMORY / LLAMA3_FAILURES


def young_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Optimal work between saves in seconds: sqrt(2 Ts Tf) (Young 1974)."""
    return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly_interval(save_seconds: float, mtbf_seconds: float) -> float:
    """Optimal work between saves in seconds, to higher order (Daly 2006).

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d for d < 2M, else M.
    """
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval(save_seconds, mtbf_seconds) * series - save_seconds


class Strategy(Enum):
    """How checkpoints are made."""

    synchronous = "synchronous"  # training waits until the checkpoint is on disk
    asynchronous = "asynchronous"  # training waits for a copy, which is written meanwhile
    ring = "memory + disk ring"  # copies kept in host memory; every few of them written to disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """A job, in seconds and bytes.

    Args:
        nodes: number of nodes; a failure of any of them stops the job.
        mtbf_seconds: mean time between failures of the whole job.
        step_seconds: one step without stalls.
        save_seconds: writing a checkpoint to disk, all ranks at once.
        stall_seconds: stall of the training thread for a copy to host memory.
        restart_seconds: from a failure's detection to the first new step, from disk.
        memory_restart_seconds: the same, from memory snapshots.
        detect_seconds: from a failure to its detection.
        state_bytes: size of a checkpoint.
        memory_share: share of failures that memory snapshots survive, 0 to 1.
        slots: number of memory snapshots kept.
        mirrored: whether a peer on another node also keeps each snapshot.
        disk_slots: number of checkpoints kept on disk.
    """

    nodes: int
    mtbf_seconds: float
    step_seconds: float
    save_seconds: float
    stall_seconds: float
    restart_seconds: float
    memory_restart_seconds: float
    detect_seconds: float
    state_bytes: float
    memory_share: float
    slots: int = 2
    mirrored: bool = False
    disk_slots: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The best plan with one strategy.

    ``steps`` between snapshots, ``disk_steps`` between checkpoints on disk. On average a failure
    loses ``lost_seconds`` of running, and ``down_seconds`` pass before the next step.
    ``stall_share`` is the share of uptime spent in stalls; ``memory_bytes`` is host memory per
    node; ``over_trace`` is the goodput over a trace, if there is one.
    """

    strategy: Strategy
    goodput: float
    steps: int
    disk_steps: int
    lost_seconds: float
    down_seconds: float
    stall_share: float
    memory_bytes: float
    over_trace: float | None = None


def down_time(costs: Costs, restart_seconds: float) -> float:
    """From a failure to the first new step in seconds, failures during the start included.

    exp(R/M) (D + M) - M: the restart part of Daly 2006's complete model, with a detection D.
    """
    mtbf = costs.mtbf_seconds
    power = restart_seconds / mtbf
    if power > _TOO_LARGE:
        return math.inf
    return math.exp(power) * costs.detect_seconds + mtbf * math.expm1(power)


def ring_goodput(costs: Costs, *, steps: int, per_disk: int) -> float:
    """The share of wall time that counts, with a ring in memory and on disk.

    Every ``per_disk``-th snapshot in memory is written to disk in the background. With a memory
    that survives nothing it is Daly 2006's complete model: a period of work w and stall s takes
    (M + D) exp(R/M) (exp((w + s)/M) - 1) seconds on average; that a copy can be used only a time
    lag after it was made multiplies progress by exp(-lag/M), by the chain of periods.

    A failure goes back to the newest snapshot, or to disk if memory is lost as well. With E
    the time to the end of a disk period from its i-th snapshot, E_i = a + b E_(i+1) + (1-b) E_0
    and E_0 = a (b^-k - 1)/(1 - b). Losing memory while a checkpoint is being written costs one more
    period; its probability is approximated by the rate of such failures times the write time.
    """
    mtbf, share = costs.mtbf_seconds, costs.memory_share
    period = steps * costs.step_seconds + costs.stall_seconds
    disk_down = down_time(costs, costs.restart_seconds)
    restart = costs.memory_restart_seconds / mtbf
    if period / mtbf > _TOO_LARGE or restart > _TOO_LARGE or math.isinf(disk_down):
        return 0.0
    fails, restart_fails = -math.expm1(-period / mtbf), -math.expm1(-restart)
    # A failed start from memory begins again, or, if memory is lost, starts from disk.
    attempts = 1 / (1 - restart_fails * share)
    memory_down = (costs.detect_seconds + restart_fails * mtbf) * attempts
    memory_lost = restart_fails * (1 - share) * attempts
    to_disk = fails * (share * memory_lost + 1 - share)
    spent = fails * (mtbf + share * memory_down) + to_disk * disk_down
    stays = 1 - fails * share * (1 - memory_lost)
    spent, falls = spent / stays, to_disk / stays
    lag = math.exp(-(1 - share) * costs.save_seconds / mtbf)
    if falls <= 0:  # the disk is never read, so any interval is equally good
        return steps * costs.step_seconds / spent
    work = per_disk * steps * costs.step_seconds
    power = -per_disk * math.log1p(-falls) if falls < 1 else math.inf
    if power > _TOO_LARGE:
        return 0.0
    return work * lag * falls / (spent * math.expm1(power))


class NodeFailure(NamedTuple):
    """``begin`` and ``end`` in days of the trace; infinite where it has no end."""

    begin: float
    end: float
    node: str
    kind: str
    text: str


def read_failures(path: Path) -> list[NodeFailure]:
    """The failures in a file of events as in stepfun-ai/InfiniteHBD-Trace, in order.

    A node's end belongs to its oldest open failure of the type.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it is no such file.
    """
    is_open: defaultdict[str, list[int]] = defaultdict(list)
    failures: list[NodeFailure] = []
    # At one time, what ends does so first: it may be the end of an earlier one.
    for event in sorted(json.loads(path.read_text()), key=lambda event: event["event_time"]):
        time, node, kind = event["event_time"], str(event["node_id"]), event.get("fault_type") or {}
        others = is_open[f"{node}{kind}"]
        if event["event_type"] == "fault_start":
            others.append(len(failures))
            fault = kind.get("Class", ""), kind.get("Desc", "")
            failures.append(NodeFailure(time, math.inf, node, *fault))
        elif others:
            ended = others.pop(0)
            failures[ended] = failures[ended]._replace(end=time)
    return sorted(failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Failures that a cluster had: (seconds since the beginning, node), in order."""

    failures: Sequence[tuple[float, str]]
    num_nodes: int

    @property
    def seconds(self) -> float:
        return self.failures[-1][0]

    @property
    def mtbf_node_hours(self) -> float:
        return self.seconds * self.num_nodes / len(self.failures) / 3600

    def of_job(self, nodes: int, dice: random.Random) -> list[float]:
        """When the nodes of a job fail: nodes of the trace, each at most once.

        A job of more nodes than the trace has others of the same cluster at another time.
        """
        named = sorted({node for _, node in self.failures})
        all_nodes = named + [""] * (self.num_nodes - len(named))  # these never failed
        times: list[float] = []
        while nodes > 0:
            chosen = set(dice.sample(all_nodes, min(nodes, len(all_nodes))))
            shift = dice.uniform(0, self.seconds)
            mine = [time for time, node in self.failures if node in chosen]
            times += [(time + shift) % self.seconds for time in mine]
            nodes -= len(all_nodes)
        return sorted(times)


def trace_goodput(
    costs: Costs, failures: Iterable[float], until: float, plan: RunPlan, dice: random.Random
) -> float:
    """The share of wall time that counts, where failures come at these times, in seconds.

    No failure is taken as independent of another: of those that come while the job restarts from
    one, each begins the restart anew.
    """
    if plan.strategy is not Strategy.ring:
        costs = one_tier(costs, waits=plan.strategy is Strategy.synchronous)
    period = plan.steps * costs.step_seconds + costs.stall_seconds
    per_disk = plan.disk_steps // plan.steps
    snapshots = on_disk = 0  # that the state holds, and that the disk does
    noticed = ready = 0.0
    from_memory, last = True, 0
    for failure in chain(failures, [until]):
        if failure < noticed:
            continue
        whole = failure >= ready  # else it is within the restart, from a memory that may be gone
        written = snapshots + math.floor((failure - ready - costs.save_seconds) / period)
        newest = written // per_disk * per_disk
        on_disk = newest if newest > snapshots else on_disk
        snapshots += max(0, math.floor((failure - ready) / period))
        held = (whole or from_memory) and dice.random() < costs.memory_share
        from_memory, last = held, snapshots
        snapshots = snapshots if held else on_disk
        noticed = failure + costs.detect_seconds
        ready = noticed + (costs.memory_restart_seconds if held else costs.restart_seconds)
    return last * plan.steps * costs.step_seconds / until


def plan(costs: Costs, strategy: Strategy) -> RunPlan:
    """The intervals with the largest goodput, in whole steps.

    No interval is shorter than its floors: the detection latency over the number of checkpoints
    kept (Saxena 2024's floor, for a ring), and the background write time, since only one checkpoint
    is written at a time.
    """
    is_ring, waits = strategy is Strategy.ring, strategy is Strategy.synchronous
    copies = costs.slots * (2 if costs.mirrored else 1) if is_ring else int(not waits)
    floor = costs.detect_seconds / (costs.slots if is_ring else costs.disk_slots)
    if not is_ring:
        costs = one_tier(costs, waits=waits)
        floor = max(floor, costs.save_seconds)
    least = max(1, math.ceil((floor - costs.stall_seconds) / costs.step_seconds))
    longest = _LONGEST * costs.mtbf_seconds

    def best_per_disk(steps: int) -> int:
        period = steps * costs.step_seconds + costs.stall_seconds
        low = max(1, math.ceil(costs.save_seconds / period))
        high = max(low, math.ceil(longest / period)) if is_ring else 1
        return _argmax(lambda k: ring_goodput(costs, steps=steps, per_disk=k), low, high)

    steps = _argmax(
        lambda n: ring_goodput(costs, steps=n, per_disk=best_per_disk(n)),
        least,
        max(least, math.ceil(longest / costs.step_seconds)),
    )
    per_disk = best_per_disk(steps)
    share, mtbf = costs.memory_share, costs.mtbf_seconds
    period = steps * costs.step_seconds + costs.stall_seconds
    # Only failures that lose memory count in a disk period.
    rare = mtbf / max(1 - share, 1e-12)
    lag = min(costs.save_seconds, per_disk * period)
    lost = _lost(period, 0.0, mtbf), _lost(per_disk * period, lag, rare)
    down = [down_time(costs, s) for s in (costs.memory_restart_seconds, costs.restart_seconds)]
    return RunPlan(
        strategy=strategy,
        goodput=ring_goodput(costs, steps=steps, per_disk=per_disk),
        steps=steps,
        disk_steps=steps * per_disk,
        lost_seconds=_mean(share, *lost),
        down_seconds=_mean(share, *down),
        stall_share=costs.stall_seconds / period,
        memory_bytes=copies * costs.state_bytes / costs.nodes,
    )


def one_tier(costs: Costs, *, waits: bool) -> Costs:
    """The costs of a ring whose memory survives nothing: each of its snapshots is a checkpoint.

    Args:
        waits: whether training waits until it is on disk.
    """
    stall, lag = costs.stall_seconds, costs.save_seconds
    stall, lag = (lag, 0.0) if waits else (stall, lag)
    return replace(costs, memory_share=0.0, stall_seconds=stall, save_seconds=lag)


def _mean(share: float, one: float, other: float) -> float:
    """Weighted; what never happens may take for ever."""
    return math.fsum(s * value for s, value in ((share, one), (1 - share, other)) if s)


def _lost(period: float, lag: float, mtbf: float) -> float:
    """Seconds since the newest usable checkpoint at a failure, on average.

    The mean of an exponential time truncated at the period, plus a period if the copy at its start
    could not be used yet.
    """
    power = period / mtbf
    if power > _TOO_LARGE:
        return math.inf
    if power < 1e-6:  # the difference below would be rounding error
        return period / 2 + lag
    within = mtbf - period / math.expm1(power)
    return within + period * -math.expm1(-lag / mtbf) / math.expm1(power)


def _argmax(value: Callable[[int], float], low: int, high: int) -> int:
    """The argument of the maximum of a function that first rises, then falls."""
    while low < high:
        middle = (low + high) // 2
        if value(middle) < value(middle + 1):
            low = middle + 1
        else:
            high = middle
    return low


# -- what a run has measured -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Value:
    """A number and its source."""

    number: float
    source: str


Values = dict[str, Value]


def measured(out: Path, journal: Sequence[dict[str, Any]]) -> Values:
    """Numbers from a run's records, as far as it has them."""
    source = f"measured: {out}"
    numbers: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    time_of_step: dict[int, float] = {}
    last_time = 0.0
    for line in iter_lines(out / "metrics.jsonl"):
        stalls, last_time = line.get("stalls", {}), float(line.get("time", 0.0))
        for name, kind in (("stall_seconds", "checkpoint"), ("restart_seconds", "restart")):
            if stalls.get(kind):
                numbers[name].append(stalls[kind])
        if line["action"] == "apply":
            numbers["step_seconds"].append(line["seconds"])
            time_of_step[line["step"]] = last_time
    stored = stored_checkpoints(RunDir(out))
    for entry in stored:
        # From its step's end to its commit marker; negative where that step was done again since.
        seconds = entry.time - time_of_step.get(entry.step, math.inf)
        if seconds > 0:
            numbers["save_seconds"].append(seconds)
    values = {name: Value(statistics.median(seen), source) for name, seen in numbers.items()}
    if stored:
        values["state_gb"] = Value(stored[-1].num_bytes / 1e9, source)
    if "restart_seconds" in values:
        values["detect_seconds"] = Value(0.0, f"{source}, within restart_seconds")
    return values | _failures(journal, last_time, source)


def _failures(journal: Sequence[dict[str, Any]], last: float, source: str) -> Values:
    """The nodes of the newest start and, where something crashed, the time between failures."""
    starts = [line for line in journal if line["kind"] == "start"]
    crashes = sum(line["kind"] == "crash" for line in journal)
    if not starts:
        return {}
    nodes = max(1, len(starts[-1]["detail"].get("hosts", {})))
    values = {"nodes": Value(nodes, source)}
    end = max(chain([last], (float(line["time"]) for line in journal)))
    hours = (end - float(journal[0]["time"])) / 3600
    if crashes and hours > 0:
        crash_source = f"{source}, {crashes} crash{'es' if crashes > 1 else ''}"
        values["mtbf_node_hours"] = Value(hours * nodes / crashes, crash_source)
    return values
