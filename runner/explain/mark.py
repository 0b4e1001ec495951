"""Notes on disk which step is being explained, so that its probes end no start for ever.

A rank that fails alone between two collectives of an engine cannot meet the others: that start
ends, and the next one meets the same bad step. One start may end there by chance, as by a kill,
and must change nothing; after the second in a row the ladder decides on that step without probes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from runner.policy.decision.history import OBSERVER, Incident
from runner.policy.decision.signals import StepSignals
from runner.system.error import LeaveError, Preempted
from runner.system.files import read_bounded, write_json
from runner.system.parsing import parse_json

_MOST_BYTES = 4096
_MOST_STARTS = 2


@dataclass(frozen=True, slots=True)
class _Note:
    """``starts``: how many in a row have begun to explain this step, and not finished."""

    step: int
    start: int
    stop: int
    starts: int


class ProbeMark:
    """The note of one run directory.

    Args:
        path: the file; None on all ranks but 0, which neither read nor write.
        check: raises if another incarnation owns the directory.
    """

    def __init__(self, path: Path | None, check: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._check = check

    def begin(self, signals: StepSignals) -> None:
        """Note durably that the probes of this step begin.

        Raises:
            OSError: it cannot be written.
        """
        if self._path is None:
            return
        before = self._read()
        is_again = before is not None and before.step == signals.step
        starts = 1 + (before.starts if before is not None and is_again else 0)
        self._check()
        note = _Note(signals.step, signals.start, signals.stop, starts)
        write_json(self._path, asdict(note), indent=None)

    @contextlib.contextmanager
    def ended_after(self) -> Iterator[None]:
        """Remove the note at the end, also at one that was asked for."""
        try:
            yield
        except (LeaveError, Preempted):
            self.remove()
            raise
        self.remove()

    def remove(self) -> None:
        """Remove the note; one that stays counts as one start, which decides nothing."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def incident(self) -> Incident | None:
        """The journal's line if two starts in a row have ended in the probes of one step."""
        note = self._read()
        if note is None or note.starts < _MOST_STARTS:
            return None
        return Incident(
            kind=OBSERVER,
            step=note.step,
            decision="the ladder decides on this step without probes",
            reason=f"explaining step {note.step}: not tried: "
            f"the {note.starts} starts before ended in it",
            samples=(note.start, note.stop),
            detail={"observer": "explain", "ended_starts": note.starts},
        )

    def _read(self) -> _Note | None:
        if self._path is None:
            return None
        try:
            tree = parse_json(read_bounded(self._path, _MOST_BYTES))
            note = _Note(**tree)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return note if all(type(value) is int for value in asdict(note).values()) else None
