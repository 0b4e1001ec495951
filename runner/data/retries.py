"""Repeats what the system refuses for a moment: network storage has hiccups."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

_FIRST_PAUSE_SECONDS: Final = 0.05  # before a read is tried again; doubled each time

Result = TypeVar("Result")


class Retries:
    """Reads again for up to ``seconds`` where an OSError comes.

    After one that never came the next are tried once, until one comes: a storage that is gone must
    not hold a step up for each of its samples.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_refused = False

    def __call__(self, read: Callable[[], Result]) -> Result:
        """Call ``read``, more than once if need be; raises what it raises."""
        limit = time.monotonic() + (0.0 if self._is_refused else self._seconds)
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                result = read()
                break
            except OSError:
                if time.monotonic() + pause > limit:
                    self._is_refused = True
                    raise
                time.sleep(pause)
                pause *= 2
        self._is_refused = False
        return result
