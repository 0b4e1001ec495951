"""The status of a run, in numbers and in one sentence."""

from __future__ import annotations

from dataclasses import dataclass

from runner.policy.retention.records import State
from runner.system.units import duration
from runner.tools.report.run_reader import RunReader
from runner.tools.ring_files import StoredCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run.

    ``status`` is done, halted, preempted, failed, running, starting or silent. Losses are in nats
    per token. ``lost_steps`` and ``lost_seconds`` are what a restart from disk would compute again
    after a crash right now; None without a checkpoint. ``silent_seconds`` counts from the last
    heartbeat.
    """

    status: str
    reason: str
    step: int
    total: int | None
    eta_seconds: float | None
    seconds_per_step: float | None
    loss: float | None
    eval_loss: float | None
    tokens_per_second: float | None
    goodput: float
    wall_seconds: float
    proven: StoredCheckpoint | None
    proven_age: float | None
    lost_steps: int | None
    lost_seconds: float | None
    silent_seconds: float | None
    discards: int
    rollbacks: int
    restarts: int


def run_status(run: RunReader) -> RunStatus:
    """The status of the run now."""
    fold, summary, now = run.fold, run.summary(), float(run.clock())
    last = fold.thinned.last
    status = _status(run)
    step = _step(run)
    total = run.settings().get("steps")
    total = total if type(total) is int else None
    pace = fold.attempts.pace()
    spent = run.time_spent()
    wall = sum(spent.values())
    ring = run.checkpoints()
    proven = _newest(ring, {State.clean})
    usable = _newest(ring, {State.clean, State.committed})
    lost_seconds = None
    if usable is not None:
        attempt = fold.attempts.attempt_of(usable.step)
        if attempt is not None:
            lost_seconds = fold.attempts.time_of(len(fold.attempts) - 1) - fold.attempts.time_of(
                attempt
            )
    remaining = max(0, total - step) if total is not None else None
    return RunStatus(
        status=status,
        reason=str(summary.get("reason", ""))[:2000] if summary else "",
        step=step,
        total=total,
        eta_seconds=remaining * pace if status == "running" and remaining and pace else None,
        seconds_per_step=pace,
        loss=_finite(last.loss if last else None),
        eval_loss=_finite(fold.eval_loss),
        tokens_per_second=_finite(last.tokens_per_second if last else None),
        goodput=spent.get("productive", 0.0) / wall if wall > 0 else 0.0,
        wall_seconds=wall,
        proven=proven,
        proven_age=max(0.0, now - proven.time) if proven else None,
        lost_steps=max(0, step - usable.step) if usable else None,
        lost_seconds=max(0.0, lost_seconds) if lost_seconds is not None else None,
        silent_seconds=run.silent_seconds(),
        discards=fold.history.num_discarded,
        rollbacks=len(fold.history.rollbacks),
        restarts=fold.history.num_restarts,
    )


def sentence(now: RunStatus) -> str:
    """One sentence with what a person needs first."""
    parts = [_progress(now)]
    losses = [
        *([f"loss {now.loss:.4f}"] if now.loss is not None else []),
        *([f"held-out {now.eval_loss:.4f}"] if now.eval_loss is not None else []),
    ]
    if losses:
        parts.append(f"{', '.join(losses)} nats per token")
    return f"{'; '.join(parts)}. {_safety(now)}"


def _progress(now: RunStatus) -> str:
    of = f" of {now.total:,}" if now.total is not None else ""
    at = f"step {now.step:,}{of}"
    if now.status == "running":
        eta = f", about {duration(now.eta_seconds)} to go" if now.eta_seconds is not None else ""
        return f"Running: {at}{eta}"
    if now.status == "starting":
        return f"Starting: {at}"
    if now.status == "silent":
        silent = "" if now.silent_seconds is None else f" for {duration(now.silent_seconds)}"
        return f"No heartbeat{silent}: {at}"
    reason = f" ({now.reason})" if now.reason and now.status != "done" else ""
    return f"{now.status.capitalize()}{reason}: {at}"


def _safety(now: RunStatus) -> str:
    if now.proven is None:
        proven = "No checkpoint on disk is proven yet"
    else:
        age = f", {duration(now.proven_age)} old" if now.proven_age is not None else ""
        proven = f"The newest proven checkpoint is of step {now.proven.step:,}{age}"
    if now.lost_steps is None:
        return f"{proven}."
    if now.lost_steps == 0:
        return f"{proven}; nothing would be lost now."
    cost = f" ({duration(now.lost_seconds)} of work)" if now.lost_seconds else ""
    steps = "1 step" if now.lost_steps == 1 else f"{now.lost_steps:,} steps"
    return f"{proven}; {steps}{cost} would be computed again if the run were lost now."


def _status(run: RunReader) -> str:
    summary = run.summary()
    if summary is not None:
        return str(summary.get("status", "ended"))[:40]
    if run.is_alive():
        return "running" if len(run.fold.attempts) else "starting"
    return "silent"


def _step(run: RunReader) -> int:
    """The number of applied updates."""
    summary = run.summary()
    steps = summary.get("steps") if summary else None
    if type(steps) is int:
        return steps
    last = run.fold.thinned.last
    if last is None:
        return 0
    return last.step if last.is_applied else max(0, last.step - 1)


def _newest(ring: list[StoredCheckpoint], states: set[State]) -> StoredCheckpoint | None:
    return max(
        (one for one in ring if one.state in states), key=lambda one: one.serial, default=None
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
