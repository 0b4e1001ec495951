"""``journal.jsonl``: a line an incident, never rolled back, on disk before it takes effect.

Rank 0 writes; every rank folds the same incidents into the same :class:`History`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from runner.error import ConfigError
from runner.observe.lines import LineFile, read_lines
from runner.policy.history import History, Incident


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Lines of a journal and their length in bytes.

    Raises:
        ConfigError: a line is not one of ours.
    """
    lines, length = read_lines(path)
    for number, line in enumerate(lines, start=1):
        try:
            Incident.from_json(line)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"{path} line {number}: no journal line ({type(error).__name__}: {error}); "
                "mend it or choose another out"
            ) from None
    return lines, length


class Journal:
    """The run's incidents. ``file`` is None on every rank but the first."""

    def __init__(
        self,
        lines: Iterable[dict[str, Any]],
        *,
        told_to_skip: Iterable[tuple[int, int]],
        file: LineFile | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.history = History(told_to_skip)
        self._file = file
        self._clock = clock
        self._lock = threading.Lock()  # a crash is written by another thread
        known = list(lines)
        self.began = float(known[0].get("time", clock())) if known else clock()
        for line in known:
            self.history.add(Incident.from_json(line))

    # ``began``: seconds since the epoch at which the run was first started.

    @property
    def num_lines(self) -> int:
        return len(self.history.incidents)

    @property
    def attempt(self) -> int:
        """1 for the first start of this run, 2 for the first restart."""
        return self.history.num_starts

    def add(self, incident: Incident) -> None:
        """Write, sync, then fold in: what is not on disk has not happened."""
        with self._lock:
            if self._file is not None:
                starts = self.attempt + int(incident.kind == "start")
                head = {"seq": self.num_lines, "time": self._clock(), "attempt": starts}
                self._file.append(head | incident.to_json(), durably=True)
            self.history.add(incident)

    def add_once(self, incident: Incident) -> bool:
        """:meth:`add`, unless a restart repeats an incident that is there already."""
        known = (incident.kind, incident.step, incident.samples, incident.reason)
        past = self.history.incidents
        is_new = all((i.kind, i.step, i.samples, i.reason) != known for i in past)
        if is_new:
            self.add(incident)
        return is_new
