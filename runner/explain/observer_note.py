"""Notes on disk for the next start, if this one ends within an observer. Two kinds.

A rank that raises alone between two collectives of an engine cannot meet the others, so that start
ends. The rank leaves a note: the next start leaves that observer out, and lets the ladder
decide on a step that was being explained, without probes.

A rank that dies in the probes of a step gives no reason. One start may end there by chance, as by a
kill, and must change nothing; after the second in a row that step has no probes any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.health.root_cause import OWN, whose_fault
from runner.policy.decision.history import ENDED_STARTS, EXPLAIN, OBSERVER, Incident
from runner.policy.decision.signals import StepSignals
from runner.system.error import LeaveError, Preempted
from runner.system.files import read_bounded, write_json
from runner.system.parsing import parse_json
from runner.train.run import EngineRun, Run

_MOST_BYTES = 4096
_MOST_STARTS = 2


class ObserverNote:
    """A journal line that the next start may have to write.

    Args:
        path: the file; None for a rank without one, which neither reads nor writes.
        check: raises if another incarnation owns the directory.
    """

    def __init__(self, path: Path | None, check: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._check = check

    @classmethod
    def of(cls, run: Run, name: str | int) -> ObserverNote:
        """A note of this rank; those that have a name are rank 0's."""
        is_ours = run.group.is_first or isinstance(name, int)
        path = run.group.run_dir.observer_note(name) if is_ours else None
        return cls(path, run.lease.check)

    def begin(self, signals: StepSignals) -> None:
        """Note durably that the probes of this step begin.

        Raises:
            OSError: it cannot be written.
        """
        before = self.read()
        is_again = before is not None and before.step == signals.step
        starts = 1 + (before.detail[ENDED_STARTS] if before is not None and is_again else 0)
        why = f"the {starts} starts before ended in it" if starts >= _MOST_STARTS else ""
        self._write(_line(EXPLAIN, signals.step, why, starts, (signals.start, signals.stop)))

    def write(self, observer: str, step: int, error: Exception, why: str) -> None:
        """See :class:`runner.distributed.observers.LastWords`."""
        if whose_fault(error) == OWN:  # it may only have lost contact with one that was killed
            with contextlib.suppress(OSError):
                self._write(_line(observer, step, f"{why}; the start before ended in it", 1))

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

    def _write(self, line: Incident) -> None:
        if self._path is not None:
            self._check()
            write_json(self._path, line.to_json(), indent=None)

    def read(self) -> Incident | None:
        """The note, without a reason if it decides nothing; None if there is none of ours."""
        if self._path is None:
            return None
        try:
            line = Incident.from_json(parse_json(read_bounded(self._path, _MOST_BYTES)))
        except (OSError, ValueError, TypeError, LookupError, RecursionError):
            return None
        return line if type(line.detail.get(ENDED_STARTS)) is int else None


def leave_out_ended(run: EngineRun) -> None:
    """Leave out, and journal, what has ended the starts before this one. Collective."""
    run_dir = run.group.run_dir
    paths = sorted(run_dir.debug.glob(run_dir.observer_note("*").name))
    notes = [ObserverNote(path) for path in paths if run.group.is_first]
    read = [(note, line) for note in notes if (line := note.read()) is not None]
    ended = {line.detail["observer"]: line.to_json() for _, line in read if line.reason}
    for name, line in run.ranks.from_first(ended).items():
        run.written.report(Incident.from_json(line))
        if name != EXPLAIN:
            run.observers.leave_out(name)
    for note, line in read:
        if line.detail["observer"] in ended:
            note.remove()


def _line(
    observer: str, step: int, why: str, starts: int, samples: tuple[int, int] | None = None
) -> Incident:
    """``why``: empty if nothing is decided yet."""
    is_step = observer == EXPLAIN
    what = f"explaining step {step}" if is_step else observer
    return Incident(
        kind=OBSERVER,
        step=step,
        decision=f"{'the ladder decides on this step' if is_step else 'go on'} without it",
        reason=f"{what}: not tried: {why}" if why else "",
        samples=samples,
        detail={"observer": observer, ENDED_STARTS: starts},
    )
