"""How a guarded loop ends before its data does: with an exception that is an exit code as well."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from runner.embed.opening import Opened
from runner.policy.decision.history import Incident
from runner.system.error import Halted, Preempted, RunnerError, Superseded

_log = logging.getLogger(__name__)


class GuardHalted(Halted, SystemExit):
    """The guard gave up. Uncaught, the script ends with exit code 3."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.code = Halted.exit_code


class GuardPreempted(Preempted, SystemExit):
    """A stop was asked for. Uncaught, the script ends with exit code 75."""

    def __init__(self, words: str, *, in_time: bool) -> None:
        super().__init__(words, in_time=in_time)
        self.code = Preempted.exit_code


@contextmanager
def errors_journalled(opened: Opened) -> Iterator[None]:
    """An error of ours inside is journalled, and ends the script with its exit code."""
    try:
        yield
    except Superseded:
        raise  # nothing may be written any more
    except Halted as error:
        opened.ring.drain()  # what is being written is still worth having
        _log.error("halted: %s", error)
        closed_at_exit(opened)
        raise GuardHalted(str(error)) from error
    except RunnerError as error:
        is_preempted = isinstance(error, Preempted)
        opened.written.journal.add(
            Incident(
                kind="preempted" if is_preempted else "failed",
                step=opened.state.updates,
                decision="end",
                reason=str(error),
                detail={"stalls": opened.reporter.take_stalls()},
            )
        )
        if not isinstance(error, Preempted):
            raise
        _log.warning("preempted: %s", error)
        closed_at_exit(opened)
        raise GuardPreempted(str(error), in_time=error.in_time) from error


def closed_at_exit(opened: Opened) -> None:
    """Let go of the run directory; nothing here waits for another rank."""
    opened.ring.close(wait=True)
    opened.reporter.close()
    opened.backlog.finish()
    opened.group.monitor.end()
