"""Exceptions that end a guarded loop early; uncaught, each becomes an exit code.

An uncaught error of the script's own is reported to the other ranks and to the journal.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runner.embed.opening import OpenRun
from runner.health.leave import end_within
from runner.policy.decision.history import Incident
from runner.system.error import Halted, Preempted, RunnerError, Superseded

_AFTER_GRACE_SECONDS = 1.0  # for what the script does at its end
_log = logging.getLogger(__name__)
_under_watch: list[OpenRun] = []  # run directories that this process holds
_former_hook = sys.excepthook


class GuardHalted(Halted, SystemExit):
    """The guard gave up. Uncaught, the script ends with exit code 3."""

    code = Halted.exit_code


class GuardPreempted(Preempted, SystemExit):
    """A stop was requested. Uncaught, the script ends with exit code 75."""

    code = Preempted.exit_code


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
        close_at_exit(run, wait=error.in_time)
        if not error.in_time:
            # The interpreter waits at its end for the thread whose disk is too slow.
            end_within(_AFTER_GRACE_SECONDS, Preempted.exit_code)
        raise GuardPreempted(str(error), in_time=error.in_time) from error


def watch_for_uncaught(run: OpenRun) -> None:
    """Journal an error that ends this process, until :func:`close_at_exit`."""
    global _former_hook
    if not _under_watch:
        _former_hook, sys.excepthook = sys.excepthook, _tell_uncaught
    _under_watch.append(run)


def _tell_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Call the script's own ``sys.excepthook``, then report this rank's error.

    An error of ours is not reported: every rank raises it, and the journal has it. Nor is any error
    at a prompt, which ends no process.
    """
    _former_hook(kind, error, trace)
    if isinstance(error, Exception) and not isinstance(error, RunnerError | SystemExit):
        is_forked = any(run.owner != os.getpid() for run in _under_watch)
        for run in [] if _is_at_prompt() or is_forked else list(_under_watch):
            run.group.monitor.uncaught(error)


def _is_at_prompt() -> bool:
    return hasattr(sys, "ps1")  # of Python and of IPython, and so of notebooks


def close_at_exit(run: OpenRun, *, wait: bool = True) -> None:
    """Release the run directory, without waiting for other ranks.

    Nothing is done in a process that the script forked from the one that opened it.

    Args:
        wait: for a file that is being written.
    """
    if run.owner != os.getpid():
        return
    _under_watch[:] = [other for other in _under_watch if other is not run]
    if not _under_watch and sys.excepthook is _tell_uncaught:
        sys.excepthook = _former_hook
    run.ring.close(wait=wait)
    run.reporter.close()
    run.backlog.finish()
    run.group.monitor.end()


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


class Holder:
    """An object of the user's that holds an open run until it is closed or the process ends."""

    _run: OpenRun
    _finalizer: weakref.finalize[..., Any]

    def _hold(self, run: OpenRun) -> None:
        self._run = run
        self._finalizer = weakref.finalize(self, close_at_exit, run)
        atexit.register(self._finalizer)
        watch_for_uncaught(run)
        _holders.add(self)

    @staticmethod
    def _release_former(out: str | Path) -> None:
        """At a prompt, release what this process holds of ``out``: a cell is run again."""
        for one in list(_holders) if _is_at_prompt() else ():
            group = one._run.group
            is_same = group.run_dir.out.resolve() == Path(out).resolve()
            if is_same and one._run.owner == os.getpid() and not one._is_closed:
                group.console.say(f"out={out}: the Guard or Ring of before is closed")
                one._release()

    def _release(self) -> None:
        self._finalizer()
        atexit.unregister(self._finalizer)

    @property
    def _is_closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Finish what is under way, and release the directory. Collective."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """:meth:`close`; after an exception neither save nor wait for other ranks."""
        if kind is None:
            self.close()
