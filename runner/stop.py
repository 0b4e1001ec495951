"""A request to stop: SIGTERM or SIGUSR1 to any rank, told to the others at the step's end."""

from __future__ import annotations

import os
import signal
from types import FrameType


class StopRequest:
    """Whether this rank was asked to stop. A second signal ends the process at once."""

    def __init__(self) -> None:
        self._signal: int | None = None

    def listen(self) -> None:
        """Install the handlers; main thread only."""
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR1, self._note)

    @property
    def is_set(self) -> bool:
        return self._signal is not None

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._signal is not None:
            os._exit(128 + number)
        self._signal = number
