"""Ends a rank's process at once: waits for no thread and no peer."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from typing import NoReturn

from runner.distributed.env import own_rank, rank_name, tell_exit
from runner.system import output
from runner.system.environment import variables

# For the last words and the exit code's file; the disk may not answer.
_LEAVE_SECONDS = 5.0
# What ends a process in which no Python code can run any more comes so much later.
_BEHIND_SECONDS = 1.0


def leave(code: int) -> NoReturn:
    """End this rank without finalizing the interpreter, and tell the launcher how.

    Threads that gloo leaves behind a closed group made about one finished run in twenty end
    there with SIGABRT ("terminate called without an active exception"). And the interpreter would
    join threads and child processes: whatever they wait for, this process would wait for as well.
    """
    try:
        end_within(_LEAVE_SECONDS, code)
        tell_exit(variables(), rank_name(own_rank(variables())), code)
        output.finish()
    finally:
        os._exit(code)


def end_within(seconds: float, code: int) -> Callable[[], None]:
    """See to it that this process is gone then, whatever holds it up from here on.

    Where a library keeps the interpreter's lock for itself the exit code is 1.

    Returns:
        Takes it back.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no thread to be had any more
        timer.start()
    with contextlib.suppress(OSError, ValueError):
        # Into nothing: the stacks are told elsewhere, and a full pipe would hold it up.
        nothing = open(os.devnull, "w")  # noqa: SIM115  # as long as the process lives
        faulthandler.dump_traceback_later(seconds + _BEHIND_SECONDS, exit=True, file=nothing)

    def cancel() -> None:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    return cancel
