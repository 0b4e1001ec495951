"""Sums a run up at its end: ``summary.json``, the closing table, and the state digest.

:mod:`runner.checkpoint.state_digest` defines the digest. It is computed on all ranks, and never
delays a stop. A small state is sent to rank 0 tensor by tensor; for a large one each rank sums its
own shards in place, without a copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from runner.checkpoint.disk.shards import own_share
from runner.checkpoint.state_digest import digest_of_sums, is_whole, state_digest
from runner.checkpoint.tensor_sums import LANES, Summing, Sums, added
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine
from runner.observe.page_writer import NAME as PAGE
from runner.run_dir.paths import RunDir
from runner.system.files import write_json
from runner.system.json_lines import iter_lines, step_of
from runner.system.parsing import number_in
from runner.system.units import duration
from runner.train.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How the loop ended: ``status`` is done, halted, preempted or failed.

    ``in_time`` False: the grace period is over, so nothing slow may follow.
    """

    status: str
    exit_code: int
    reason: str
    in_time: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The state of a run. ``status`` is done, halted, preempted or failed.

    ``goodput`` is the share of wall time since the first start, down time included, spent on steps
    that count in the result; ``time`` divides the wall time, in seconds by the kinds of
    :data:`runner.run_dir.time_account.KINDS`.
    """

    status: str
    exit_code: int
    reason: str
    steps: int
    cursor: int
    final_loss: float | None
    eval_loss: float | None
    state_digest: str | None
    discarded_steps: int
    rollbacks: int
    skipped: tuple[tuple[int, int], ...]
    restarts: int
    samples_used: int
    goodput: float
    time: Mapping[str, float]
    world_size: int
    incarnation: int
    redone_steps: int = 0
    data: str = ""


def sum_up(
    run: Run,
    end: RunEnd,
    *,
    global_size: int,
    digest: str | None,
    data: str = "",
    unit: str = "",
    has_page: bool = False,
) -> Summary | None:
    """Write the summary and print it on rank 0, which returns it.

    Args:
        global_size: samples of a step.
        data: where samples came from; empty where the user's loop reads them.
        unit: of the loss, for a person.
        has_page: whether the report page is written after this.
    """
    group, state, history = run.group, run.state, run.history
    if not group.is_first:
        return None
    run_dir, where_time_went = group.run_dir, run.reporter.where_time_went()
    wall = sum(where_time_went.values())
    eval_loss = None
    with suppress(OSError):  # the storage is gone: what is written below says so
        for line in iter_lines(run_dir.metrics):
            value = number_in(line, "eval_loss")
            if value is not None and step_of(line) <= state.updates:  # no rollback undid it
                eval_loss = value
    summary = Summary(
        status=end.status,
        exit_code=end.exit_code,
        reason=end.reason,
        steps=state.updates,
        cursor=state.cursor,
        final_loss=state.last_loss,
        eval_loss=eval_loss,
        state_digest=digest,
        discarded_steps=history.num_discarded,
        rollbacks=len(history.rollbacks),
        skipped=tuple(history.ledger),
        restarts=history.num_restarts,
        samples_used=state.updates * global_size,
        goodput=round(where_time_went["productive"] / max(wall, 1e-9), 4),
        time=where_time_went,
        world_size=group.place.world_size,
        incarnation=run.lease.number,
        redone_steps=history.num_redone,
        data=data,
    )
    try:
        run.lease.check()
        write_json(run_dir.summary, asdict(summary))
    except OSError as error:  # the run is over, and its exit code still says how it ended
        group.console.say(f"warning: no summary was written: {error}")
    on = "; the same command resumes it" if end.status == "preempted" else ""
    group.console.table(
        f"{end.status}: {end.reason}{on}", _rows(summary, unit, wall, run_dir, has_page)
    )
    return summary


def _rows(
    summary: Summary, unit: str, wall_seconds: float, run_dir: RunDir, has_page: bool
) -> list[tuple[str, str]]:
    loss = "-" if summary.final_loss is None else f"{summary.final_loss:.4f} {unit}".rstrip()
    held_out = "" if summary.eval_loss is None else f" (held-out {summary.eval_loss:.4f})"
    skipped = ", ".join(f"{start}-{stop - 1}" for start, stop in summary.skipped)
    return [
        *([("data", summary.data)] if summary.data else []),
        ("steps", f"{summary.steps} ({summary.samples_used:,} samples)"),
        ("loss", loss + held_out),
        ("discarded steps", str(summary.discarded_steps)),
        *([("redone steps", str(summary.redone_steps))] if summary.redone_steps else []),
        ("rollbacks", str(summary.rollbacks)),
        ("samples skipped", skipped or "none"),
        ("restarts", str(summary.restarts)),
        ("wall time", f"{duration(wall_seconds)}, goodput {summary.goodput:.0%}"),
        ("where the time went", _shares(summary.time, wall_seconds)),
        ("state digest", (summary.state_digest or "-")[:16]),
        ("summary", str(run_dir.summary)),
        ("metrics", str(run_dir.metrics)),
        ("journal", str(run_dir.journal)),
        ("checkpoints", str(run_dir.ring)),
        *([("page", str(run_dir.out / PAGE))] if has_page else []),
    ]


def _shares(spent: Mapping[str, float], wall_seconds: float) -> str:
    """Format the shares of time, largest first, without those under half a percent."""
    shares = {kind: seconds / max(wall_seconds, 1e-9) for kind, seconds in spent.items()}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{kind.replace('_', ' ')} {share:.0%}" for kind, share in ordered if share >= 0.005
    )


_STOP_SECONDS = 5.0
_CLOCK_INTERVAL = 1 << 23  # elements
_HALF = 32


def at_a_stop(is_late: Callable[[], bool]) -> Callable[[], bool]:
    """Make a clock that says when to give up: after a few seconds, or when the grace period
    ends."""
    due = time.monotonic() + _STOP_SECONDS
    return lambda: is_late() or time.monotonic() > due


def collect_digest(engine: Engine, ranks: Ranks, is_late: Callable[[], bool]) -> str | None:
    """Compute the state digest; None except on rank 0, or when any rank is late. Collective."""
    shapes = {shard.name: shard.shape for shard in engine.shards()}
    if not is_whole(shapes.values()):
        return _digest_by_sums(engine, ranks, is_late)
    was_late = False

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal was_late
        since = _CLOCK_INTERVAL
        for shard in sorted(engine.shards(), key=lambda shard: shard.name):
            if since >= _CLOCK_INTERVAL:
                was_late = ranks.sum([float(is_late())])[0] > 0
                since = 0
            if was_late:
                return
            yield shard.name, engine.full(shard.name)
            since += math.prod(shard.shape)

    counts = engine.update_counts()
    if ranks.rank == 0:
        digest = state_digest(tensors(), counts)
        return None if was_late else digest
    for _ in tensors():
        pass
    return None


def _digest_by_sums(engine: Engine, ranks: Ranks, is_late: Callable[[], bool]) -> str | None:
    shards, counts = engine.shards(), engine.update_counts()
    totals: dict[str, Sums] = {shard.name: (0,) * LANES for shard in shards}
    summing, late = Summing(), False
    # Replicas of a shard are equal: each rank sums a part of it.
    for part in own_share(((s.name, s.start, s.local.detach()) for s in shards), engine.replica):
        for first in range(0, len(part.values), _CLOCK_INTERVAL):
            late = late or is_late()
            if not late:
                values = part.values[first : first + _CLOCK_INTERVAL]
                sums = summing.of(part.name, part.start + first, values)
                totals[part.name] = added(totals[part.name], sums)
    names = sorted(totals)
    # In halves: FP64 adds integers exactly up to 2^53, enough for 2 million ranks.
    mask = (1 << _HALF) - 1
    halves = [float(x) for n in names for lane in totals[n] for x in (lane & mask, lane >> _HALF)]
    *summed, num_late = ranks.sum([*halves, float(late)])
    if num_late or ranks.rank != 0:
        return None
    shapes = {shard.name: shard.shape for shard in shards}
    lanes = [int(low) + (int(high) << _HALF) for low, high in zip(*[iter(summed)] * 2, strict=True)]
    of_all = {
        name: (shapes[name], added(tuple(lanes[LANES * at : LANES * at + LANES]), (0,) * LANES))
        for at, name in enumerate(names)
    }
    return digest_of_sums(of_all, counts)
