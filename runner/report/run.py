"""One run as its files tell it: a fold that goes on where the last look ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.checkpoint.disk.directory import parse_name
from runner.observe.goodput import KINDS, TimeAccount, account
from runner.policy.decision.history import History, Incident
from runner.policy.retention.records import State
from runner.report.evidence import Evidence, evidence
from runner.report.follow import Follower
from runner.report.incident import Line, line_of
from runner.report.rows import Places, Row, Thinned, is_odd, row_of
from runner.report.side import Sides
from runner.report.source import SourceFold
from runner.run_dir.paths import RunDir
from runner.system.error import ConfigError
from runner.system.files import read_bounded
from runner.system.parsing import parse_json

_SUMMARY_BYTES = 4 << 20
_HOUR = 3600.0
_MOST_RECENT = 100_000  # lines kept for what the last hour was spent on
_PLAIN_KEYS = 17  # of a metrics line without columns of its own
_EVIDENCE_CHARACTERS = 2000
_ALIVE_SECONDS = 60.0  # an owner beats every second or so; a busy file system is slow to say it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A journal line's place among the attempts; ``back_to`` is where a rollback went."""

    line: Line
    attempt: int
    back_to: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One that lies in the ring on disk. ``time`` of its last change, since the epoch."""

    serial: int
    step: int
    state: State
    num_bytes: int
    time: float


@dataclass(slots=True, kw_only=True)
class _Fold:
    """All that is gathered from lines; thrown away when a file was cut."""

    thinned: Thinned
    evaluated: Thinned
    sources: SourceFold
    places: Places = field(default_factory=Places)
    lines: list[Line] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waiting: deque[Line] = field(default_factory=deque)  # journalled, no later attempt yet
    undone: deque[Line] = field(default_factory=deque)  # rollbacks that the account lacks
    history: History = field(default_factory=History)
    account: TimeAccount = field(default_factory=TimeAccount)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT))
    told: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=10_000))
    num_odd: int = 0
    last_action: str = ""
    cursor: int = 0
    eval_loss: float | None = None


class RunReader:
    """Follows the files of one run; only reads.

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
                f"{out}: no run: neither metrics.jsonl nor journal.jsonl is there; name the "
                "directory that a run was given as out"
            )
        self.clock = clock
        self.generation = 0  # rises when a file was cut, and all is read again
        self._columns = columns
        self._metrics = Follower(self.run_dir.metrics)
        self._journal = Follower(self.run_dir.journal)
        self.sides = Sides(self.run_dir, columns=max(32, columns // 5))
        self._evidence: dict[int, Evidence] = {}
        self.fold = self._new_fold()

    def _new_fold(self) -> _Fold:
        columns = self._columns
        return _Fold(
            thinned=Thinned(columns=columns),
            evaluated=Thinned(columns=max(64, columns // 4), near=0, most_near=0),
            sources=SourceFold(max(32, columns // 5)),
        )

    def update(self) -> list[Row]:
        """Read what is new; the new attempts. A file that was cut is read again from its begin."""
        return list(self.iter_update())

    def iter_update(self) -> Iterator[Row]:
        """:meth:`update` one at a time, for who tells how far it is."""
        if self._metrics.was_replaced() or self._journal.was_replaced():
            self.generation += 1
            self._metrics.begin_anew()
            self._journal.begin_anew()
            self.fold = self._new_fold()
            self._evidence.clear()
        self.sides.update()
        # The journal first: a decision is written there before the step's own line.
        for told in self._journal.lines():
            self._add_journal(told)
        for told in self._metrics.lines():
            yield self._add_metrics(told)
        fold = self.fold
        while fold.undone:
            fold.account.undo(_whole(fold.undone.popleft().detail.get("to_step")))

    @property
    def read_bytes(self) -> tuple[int, int]:
        """Of the metrics: read, and in the file at the last look."""
        return self._metrics.offset, self._metrics.size

    @property
    def num_damaged(self) -> int:
        """Lines that could not be read, or made no sense."""
        followed = self._metrics.num_damaged + self._journal.num_damaged + self.sides.num_damaged
        return followed + self.fold.num_odd

    def _add_journal(self, told: dict[str, Any]) -> None:
        fold = self.fold
        line = line_of(told)
        if line is None:
            fold.num_odd += 1
            return
        fold.lines.append(line)
        fold.told.append(_account_line(line))
        fold.waiting.append(line)
        if line.kind == "rollback":
            fold.undone.append(line)
        for kind in ("lost", "stalls"):
            fold.account.stalled(_stalls(line.detail.get(kind)))
        try:
            fold.history.add(Incident.from_json(told))
        except (LookupError, TypeError, ValueError, ArithmeticError):
            fold.num_odd += 1

    def _add_metrics(self, told: dict[str, Any]) -> Row:
        fold = self.fold
        row = row_of(len(fold.places), told)
        fold.places.add(row)
        is_marked = self._place_marks(row)
        fold.thinned.add(row, odd=is_marked or is_odd(row, told))
        if row.eval_loss == row.eval_loss:
            fold.eval_loss = row.eval_loss
            fold.evaluated.add(row, odd=False)
        if len(told) > _PLAIN_KEYS:
            fold.sources.add(told)
        fold.cursor = max(fold.cursor, _whole(told.get("cursor")))
        while fold.undone and fold.undone[0].time <= row.time:
            fold.account.undo(_whole(fold.undone.popleft().detail.get("to_step")))
        timed = _timed(told)
        if timed is None:
            fold.num_odd += 1
        else:
            fold.account.add(timed)
            fold.recent.append(timed)
        return row

    def _place_marks(self, row: Row) -> bool:
        """Give what was journalled before this row its place; whether there was anything."""
        fold = self.fold
        found = False
        while fold.waiting and fold.waiting[0].time <= row.time:
            line = fold.waiting.popleft()
            fold.marks.append(self._mark(line, row.attempt))
            found = found or line.kind not in ("episode", "setting_changed", "interval")
        fold.last_action = row.action
        return found

    def _mark(self, line: Line, attempt: int) -> Mark:
        # What ends a step is journalled behind the step's own line, a discard before it.
        if line.kind == self.fold.last_action:
            attempt -= line.kind in ("rollback", "halt", "rebaseline")
        back = None
        if line.kind == "rollback":
            to_step = _whole(line.detail.get("to_step"))
            back = self.fold.places.attempt_of(to_step, before=attempt)
        return Mark(line=line, attempt=attempt, back_to=back)

    def marks(self) -> list[Mark]:
        """Every journal line at its place; what came after the last step stands behind it."""
        end = len(self.fold.places)
        return [*self.fold.marks, *(self._mark(line, end) for line in self.fold.waiting)]

    def evidence(self, number: int) -> Evidence | None:
        """What was written of an explained step; looked for once it is there."""
        found = self._evidence.get(number)
        if found is None:
            found = evidence(self.run_dir, number, most_characters=_EVIDENCE_CHARACTERS)
            if found is not None:
                self._evidence[number] = found
        return found

    # -- what the files say of the whole ----------------------------------------------------

    def summary(self) -> Mapping[str, Any] | None:
        """``summary.json`` of the newest start; None while that one has not ended."""
        try:
            told = parse_json(read_bounded(self.run_dir.summary, _SUMMARY_BYTES, follow=True))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(told, dict):
            return None
        start = self.last("start")
        number = start.detail.get("incarnation") if start else None
        return told if number is None or told.get("incarnation") == number else None

    def settings(self) -> dict[str, Any]:
        """Dotted keys; empty where they cannot be read."""
        try:
            return self.run_dir.stored_settings()
        except ConfigError:
            return {}

    def last(self, kind: str) -> Line | None:
        """The newest journal line of a kind."""
        return next((line for line in reversed(self.fold.lines) if line.kind == kind), None)

    def silent_seconds(self) -> float | None:
        """Since the owner last gave a sign of life; None when there never was an owner."""
        try:
            beat = (self.run_dir.incarnation / "beat").stat().st_mtime
        except OSError:
            return None
        return max(0.0, float(self.clock()) - beat)

    def is_alive(self) -> bool:
        """Whether somebody is training right now."""
        silent = self.silent_seconds()
        return self.summary() is None and silent is not None and silent < _ALIVE_SECONDS

    def began(self) -> float | None:
        """Seconds since the epoch at which the run was first started."""
        return next((line.time for line in self.fold.lines if line.time), None)

    def last_time(self) -> float:
        """Of the newest line, since the epoch; 0 without any."""
        places, lines = self.fold.places, self.fold.lines
        newest = places.time_of(len(places) - 1) if len(places) else 0.0
        return max([newest if newest == newest else 0.0, *(line.time for line in lines[-1:])])

    def time_spent(self) -> dict[str, float]:
        """Seconds by kind since the first start; they add up to the wall time."""
        summary = self.summary()
        told = _stalls(summary.get("time")) if summary else {}
        if told:
            return told
        until = float(self.clock()) if self.is_alive() else self.last_time()
        return self.fold.account.breakdown(until - (self.began() or until))

    def last_hour(self) -> dict[str, float] | None:
        """The same of the newest hour; None for a run that took less."""
        until = float(self.clock()) if self.is_alive() else self.last_time()
        since = until - _HOUR
        if (self.began() or until) >= since:
            return None
        steps = [line for line in self.fold.recent if line["time"] >= since]
        told = [line for line in self.fold.told if line["time"] >= since]
        return account(steps, told).breakdown(_HOUR)

    def checkpoints(self) -> list[Checkpoint]:
        """What lies in the ring on disk, committed, by serial."""
        found = []
        try:
            folders = sorted(self.run_dir.ring.iterdir())
        except OSError:
            return []
        for folder in folders:
            name = parse_name(folder.name)
            made = _checkpoint(folder, *name) if name else None
            if made is not None:
                found.append(made)
        return sorted(found, key=lambda one: one.serial)


def _checkpoint(folder: Path, serial: int, step: int) -> Checkpoint | None:
    try:
        files = {file.name: file.stat() for file in folder.iterdir()}
    except OSError:  # it was just retired
        return None
    if "COMMITTED" not in files:
        return None
    state = State.committed
    if "TAINTED" in files:
        state = State.tainted
    elif "CLEAN" in files:
        state = State.clean
    data = [found.st_size for name, found in files.items() if name.endswith(".bin")]
    return Checkpoint(
        serial=serial,
        step=step,
        state=state,
        num_bytes=sum(data),
        time=files["COMMITTED"].st_mtime,
    )


def _timed(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the account takes of a metrics line; None where the line lacks it."""
    seconds, wait = _seconds(told.get("seconds")), _seconds(told.get("data_wait_seconds"))
    if seconds is None or wait is None or type(told.get("step")) is not int:
        return None
    return {
        "seconds": seconds,
        "data_wait_seconds": wait,
        "step": told["step"],
        "time": _seconds(told.get("time")) or 0.0,
        "stalls": _stalls(told.get("stalls")),
        "action": told.get("action"),
    }


def _account_line(line: Line) -> dict[str, Any]:
    """What the account takes of a journal line."""
    detail = {name: _stalls(line.detail.get(name)) for name in ("lost", "stalls")}
    to_step = _whole(line.detail.get("to_step"))
    return {"kind": line.kind, "time": line.time, "detail": detail | {"to_step": to_step}}


def _seconds(value: Any) -> float | None:
    if type(value) is not float and type(value) is not int:
        return None
    return float(value) if 0 <= value < 1e11 else None


def _stalls(value: Any) -> dict[str, float]:
    if not value or not isinstance(value, dict):  # empty in nearly every line
        return {}
    told = {kind: _seconds(value.get(kind)) for kind in KINDS}
    return {kind: seconds for kind, seconds in told.items() if seconds is not None}


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else 0
