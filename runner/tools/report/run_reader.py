"""The state of one run, read incrementally from its files."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.policy.decision.history import History, Incident
from runner.run_dir.paths import RunDir
from runner.run_dir.time_account import TimeAccount, account, plausible_seconds, seconds_by_kind
from runner.system.error import ConfigError
from runner.tools.report.attempts import AttemptIndex, AttemptRow, Thinned, is_odd, row_of
from runner.tools.report.evidence import StepEvidence, evidence
from runner.tools.report.follow import Follower
from runner.tools.report.incident import Line, line_of
from runner.tools.report.side_files import SideFiles, SourceFold, whole
from runner.tools.ring_files import StoredCheckpoint, checkpoints

_HOUR = 3600.0
_MOST_RECENT = 100_000  # lines kept for the account of the last hour
_COMMON_KEYS = 17  # of a metrics line without columns for sources
_EVIDENCE_CHARACTERS = 2000
_ALIVE_SECONDS = 60.0  # the owner beats about every second; a busy file system may show it late


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A journal line at an attempt; ``back_to`` is the attempt that a rollback returned to."""

    line: Line
    attempt: int
    back_to: int | None = None


@dataclass(slots=True, kw_only=True)
class _Fold:
    """Everything gathered from lines; dropped when a file was truncated."""

    thinned: Thinned
    evaluated: Thinned
    sources: SourceFold
    attempts: AttemptIndex = field(default_factory=AttemptIndex)
    lines: list[Line] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waiting: deque[Line] = field(default_factory=deque)  # journal lines without a later attempt yet
    undone: deque[Line] = field(default_factory=deque)  # rollbacks that are not in the account yet
    history: History = field(default_factory=History)
    account: TimeAccount = field(default_factory=TimeAccount)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT))
    journal: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=10_000))
    num_odd: int = 0
    last_action: str = ""
    cursor: int = 0
    eval_loss: float | None = None


class RunReader:
    """Follows the files of one run, without writing.

    Args:
        out: the run's directory.
        columns: about how many columns its curves have, see :class:`Thinned`.
        clock: seconds since the epoch.

    Raises:
        ConfigError: there is no run in ``out``.
    """

    def __init__(self, out: Path, *, columns: int = 1024, clock: Any = time.time) -> None:
        self.run_dir = RunDir(out)
        if not (self.run_dir.journal.exists() or self.run_dir.metrics.exists()):
            raise ConfigError(
                f"{out}: not a run: it has neither metrics.jsonl nor journal.jsonl; give the "
                "directory that was the run's out"
            )
        self.clock = clock
        self.generation = 0  # rises when a file was truncated, and everything is read again
        self._columns = columns
        self._metrics = Follower(self.run_dir.metrics)
        self._journal = Follower(self.run_dir.journal)
        self.sides = SideFiles(self.run_dir, columns=max(32, columns // 5))
        self._evidence: dict[int, StepEvidence] = {}
        self.fold = self._new_fold()

    def _new_fold(self) -> _Fold:
        columns = self._columns
        return _Fold(
            thinned=Thinned(columns=columns),
            evaluated=Thinned(columns=max(64, columns // 4), near=0, most_near=0),
            sources=SourceFold(max(32, columns // 5)),
        )

    def update(self) -> list[AttemptRow]:
        """Read what is new and return the new attempts; a truncated file is read again in full."""
        return list(self.iter_update())

    def iter_update(self) -> Iterator[AttemptRow]:
        """:meth:`update` as an iterator, for callers that show progress."""
        if self._metrics.was_replaced() or self._journal.was_replaced():
            self.generation += 1
            self._metrics.restart()
            self._journal.restart()
            self.fold = self._new_fold()
            self._evidence.clear()
        self.sides.update()
        # The journal first: a decision is written there before the step's metrics line.
        for record in self._journal.lines():
            self._add_journal(record)
        for record in self._metrics.lines():
            yield self._add_metrics(record)
        fold = self.fold
        while fold.undone:
            fold.account.undo(whole(fold.undone.popleft().detail.get("to_step")))

    @property
    def read_bytes(self) -> tuple[int, int]:
        """Bytes of the metrics: read so far, and in the file at the last read."""
        return self._metrics.offset, self._metrics.size

    @property
    def num_damaged(self) -> int:
        """Lines that could not be read or parsed."""
        followed = self._metrics.num_damaged + self._journal.num_damaged + self.sides.num_damaged
        return followed + self.fold.num_odd

    def _add_journal(self, record: dict[str, Any]) -> None:
        fold = self.fold
        line = line_of(record)
        if line is None:
            fold.num_odd += 1
            return
        fold.lines.append(line)
        fold.journal.append(_account_line(line))
        fold.waiting.append(line)
        if line.kind == "rollback":
            fold.undone.append(line)
        for kind in ("lost", "stalls"):
            fold.account.stalled(seconds_by_kind(line.detail.get(kind)))
        fold.account.idle(fold.journal[-1]["detail"]["idle_seconds"])
        try:
            fold.history.add(Incident.from_json(record))
        except (LookupError, TypeError, ValueError, ArithmeticError):
            fold.num_odd += 1

    def _add_metrics(self, record: dict[str, Any]) -> AttemptRow:
        fold = self.fold
        row = row_of(len(fold.attempts), record)
        fold.attempts.add(row)
        is_marked = self._place_marks(row)
        fold.thinned.add(row, odd=is_marked or is_odd(row, record))
        if row.eval_loss == row.eval_loss:
            fold.eval_loss = row.eval_loss
            fold.evaluated.add(row, odd=False)
        if len(record) > _COMMON_KEYS:
            fold.sources.add(record)
        fold.cursor = max(fold.cursor, whole(record.get("cursor")))
        while fold.undone and fold.undone[0].time <= row.time:
            fold.account.undo(whole(fold.undone.popleft().detail.get("to_step")))
        timed = _timed(record)
        if timed is None:
            fold.num_odd += 1
        else:
            fold.account.add(timed)
            fold.recent.append(timed)
        return row

    def _place_marks(self, row: AttemptRow) -> bool:
        """Place the journal lines that came before this row; whether any of them is an incident."""
        fold = self.fold
        is_marked = False
        while fold.waiting and fold.waiting[0].time <= row.time:
            line = fold.waiting.popleft()
            fold.marks.append(self._mark(line, row.attempt))
            is_marked = is_marked or line.kind not in ("episode", "setting_changed", "interval")
        fold.last_action = row.action
        return is_marked

    def _mark(self, line: Line, attempt: int) -> Mark:
        # A discard is journalled before the step's metrics line, what ends a step after it.
        if line.kind == self.fold.last_action:
            attempt -= line.kind in ("rollback", "halt", "rebaseline")
        back = None
        if line.kind == "rollback":
            to_step = whole(line.detail.get("to_step"))
            back = self.fold.attempts.attempt_of(to_step, before=attempt)
        return Mark(line=line, attempt=attempt, back_to=back)

    def marks(self) -> list[Mark]:
        """Every journal line at its attempt; lines after the last step come at the end."""
        end = len(self.fold.attempts)
        return [*self.fold.marks, *(self._mark(line, end) for line in self.fold.waiting)]

    def evidence(self, number: int) -> StepEvidence | None:
        """The evidence of an explained step, cached once it exists."""
        cached = self._evidence.get(number)
        if cached is None:
            cached = evidence(self.run_dir, number, most_characters=_EVIDENCE_CHARACTERS)
            if cached is not None:
                self._evidence[number] = cached
        return cached

    # -- the run as a whole -----------------------------------------------------------------

    def summary(self) -> Mapping[str, Any] | None:
        """``summary.json`` of the newest start; None until that has ended."""
        summary = self.run_dir.stored_summary()
        if summary is None:
            return None
        start = self.last("start")
        number = start.detail.get("incarnation") if start else None
        return summary if number is None or summary.get("incarnation") == number else None

    def settings(self) -> dict[str, Any]:
        """The settings by dotted key; empty if they cannot be read."""
        try:
            return self.run_dir.stored_settings()
        except ConfigError:
            return {}

    def last(self, kind: str) -> Line | None:
        """The newest journal line of a kind."""
        return next((line for line in reversed(self.fold.lines) if line.kind == kind), None)

    def silent_seconds(self) -> float | None:
        """Seconds since the last heartbeat of the run's owner; None without an owner."""
        try:
            beat = (self.run_dir.incarnation / "beat").stat().st_mtime
        except OSError:
            return None
        return max(0.0, float(self.clock()) - beat)

    def is_alive(self) -> bool:
        """Whether the run is training right now."""
        silent = self.silent_seconds()
        return self.summary() is None and silent is not None and silent < _ALIVE_SECONDS

    def began(self) -> float | None:
        """When the run was first started, in seconds since the epoch; None if unknown."""
        return next((line.time for line in self.fold.lines if line.time), None)

    def last_time(self) -> float:
        """The time of the newest line, in seconds since the epoch; 0 without lines."""
        places, lines = self.fold.attempts, self.fold.lines
        newest = places.time_of(len(places) - 1) if len(places) else 0.0
        return max([newest if newest == newest else 0.0, *(line.time for line in lines[-1:])])

    def time_spent(self) -> dict[str, float]:
        """Seconds by kind since the first start; they add up to the wall time."""
        summary = self.summary()
        breakdown = seconds_by_kind(summary.get("time")) if summary else {}
        if breakdown:
            return breakdown
        until = float(self.clock()) if self.is_alive() else self.last_time()
        return self.fold.account.breakdown(until - (self.began() or until))

    def last_hour(self) -> dict[str, float] | None:
        """The same for the last hour; None for a shorter run."""
        until = float(self.clock()) if self.is_alive() else self.last_time()
        since = until - _HOUR
        if (self.began() or until) >= since:
            return None
        steps = [line for line in self.fold.recent if line["time"] >= since]
        journal = [line for line in self.fold.journal if line["time"] >= since]
        return account(steps, journal).breakdown(_HOUR)

    def checkpoints(self) -> list[StoredCheckpoint]:
        """The committed checkpoints on disk, in the order of their serials."""
        return checkpoints(self.run_dir)


def _timed(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a metrics line that the account uses; None if one is missing."""
    seconds = plausible_seconds(record.get("seconds"))
    wait = plausible_seconds(record.get("data_wait_seconds"))
    if seconds is None or wait is None or type(record.get("step")) is not int:
        return None
    return {
        "seconds": seconds,
        "data_wait_seconds": wait,
        "step": record["step"],
        "time": plausible_seconds(record.get("time")) or 0.0,
        "stalls": seconds_by_kind(record.get("stalls")),
        "action": record.get("action"),
    }


def _account_line(line: Line) -> dict[str, Any]:
    """The fields of a journal line that the account uses."""
    detail = {name: seconds_by_kind(line.detail.get(name)) for name in ("lost", "stalls")}
    to_step = whole(line.detail.get("to_step"))
    idle = plausible_seconds(line.detail.get("idle_seconds")) or 0.0
    return {
        "kind": line.kind,
        "time": line.time,
        "detail": {**detail, "to_step": to_step, "idle_seconds": idle},
    }
