"""A thread that looks at things while the training thread may be stuck.

It knows nothing of what it looks at; see :mod:`runner.watch.witness` for the looks of a run.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

Look = Callable[[], None]

# A tick that comes later than this was not slow: the whole process had been stopped.
_STOPPED_SECONDS = 5.0


class Watchdog:
    """Calls every look once a tick, in a daemon thread. A look may end the process.

    Args:
        last_resort: where the stacks go, and after how many seconds the process ends, when
            not even this thread can run any more (an extension that holds the GIL).
    """

    def __init__(
        self,
        looks: Sequence[Look],
        *,
        tick_seconds: float,
        last_resort: tuple[IO[str], float] | None = None,
    ) -> None:
        self._looks = looks
        self._tick_seconds = tick_seconds
        self._last_resort = last_resort
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Look no more; returns when the last look is over."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._last_resort is not None:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._tick_seconds):
            now = time.monotonic()
            was_stopped = now - last > self._tick_seconds + _STOPPED_SECONDS
            last = now
            self._arm()
            if was_stopped:
                continue  # give the training thread its turn before judging it
            for look in self._looks:
                try:
                    look()
                except OSError:
                    # A shared file system that stutters is no reason to stop watching.
                    continue

    def _arm(self) -> None:
        if self._last_resort is not None:
            file, seconds = self._last_resort
            faulthandler.dump_traceback_later(seconds, exit=True, file=file)
