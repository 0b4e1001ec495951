"""Ends a rank's process at once: waits for no thread and no peer."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from typing import NoReturn

from runner.distributed.env import own_rank, rank_name, tell_exit
from runner.system import output
from runner.system.environment import variables

# Seconds for the last output and the exit code's file; the disk may not answer.
_LEAVE_SECONDS = 5.0
# So many seconds later faulthandler ends a process in which no Python code can run any more.
_BEHIND_SECONDS = 1.0


def leave(code: int) -> NoReturn:
    """End this rank without finalizing the interpreter; write its exit code for the launcher.

    Finalizing is not safe. gloo's threads outlive a closed group, and about one finished run in
    twenty ended with SIGABRT ("terminate called without an active exception"). The interpreter
    would also join threads and child processes, which may wait for ever.
    """
    try:
        end_within(_LEAVE_SECONDS, code)
        tell_exit(variables(), rank_name(own_rank(variables())), code)
        output.finish()
    finally:
        os._exit(code)


def leave_after_exit_functions(code: int) -> NoReturn:
    """End a command: what is registered for the end runs, and the interpreter is not finalized.

    While that takes its modules apart, C++ extensions complain of what they think is leaked, some
    30 lines of Triton's below our last one (torch 2.15).
    """
    try:
        output.finish()
        # As the interpreter does: idle threads of a pool end only when they are told to.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


def end_within(seconds: float, code: int) -> Callable[[], None]:
    """End this process after ``seconds``, whatever it is doing then.

    If a library holds the interpreter's lock, the exit code is 1 instead of ``code``.

    Returns:
        A function that cancels this.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # the system has no more threads
        timer.start()
    with contextlib.suppress(OSError, ValueError):
        # The stacks are reported elsewhere, and writing to a full pipe could block.
        nothing = open(os.devnull, "w")  # noqa: SIM115  # as long as the process lives
        faulthandler.dump_traceback_later(seconds + _BEHIND_SECONDS, exit=True, file=nothing)

    def cancel() -> None:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    return cancel
