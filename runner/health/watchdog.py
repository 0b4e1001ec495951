"""A thread that runs checks while the training thread may be stuck.

It does not know the checks: :mod:`runner.health.rank_monitor` has those of a run, and
:mod:`runner.health.hang` decides that a rank hangs.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

Look = Callable[[], None]

_log = logging.getLogger(__name__)

# A tick that comes later than this was not slow: the whole process had been stopped.
_STOPPED_SECONDS = 5.0
_LAST_LOOK_SECONDS = 10.0


class Watchdog:
    """Calls every check once a tick, in a daemon thread. A check may end the process.

    Args:
        last_resort: the file for the stacks, and the seconds after which faulthandler ends the
            process if not even this thread can run (an extension holds the GIL).
    """

    def __init__(
        self,
        looks: Sequence[Look],
        *,
        tick_seconds: float,
        last_resort: tuple[IO[str], float] | None = None,
    ) -> None:
        self._looks = list(looks)
        self._tick_seconds = tick_seconds
        self._last_resort = last_resort
        self._is_armed = False
        self._said: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(
        self, looks: Sequence[Look], *, last_resort: tuple[IO[str], float] | None = None
    ) -> None:
        """Add checks; from any thread."""
        self._looks.extend(looks)
        self._last_resort = last_resort or self._last_resort

    def resort_to(self, last_resort: tuple[IO[str], float] | None) -> None:
        """Replace the last resort, or remove it; from any thread."""
        self._last_resort = last_resort

    def stop(self) -> None:
        """Stop, and wait for the last check for a limited time."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_LOOK_SECONDS)
        if self._is_armed:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._tick_seconds):
            now = time.monotonic()
            was_stopped = now - last > self._tick_seconds + _STOPPED_SECONDS
            last = now
            self._arm()
            if was_stopped:
                continue  # let the training thread run before it is judged
            for look in list(self._looks):
                self._call(look)

    def _call(self, look: Look) -> None:
        """Call one check; an error in it stops neither the others nor its next turn."""
        try:
            look()
        except OSError:
            return  # a shared file system that stutters
        except Exception as error:
            name = getattr(look, "__name__", "a look")
            if name not in self._said:
                self._said.add(name)
                _log.error("watchdog: %s raised %s: %s", name, type(error).__name__, error)

    def _arm(self) -> None:
        wanted = self._last_resort
        if wanted is not None:
            self._is_armed = True
            faulthandler.dump_traceback_later(wanted[1], exit=True, file=wanted[0])
        elif self._is_armed:
            self._is_armed = False
            faulthandler.cancel_dump_traceback_later()
