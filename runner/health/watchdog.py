"""A thread that looks at things while the training thread may be stuck.

It knows nothing of what it looks at; see :mod:`runner.health.rank_monitor` for the looks of a run.
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
        """Take further looks; from any thread."""
        self._looks.extend(looks)
        self._last_resort = last_resort or self._last_resort

    def resort_to(self, last_resort: tuple[IO[str], float] | None) -> None:
        """Take another last resort, or none; from any thread."""
        self._last_resort = last_resort

    def stop(self) -> None:
        """Look no more; returns when the last look is over, or does not come to an end."""
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
                continue  # give the training thread its turn before judging it
            for look in list(self._looks):
                self._call(look)

    def _call(self, look: Look) -> None:
        """What one look raises keeps no other from being taken, nor itself the next time."""
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
