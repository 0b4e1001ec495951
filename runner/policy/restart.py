"""Decides whether to restart a job that ended, from the record of each attempt. Pure.

The budget counts attempts without progress: a run that crashes every night and advances each day
may be restarted forever; one that repeats the same crash may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Kinds that say what happened but not why: a rank that vanished or died in C++, a dead network.
# gloo aborts a rank that receives a message of an unexpected size.
_UNEXPLAINED = (None, "silence", "exit", "fatal", "network")
HARDWARE = "hardware"
MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodes:
    """The exit codes that the policy distinguishes, from the caller.

    Args:
        final: codes after which a restart would not help, and why.
    """

    done: int
    crash: int
    halted: int
    preempted: int
    final: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The record of one attempt.

    Args:
        code: exit code of the runner, or of the started command.
        clean_before, clean_after: step of the newest clean checkpoint, -1 without one.
        took_up: whether it began to train; an earlier failure is not a step's.
        step: the step in which it ended.
        cause: the kind of failure from the ranks' reports; None if unknown.
        signature: stable text that says what failed where, compared; None if unknown.
        reason: the same for a person; None if unknown.
        diagnosed: whether it ran with collective checks.
    """

    code: int
    clean_before: int
    clean_after: int
    took_up: bool
    step: int
    cause: str | None = None
    signature: str | None = None
    reason: str | None = None
    diagnosed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRules:
    """
    Args:
        restarts: allowed restarts in a row without progress; 0: none at all.
        pause_seconds: pause before the first restart without progress; doubles with each further
            one.
        same_failures: repetitions of one failure at one step that make it deterministic.
        restart_preempted: False leaves the restart of a preempted job to the scheduler.
        diagnose: check collectives once after an unexplained crash.
        measure: what ``clean_before`` and ``clean_after`` count, for messages.
    """

    codes: ExitCodes
    restarts: int = 5
    pause_seconds: float = 1.0
    max_pause_seconds: float = 300.0
    same_failures: int = 3
    restart_preempted: bool = True
    diagnose: bool = False
    measure: str = "clean checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Restart after a pause."""

    reason: str
    pause_seconds: float
    diagnose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Do not restart; exit with this code."""

    reason: str
    code: int


def after(attempts: Sequence[Attempt], rules: RestartRules, *, asked_to_stop: bool) -> Again | End:
    """Decide what follows the last of ``attempts`` (at least one, of one launch, in order)."""
    last, codes = attempts[-1], rules.codes
    if last.code == codes.done:
        return End(reason="done", code=codes.done)
    if asked_to_stop:
        return End(reason="asked to stop", code=last.code)
    if last.code in codes.final:
        return End(reason=f"{codes.final[last.code]}: a restart would not help", code=last.code)
    if last.code == codes.preempted and not rules.restart_preempted:
        return End(reason="preempted: the scheduler starts it again", code=codes.preempted)
    repeated = _repeated(attempts, rules)
    if repeated is not None:
        return End(reason=repeated, code=codes.halted)
    return _within_budget(attempts, rules)


def _repeated(attempts: Sequence[Attempt], rules: RestartRules) -> str | None:
    """The reason to stop if ``same_failures`` attempts in a row failed alike; else None."""
    times, preempted = rules.same_failures, rules.codes.preempted
    tail = attempts[-times:]
    if len(tail) < times or any(not a.took_up or a.code == preempted for a in tail):
        return None
    if any(attempt.cause in (HARDWARE, MEMORY) for attempt in tail):
        return None  # another node, or smaller micro-batches, may help
    if len({(a.step, a.signature, a.code if a.signature is None else 0) for a in tail}) > 1:
        return None
    return (
        f"deterministic: {times} attempts in a row failed at step {tail[-1].step} with "
        f"{what_failed(tail[-1])}; starting again would repeat it"
    )


def what_failed(attempt: Attempt) -> str:
    """A short text that names the failure, and for memory what helps."""
    advice = "; out of memory: lower batch.micro_size" if attempt.cause == MEMORY else ""
    return (attempt.reason or attempt.signature or f"exit code {attempt.code}") + advice


def _within_budget(attempts: Sequence[Attempt], rules: RestartRules) -> Again | End:
    last, codes = attempts[-1], rules.codes
    was_preempted = last.code == codes.preempted
    if not rules.restarts:
        code = last.code if was_preempted else codes.crash
        return End(
            reason=f"restarts: 0; failed at step {last.step}: {what_failed(last)}", code=code
        )
    failed = without_progress(attempts)
    if failed > rules.restarts:
        return End(
            reason=f"{failed} attempts without a new {rules.measure}, the budget is "
            f"{rules.restarts} restarts; last at step {last.step}: {what_failed(last)}",
            code=last.code if was_preempted else codes.crash,
        )
    what = (
        "preempted" if was_preempted else "failed" if last.signature else f"exit code {last.code}"
    )
    unexplained = last.took_up and last.cause in _UNEXPLAINED and not was_preempted
    diagnosed = any(attempt.diagnosed for attempt in attempts[-max(1, failed) :])
    return Again(
        reason=f"{what} at step {last.step}, newest {rules.measure} {_or_none(last.clean_after)}",
        pause_seconds=_pause(failed, last, rules),
        diagnose=rules.diagnose and unexplained and not diagnosed,
    )


def without_progress(attempts: Sequence[Attempt]) -> int:
    """Number of last attempts that did not advance the newest clean checkpoint."""
    best = attempts[0].clean_before
    count = 0
    for attempt in attempts:
        count = 0 if attempt.clean_after > best else count + 1
        best = max(best, attempt.clean_after)
    return count


def _pause(failed: int, last: Attempt, rules: RestartRules) -> float:
    if failed == 0 or (last.code == rules.codes.preempted and failed == 1):
        return 0.0
    doubled = rules.pause_seconds * 2.0 ** (failed - 1)
    return min(doubled, rules.max_pause_seconds)


def _or_none(step: int) -> str:
    return "none" if step < 0 else str(step)
