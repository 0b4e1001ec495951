"""The state of one run, read incrementally from its files: the one reader of page and terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from runner.policy.alert import RUNNING, STARTING
from runner.policy.columns import FIELDS, PACE_STEPS
from runner.policy.decision.history import History, Incident
from runner.policy.retention.records import State, parse_name
from runner.run_dir.paths import SAMPLES, RunDir, read_explanation
from runner.run_dir.time_account import TimeAccount, account, plausible_seconds, seconds_by_kind
from runner.system.error import ConfigError
from runner.system.files import read_bounded
from runner.system.json_lines import last_lines
from runner.system.units import duration
from runner.tools.report.attempts import AttemptIndex, AttemptRow, Thinned, is_odd, row_of
from runner.tools.report.follow import Follower, whole
from runner.tools.report.incident import Line, line_of, texts
from runner.tools.report.side_files import LayerFold, MetricFold, RankFold, RingFold, SourceFold
from runner.tools.report.vitals import Vitals, timed_of

_HOUR = 3600.0
_UNIT = "nats per token"  # of runs whose start does not say
_MOST_RECENT = 100_000  # lines kept for the account of the last hour
# Of a metrics line without further columns; it names what is not finite only where there is such.
_COMMON_KEYS = len(FIELDS) - 1
_TEXT_BYTES, _TEXT_CHARACTERS = 1 << 20, 2000  # of the samples of an explained step


Evidence = tuple[Mapping[str, Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A journal line at an attempt; ``back_to`` is the attempt that a rollback returned to."""

    line: Line
    attempt: int
    back_to: int | None = None

    @property
    def is_news(self) -> bool:
        """Whether the mark is worth drawing: every kind except the run's first start."""
        return self.line.kind != "start" or self.line.attempt_number > 1


@dataclass(slots=True, kw_only=True)
class _Fold:
    """Everything gathered from lines; dropped when a file was truncated."""

    thinned: Thinned
    evaluated: Thinned
    sources: SourceFold
    own: MetricFold
    layers: LayerFold
    ranks: RankFold
    ring: RingFold = field(default_factory=RingFold)
    num_side_lines: int = 0  # of layers, ranks and ring
    attempts: AttemptIndex = field(default_factory=AttemptIndex)
    lines: list[Line] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    waiting: deque[Line] = field(default_factory=deque)  # journal lines without a later attempt yet
    undone: deque[Line] = field(default_factory=deque)  # rollbacks that are not in the account yet
    history: History = field(default_factory=History)
    account: TimeAccount = field(default_factory=TimeAccount)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_RECENT))
    down: dict[int, float] = field(default_factory=dict)  # seconds, by the first attempt after it
    num_odd: int = 0
    last_action: str = ""
    cursor: int = 0
    eval_loss: float | None = None
    applied_loss: float | None = None  # of the last applied step
    applied_attempt: int = -1  # of the same step; -1 for none


class RunReader:
    """Follows the files of one run, without writing.

    Args:
        out: the run's directory.
        columns: about how many columns its curves have, see :class:`Thinned`.
        clock: seconds since the epoch.

    Raises:
        ConfigError: there is no run in ``out``.
    """

    def __init__(
        self, out: Path, *, columns: int = 1024, clock: Callable[[], float] = time.time
    ) -> None:
        self.run_dir = RunDir(out)
        if not out.is_dir():
            raise ConfigError(f"{out}: there is no such directory; give that of a run (its out)")
        is_ours = self.run_dir.journal.exists() or any(
            "step" in line for line in last_lines(self.run_dir.metrics)
        )
        if not is_ours:
            raise ConfigError(
                f"{out}: not a run: it has neither journal.jsonl nor steps in metrics.jsonl; give "
                "the directory that was the run's out"
            )
        self.clock = clock
        self.generation = 0  # rises when a file was truncated, and everything is read again
        self._columns = columns
        paths = self.run_dir
        self._metrics, self._journal = Follower(paths.metrics), Follower(paths.journal)
        self._sides = [
            Follower(path) for path in (paths.layers, paths.rank_times, paths.ring_lines)
        ]
        self._evidence: dict[int, Evidence] = {}
        self._vitals = Vitals(self.run_dir, clock)
        self.fold = self._new_fold()

    def _new_fold(self) -> _Fold:
        columns, few = self._columns, max(32, self._columns // 5)
        return _Fold(
            thinned=Thinned(columns=columns),
            evaluated=Thinned(columns=max(64, columns // 4), near=0, most_near=0),
            sources=SourceFold(few),
            own=MetricFold(few),
            layers=LayerFold(few),
            ranks=RankFold(few),
        )

    def update(self) -> list[AttemptRow]:
        """Read what is new and return the new attempts; a truncated file is read again in full."""
        return list(self.iter_update())

    def iter_update(self) -> Iterator[AttemptRow]:
        """:meth:`update` as an iterator, for callers that show progress."""
        if any(follower.was_replaced() for follower in self._followers):
            self.generation += 1
            for follower in self._followers:
                follower.restart()
            self.fold = self._new_fold()
            self._evidence.clear()
        fold = self.fold
        adds = (fold.layers.add, fold.ranks.add, fold.ring.add)
        for follower, add in zip(self._sides, adds, strict=True):
            for line in follower.lines():
                add(line)
                fold.num_side_lines += 1
        # The journal first: a decision is written there before the step's metrics line.
        for record in self._journal.lines():
            self._add_journal(record)
        for record in self._metrics.lines():
            yield self._add_metrics(record)
        while fold.undone:
            fold.account.undo(whole(fold.undone.popleft().detail.get("to_step")))

    @property
    def _followers(self) -> list[Follower]:
        return [self._metrics, self._journal, *self._sides]

    @property
    def read_bytes(self) -> tuple[int, int]:
        """Bytes of all files: read so far, and in all."""
        there = [one.path.stat().st_size for one in self._followers if one.path.exists()]
        return sum(one.offset for one in self._followers), sum(there)

    @property
    def num_damaged(self) -> int:
        """Lines that could not be read or parsed."""
        return sum(follower.num_damaged for follower in self._followers) + self.fold.num_odd

    def _add_journal(self, record: dict[str, Any]) -> None:
        fold = self.fold
        line = line_of(record)
        if line is None:
            fold.num_odd += 1
            return
        fold.lines.append(line)
        fold.waiting.append(line)
        if line.kind == "rollback":
            fold.undone.append(line)
        detail = _account_line(line)["detail"]
        for kind in ("lost", "stalls"):
            fold.account.stalled(detail[kind])
        fold.account.idle(detail["idle_seconds"])
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
        if row.is_applied:
            fold.applied_loss, fold.applied_attempt = row.loss, row.attempt
        if row.eval_loss == row.eval_loss:
            fold.eval_loss = row.eval_loss
            fold.evaluated.add(row, odd=False)
        if len(record) > _COMMON_KEYS:
            fold.sources.add(record)
            fold.own.add(record)
        fold.cursor = max(fold.cursor, whole(record.get("cursor")))
        while fold.undone and fold.undone[0].time <= row.time:
            fold.account.undo(whole(fold.undone.popleft().detail.get("to_step")))
        timed = timed_of(record)
        if timed is None:
            fold.num_odd += 1
        else:
            fold.account.add(timed)
            if down := timed["stalls"].get("restart"):
                fold.down[row.attempt] = down
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
            # Of step 0, the initial state, there is no attempt.
            back = self.fold.attempts.attempt_of(max(1, to_step), before=attempt)
        return Mark(line=line, attempt=attempt, back_to=back)

    def marks(self) -> list[Mark]:
        """Every journal line at its attempt; lines after the last step come at the end."""
        end = len(self.fold.attempts)
        return [*self.fold.marks, *(self._mark(line, end) for line in self.fold.waiting)]

    def evidence(self, number: int) -> Evidence | None:
        """The evidence of an explained step, kept once it exists: probes by name, and samples."""
        if number not in self._evidence:
            folder = self.run_dir.explanation(number)
            if folder.is_symlink() or self.run_dir.explanations.is_symlink():
                return None
            try:
                probes = read_explanation(folder)["probes"]
                text = read_bounded(folder / SAMPLES, _TEXT_BYTES).decode(errors="replace")
            except (OSError, ValueError, RecursionError):
                return None
            # The first line repeats the verdict.
            samples = text.partition("\n")[2].strip()[:_TEXT_CHARACTERS]
            self._evidence[number] = probes, samples
        return self._evidence[number]

    # -- the run as a whole -----------------------------------------------------------------

    def summary(self) -> Mapping[str, Any] | None:
        """``summary.json`` of the newest start; None until that has ended."""
        return self._vitals.summary(self._incarnation())

    def _incarnation(self) -> object:
        start = self.last("start")
        return start.detail.get("incarnation") if start else None

    @property
    def unit(self) -> str:
        """Of losses; empty where it is not known."""
        start = self.last("start")
        return str(start.detail.get("unit", _UNIT)) if start else _UNIT

    @property
    def counted(self) -> str:
        """What the speed is of: tokens, or samples where there are none."""
        start = self.last("start")
        return str(start.detail.get("counted", "tokens")) if start else "tokens"

    def settings(self) -> dict[str, Any]:
        """The settings by dotted key; empty if they cannot be read."""
        return self._vitals.settings()

    def last(self, kind: str) -> Line | None:
        """The newest journal line of a kind."""
        return next((line for line in reversed(self.fold.lines) if line.kind == kind), None)

    def silent_seconds(self) -> float | None:
        """See :meth:`Vitals.silent_seconds`."""
        return self._vitals.silent_seconds()

    def is_alive(self) -> bool:
        """Whether the run is training right now."""
        return self.status() in (RUNNING, STARTING)

    def status(self) -> str:
        """See :class:`RunStatus`; reads the summary and the heartbeat only."""
        return self._vitals.status(self._incarnation(), has_steps=bool(len(self.fold.attempts)))

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
        # A run that was not ended is down: its time goes on.
        until, last = self.clock(), self.last_time()
        spent = self.fold.account.breakdown(until - (self.began() or until))
        if not self.is_alive():
            down = min(spent["other"], max(0.0, until - last))
            spent["other"] -= down
            spent["restart"] = spent.get("restart", 0.0) + down
        return spent

    def last_hour(self) -> dict[str, float] | None:
        """The same for the last hour; None for a shorter run."""
        until = self.clock() if self.is_alive() else self.last_time()
        since = until - _HOUR
        if (self.began() or until) >= since:
            return None
        steps = [line for line in self.fold.recent if line["time"] >= since]
        journal = [_account_line(line) for line in self.fold.lines if line.time >= since]
        return account(steps, journal).breakdown(_HOUR)

    def step_seconds(self) -> float | None:
        """The console's pace: the mean of the newest attempted steps; None without any."""
        newest = [one["seconds"] for one in islice(reversed(self.fold.recent), PACE_STEPS)]
        return sum(newest) / len(newest) if newest else None

    def checkpoints(self) -> list[StoredCheckpoint]:
        """The committed checkpoints on disk, in the order of their serials."""
        return stored_checkpoints(self.run_dir)


class RunStatus:
    """The status of a run now.

    ``status`` is done, halted, preempted, failed, running, starting or silent; ``unit`` that of
    losses. ``lost_steps`` and ``lost_seconds`` are what a restart from disk would compute again
    after a crash right now; None without a checkpoint. ``silent_seconds`` counts from the last
    heartbeat.
    """

    def __init__(self, run: RunReader) -> None:
        fold, summary = run.fold, run.summary() or {}
        last, attempts = fold.thinned.last, fold.attempts
        self.status = run.status()
        self.reason = str(summary.get("reason", ""))[:2000]
        self.step = _step(last, summary)
        total = run.settings().get("steps")
        self.total: int | None = total if type(total) is int else None
        halt = run.last("halt")
        self.to_try = texts(halt.detail.get("settings")) if halt else []
        self.loss, self.unit = _finite(fold.applied_loss), run.unit
        self.as_of = run.clock()
        self.eval_loss = _finite(fold.eval_loss)
        self.counted, self.speed = run.counted, _finite(last.tokens_per_second if last else None)
        spent = run.time_spent()
        self.wall_seconds = sum(spent.values())
        self.goodput = spent.get("productive", 0.0) / (self.wall_seconds or 1.0)
        self.silent_seconds = run.silent_seconds()
        self.discards = fold.history.num_discarded
        self.rollbacks = len(fold.history.rollbacks)
        self.restarts = fold.history.num_restarts

        remaining, pace = max(0, (self.total or 0) - self.step), run.step_seconds()
        is_running = self.status == "running"
        self.eta_seconds = remaining * pace if is_running and remaining and pace else None
        ring = run.checkpoints()
        proven = [one for one in ring if one.state is State.clean]
        usable = [one for one in ring if one.state is not State.tainted]
        self.proven_step = proven[-1].step if proven else None
        self.proven_at = proven[-1].time if proven else 0.0
        self.lost_steps = max(0, self.step - usable[-1].step) if usable else None
        attempt = attempts.attempt_of(usable[-1].step) if usable else None
        self.lost_seconds = 0.0
        if attempt is not None:
            self.lost_seconds = attempts.time_of(len(attempts) - 1) - attempts.time_of(attempt)

    def sentence(self) -> str:
        """One sentence with what a person needs first."""
        losses = [f"{name} {text}" for name, text in self.numbers() if name in ("loss", "held-out")]
        numbers = f"; {', '.join(losses)} {self.unit}".rstrip() if losses else ""
        to_do = self.to_do()
        return f"{self.when()} {self.state()}{numbers}. {self.safety()}{to_do and f' {to_do}'}"

    def when(self) -> str:
        """The time that everything said is of."""
        return time.strftime("As of %Y-%m-%d %H:%M:%S %Z.", time.localtime(self.as_of))

    @property
    def has_ended(self) -> bool:
        """Whether the newest start has written how it ended."""
        return self.status not in ("running", "starting", "silent")

    def numbers(self) -> list[tuple[str, str]]:
        """Name and text of the known numbers besides step and losses."""
        return [
            *([("to go", duration(self.eta_seconds))] if self.eta_seconds is not None else []),
            *([("loss", f"{self.loss:.4f}")] if self.loss is not None else []),
            *([("held-out", f"{self.eval_loss:.4f}")] if self.eval_loss is not None else []),
            *([(f"{self.counted}/s", f"{self.speed:,.0f}")] if self.speed else []),
            ("goodput", f"{self.goodput:.0%}"),
            ("discarded", f"{self.discards:,}"),
            ("rollbacks", f"{self.rollbacks:,}"),
            ("restarts", f"{self.restarts:,}"),
        ]

    def progress(self) -> str:
        """The step, and of how many."""
        return f"{self.step:,}" + (f" of {self.total:,}" if self.total is not None else "")

    def state(self) -> str:
        """Status, step, and how long it will take."""
        at = f"step {self.progress()}"
        if self.status == "running":
            eta = "" if self.eta_seconds is None else f", about {duration(self.eta_seconds)} to go"
            return f"Running: {at}{eta}"
        if self.status == "starting":
            return f"Starting: {at}"
        if self.status == "silent":
            silent = "" if self.silent_seconds is None else f" for {duration(self.silent_seconds)}"
            return f"No heartbeat{silent}: {at}"
        is_usual = self.status == "done" and self.reason.startswith("all steps applied")
        reason = f" ({self.reason})" if self.reason and not is_usual else ""
        return f"{self.status.capitalize()}{reason}: {at}"

    def safety(self) -> str:
        """The newest proven checkpoint, and what a crash right now would cost."""
        proven = "No checkpoint on disk is proven yet"
        if self.proven_step is not None:
            at = time.strftime("%H:%M:%S", time.localtime(self.proven_at))
            proven = f"The newest proven checkpoint is of step {self.proven_step:,}, saved at {at}"
        if self.lost_steps is None or self.has_ended:
            return f"{proven}."
        if self.lost_steps == 0:
            return f"{proven}; nothing would be lost now."
        cost = f" ({duration(self.lost_seconds)} of work)" if self.lost_seconds > 0 else ""
        steps = "1 step" if self.lost_steps == 1 else f"{self.lost_steps:,} steps"
        return f"{proven}; {steps}{cost} would be computed again if the run were lost now."

    def to_do(self) -> str:
        """What a person has to do; empty for nothing."""
        if self.status == "halted":
            suggested = f" (to try: {', '.join(self.to_try)})" if self.to_try else ""
            return (
                f"The run has ended. Remove the cause that the last incident names{suggested}, and "
                "give the same command again."
            )
        if self.status == "silent":
            return "If no launcher starts it again, give the same command again."
        if self.status in ("preempted", "failed"):
            return "The run has ended; the same command resumes it."
        return ""


def _step(last: AttemptRow | None, summary: Mapping[str, Any]) -> int:
    """The number of applied updates."""
    if type(summary.get("steps")) is int:
        return int(summary["steps"])
    if last is None:
        return 0
    return last.step if last.is_applied else max(0, last.step - 1)


def _finite(value: float | None) -> float | None:
    return value if value is not None and value == value else None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint on disk; ``time`` is when it was committed, in seconds since the epoch."""

    serial: int
    step: int
    state: State
    num_bytes: int
    time: float


def stored_checkpoints(run_dir: RunDir) -> list[StoredCheckpoint]:
    """The committed checkpoints on disk, in the order of their serials."""
    try:
        folders = list(run_dir.ring.iterdir())
    except OSError:
        return []
    named = [(name, folder) for folder in folders if (name := parse_name(folder.name))]
    stored = [_stored(folder, *name) for name, folder in sorted(named)]
    return [one for one in stored if one is not None]


def _stored(folder: Path, serial: int, step: int) -> StoredCheckpoint | None:
    try:
        files = {file.name: file.stat() for file in folder.iterdir()}
    except OSError:  # it was retired just now
        return None
    if "COMMITTED" not in files:
        return None
    state = State.committed
    if "TAINTED" in files:
        state = State.tainted
    elif "CLEAN" in files:
        state = State.clean
    data = [status.st_size for name, status in files.items() if name.endswith(".bin")]
    return StoredCheckpoint(
        serial=serial, step=step, state=state, num_bytes=sum(data), time=files["COMMITTED"].st_mtime
    )
