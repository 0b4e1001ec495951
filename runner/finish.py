"""The end of a command: ``summary.json`` and the table a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runner.checkpoint.digest import state_digest
from runner.engine.protocol import Engine
from runner.files import write_json
from runner.observe.console import Console, duration
from runner.observe.journal import Journal
from runner.observe.lines import iter_lines
from runner.observe.summary import Summary
from runner.rundir import RunDir
from runner.state import TrainState


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How the loop ended; ``status`` is done, halted, preempted or failed.

    ``in_time`` False: the grace is over, nothing that takes long may be done any more.
    """

    status: str
    exit_code: int
    reason: str
    in_time: bool = True


def collect_digest(engine: Engine, *, is_first: bool) -> str | None:
    """The state digest, on rank 0. Collective: every rank hands over its shards."""
    counts = engine.update_counts()
    whole = ((name, engine.full(name)) for name in sorted(s.name for s in engine.shards()))
    if is_first:
        return state_digest(whole, counts)
    for _ in whole:
        pass
    return None


def sum_up(
    end: End,
    *,
    digest: str | None,
    state: TrainState,
    journal: Journal,
    where_time_went: dict[str, float],
    batch: int,
    world_size: int,
    incarnation: int,
    run_dir: RunDir,
    console: Console,
) -> None:
    """Write the summary and show it; on rank 0 only.

    Args:
        where_time_went: seconds by kind, see :mod:`runner.observe.goodput`.
        batch: samples per step.
    """
    wall = sum(where_time_went.values())
    eval_loss = None
    for line in iter_lines(run_dir.metrics):
        eval_loss = eval_loss if line.get("eval_loss") is None else line["eval_loss"]
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
        restarts=journal.attempt - 1,
        samples_used=state.updates * batch,
        goodput=round(where_time_went["productive"] / max(wall, 1e-9), 4),
        time=where_time_went,
        world_size=world_size,
        incarnation=incarnation,
    )
    write_json(run_dir.summary, summary.to_json())
    console.table(f"{end.status}: {end.reason}", _rows(summary, wall, run_dir))


def _rows(summary: Summary, wall_seconds: float, run_dir: RunDir) -> list[tuple[str, str]]:
    loss = "-" if summary.final_loss is None else f"{summary.final_loss:.4f} nats/token"
    held_out = "" if summary.eval_loss is None else f" (held-out {summary.eval_loss:.4f})"
    skipped = ", ".join(f"{start}-{stop - 1}" for start, stop in summary.skipped)
    return [
        ("steps", f"{summary.steps} ({summary.samples_used:,} samples)"),
        ("loss", loss + held_out),
        ("discarded steps", str(summary.discarded_steps)),
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
    """The largest first; what is less than half a percent is left out."""
    shares = {kind: seconds / max(wall_seconds, 1e-9) for kind, seconds in spent.items()}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(
        f"{kind.replace('_', ' ')} {share:.0%}" for kind, share in ordered if share >= 0.005
    )
