"""Writes ``summary.json`` and prints the closing table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.observe.console import Console
from runner.observe.journal import Journal
from runner.run_dir.paths import RunDir
from runner.system.files import write_json
from runner.system.json_lines import iter_lines
from runner.system.parsing import number_in
from runner.system.units import duration
from runner.train.state import TrainState


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """``batch``: samples per step over all ranks; ``incarnation``: number of this start.

    ``data``: where samples came from; empty where the user's loop reads them.
    """

    batch: int
    world_size: int
    incarnation: int
    data: str = ""


def sum_up(
    end: RunEnd,
    *,
    digest: str | None,
    state: TrainState,
    journal: Journal,
    where_time_went: dict[str, float],
    size: RunSize,
    run_dir: RunDir,
    console: Console,
) -> Summary:
    """Write the summary and print it; on rank 0 only.

    Args:
        where_time_went: seconds by kind, see :mod:`runner.run_dir.time_account`.
    """
    wall = sum(where_time_went.values())
    eval_loss = None
    for line in iter_lines(run_dir.metrics):
        value = number_in(line, "eval_loss")
        eval_loss = eval_loss if value is None else value
    history = journal.history
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
        samples_used=state.updates * size.batch,
        goodput=round(where_time_went["productive"] / max(wall, 1e-9), 4),
        time=where_time_went,
        world_size=size.world_size,
        incarnation=size.incarnation,
        redone_steps=history.num_redone,
        data=size.data,
    )
    try:
        write_json(run_dir.summary, summary.to_json())
    except OSError as error:  # the run is over, and its exit code still says how it ended
        console.say(f"warning: no summary was written: {error}")
    on = "; the same command resumes it" if end.status == "preempted" else ""
    console.table(f"{end.status}: {end.reason}{on}", _rows(summary, wall, run_dir))
    return summary


def _rows(summary: Summary, wall_seconds: float, run_dir: RunDir) -> list[tuple[str, str]]:
    loss = "-" if summary.final_loss is None else f"{summary.final_loss:.4f} nats/token"
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
    ]


def _shares(spent: Mapping[str, float], wall_seconds: float) -> str:
    """Format the shares of time, largest first, without those under half a percent."""
    shares = {kind: seconds / max(wall_seconds, 1e-9) for kind, seconds in spent.items()}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{kind.replace('_', ' ')} {share:.0%}" for kind, share in ordered if share >= 0.005
    )
