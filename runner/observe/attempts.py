"""The axis of trackers: the number of attempted steps, which never goes back.

Not after a rollback, and not after a crash, where the steps since the checkpoint are done again:
trackers drop values for a number that they already have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.system.files import read_bounded, write_json
from runner.system.parsing import parse_json

_AHEAD = 100  # numbers reserved at a time: a crash leaves a gap of at most this many
_MOST_BYTES = 4096


class Attempts:
    """Counts up, over all starts of a run.

    Args:
        path: file of the reserved numbers.
        check: raises when this process may no longer write.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._check = check
        self.newest = self._aside = _read(path)

    newest: int
    """The number given last; 0 before the first."""

    def next(self) -> int:
        """The number of the next attempt, from 1.

        Raises:
            OSError: no further numbers can be reserved.
        """
        if self.newest >= self._aside:
            self._keep(self.newest + _AHEAD)
        self.newest += 1
        return self.newest

    def close(self) -> None:
        """Give back the unused numbers.

        Raises:
            OSError: it cannot be written.
        """
        self._keep(self.newest)

    def _keep(self, number: int) -> None:
        self._check()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"newest": number})
        self._aside = number


def _read(path: Path) -> int:
    try:
        stored: Any = parse_json(read_bounded(path, _MOST_BYTES))
        number = stored["newest"]
    except (OSError, ValueError, LookupError, TypeError):
        return 0
    return number if type(number) is int and number >= 0 else 0
