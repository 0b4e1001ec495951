"""Exceptions that end a guarded loop early; uncaught, each becomes an exit code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from runner.embed.opening import OpenRun
from runner.policy.decision.history import Incident
from runner.system.error import Halted, Preempted, RunnerError, Superseded

_log = logging.getLogger(__name__)


class GuardHalted(Halted, SystemExit):
    """The guard gave up. Uncaught, the script ends with exit code 3."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = Halted.exit_code


class GuardPreempted(Preempted, SystemExit):
    """A stop was requested. Uncaught, the script ends with exit code 75."""

    def __init__(self, message: str, *, in_time: bool) -> None:
        super().__init__(message, in_time=in_time)
        self.code = Preempted.exit_code


@contextmanager
def journal_errors(run: OpenRun) -> Iterator[None]:
    """Journal a :class:`RunnerError` inside; as an exception it carries its exit code."""
    try:
        yield
    except Superseded:
        raise  # this process may no longer write
    except Halted as error:
        run.ring.drain()  # finish the checkpoint that is being written
        _log.error("halted: %s", error)
        close_at_exit(run)
        raise GuardHalted(str(error)) from error
    except RunnerError as error:
        is_preempted = isinstance(error, Preempted)
        run.written.journal.add(
            Incident(
                kind="preempted" if is_preempted else "failed",
                step=run.state.updates,
                decision="end",
                reason=str(error),
                detail={"stalls": run.reporter.take_stalls()},
            )
        )
        if not isinstance(error, Preempted):
            raise
        _log.warning("preempted: %s", error)
        close_at_exit(run)
        raise GuardPreempted(str(error), in_time=error.in_time) from error


def close_at_exit(run: OpenRun) -> None:
    """Release the run directory, without waiting for other ranks."""
    run.ring.close(wait=True)
    run.reporter.close()
    run.backlog.finish()
    run.group.monitor.end()
