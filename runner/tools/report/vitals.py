"""How a run is, from its small files: the heartbeat, the summary, the settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.policy.alert import RUNNING, SILENT, STARTING
from runner.run_dir.paths import RunDir
from runner.run_dir.time_account import TimeAccount, account, plausible_seconds, seconds_by_kind
from runner.system.error import ConfigError
from runner.system.json_lines import last_lines
from runner.system.units import duration
from runner.tools.report.follow import Follower, number, whole
from runner.tools.report.incident import INCIDENT_KINDS, Line, ints, line_of

ALIVE_SECONDS = 60.0  # the owner beats about every second; a busy file system may show it late
RUN_HEADS = ("run", "status", "step", "loss", "last incident", "age", "goodput")
_DEEP = 3  # folders of runs within folders


class Vitals:
    """The small files of one run, each parsed again only when it has changed.

    Args:
        clock: seconds since the epoch.
        alive_seconds: without a heartbeat, until the run counts as silent.
        is_patient: a first heartbeat counts as of now: the file's time may be of a wrong clock.
    """

    def __init__(
        self,
        run_dir: RunDir,
        clock: Callable[[], float],
        *,
        alive_seconds: float = ALIVE_SECONDS,
        is_patient: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._is_patient = is_patient
        self._alive_seconds = alive_seconds
        self._clock = clock
        self._beat: tuple[str, float | None] | None = None  # read, and when it was seen to change
        self._settings: tuple[tuple[int, ...], dict[str, Any]] | None = None

    @property
    def beat(self) -> list[Any] | None:
        """The newest heartbeat and when it was seen to move, for :meth:`resume`."""
        return list(self._beat) if self._beat else None

    def resume(self, beat: object) -> None:
        """Take a heartbeat that was seen before; anything else is left out."""
        if isinstance(beat, list) and len(beat) == 2 and isinstance(beat[0], str):
            self._beat = beat[0], plausible_seconds(beat[1])

    def summary(self, incarnation: object) -> Mapping[str, Any] | None:
        """``summary.json`` of the newest start; None until that has ended."""
        summary = self._run_dir.stored_summary()
        if summary is None:
            return None
        is_newest = incarnation is None or summary.get("incarnation") == incarnation
        return summary if is_newest else None

    def settings(self) -> dict[str, Any]:
        """The settings by dotted key; empty if they cannot be read."""
        try:
            version = version_of(self._run_dir.config)
            if version and (self._settings is None or self._settings[0] != version):
                self._settings = version, self._run_dir.stored_settings()
        except (ConfigError, OSError):
            return {}
        return self._settings[1] if version and self._settings else {}

    def silent_seconds(self, incarnation: object = None) -> float | None:
        """Seconds since the last heartbeat of the run's owner; None without an owner.

        A beat that this reader has seen to move counts by the reader's own clock: that of a file
        server may be wrong. Until then the file's time has to do.

        Args:
            incarnation: of the newest start, whose first heartbeat may be still to come: then None.
        """
        path = self._run_dir.incarnation / "beat"
        try:
            text, written = path.read_text()[:100], path.stat().st_mtime
        except (OSError, UnicodeDecodeError) as error:
            # On NFS a file that another host has just replaced may be stale for one look (ESTALE).
            seen = self._beat[1] if self._beat else None
            is_gone = seen is None or isinstance(error, FileNotFoundError)
            return None if is_gone else max(0.0, self._clock() - (seen or 0.0))
        now = self._clock()
        if self._beat is None or text != self._beat[0]:
            is_seen_moving = self._beat is not None or self._is_patient
            self._beat = text, now if is_seen_moving else None
        moved, owner = self._beat[1], text.partition(" ")[0]
        if isinstance(incarnation, int) and owner.isdecimal() and int(owner) < incarnation:
            return None
        return max(0.0, now - (written if moved is None else moved))

    def status(self, incarnation: object, *, has_steps: bool) -> str:
        """See :class:`runner.tools.report.run_reader.RunStatus`."""
        summary = self.summary(incarnation)
        if summary is not None:
            return str(summary.get("status", "ended"))[:40]
        silent = self.silent_seconds(incarnation)
        if silent is not None and silent < self._alive_seconds:
            return RUNNING if has_steps else STARTING
        return SILENT


class Glance:
    """A run without its curves: cheap enough for hundreds of them.

    Attributes:
        status: see :class:`runner.tools.report.run_reader.RunStatus`.
        step, total: applied updates, and of how many; ``total`` is None if unknown.
        loss: of the last attempt, in nats per token; NaN if unknown.
        moved: when the last step was made, in seconds since the epoch; 0 without any.
        grew: when a new step was seen, by the own clock: those of the hosts may differ.
        incarnation: of the newest start; None if unknown.
        reason: how the newest start ended; empty until it has.
        name: of the run, in the folder where it was found.
        incident: the newest line of trouble; None without any.
        fresh: the journal lines that the last look found new.
        unread: why the last look failed; empty if it did not.
    """

    def __init__(
        self,
        out: Path,
        *,
        clock: Callable[[], float] = time.time,
        alive_seconds: float = ALIVE_SECONDS,
        is_patient: bool = False,
        name: str = "",
    ) -> None:
        self.run_dir = RunDir(out)
        self.name = name or out.name or str(out)
        self.incident: Line | None = None
        self.fresh: list[dict[str, Any]] = []
        self.unread = ""
        self.vitals = Vitals(
            self.run_dir, clock, alive_seconds=alive_seconds, is_patient=is_patient
        )
        self._clock, self._alive_seconds = clock, alive_seconds
        self._seen = clock() if is_patient else 0.0
        self._line_time = 0.0
        self._journal = Follower(self.run_dir.journal)
        self.num_lines = 0
        self._began: Any = None  # the time of the first line: a run made anew has another
        self.incarnation: object = None
        self.status, self.reason = STARTING, ""
        self.step, self.loss, self.moved, self.grew = 0, float("nan"), 0.0, 0.0
        self.total: int | None = None
        self._size: list[int] | None = None  # the metrics' inode and bytes
        self._start_step = 0  # a start replaces the metrics, cut back to it
        self._metrics: tuple[int, ...] | None = ()  # of the file as it was read
        self._has_steps = False
        self._lately, self._lately_since = TimeAccount(), 0.0  # of the newest lines

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take a state of :meth:`to_json`: its lines are not new."""
        self.num_lines, self._began = whole(state.get("num_lines")), state.get("began")
        self._seen = plausible_seconds(state.get("seen")) or self._seen
        self.vitals.resume(state.get("beat"))
        self.grew, size = plausible_seconds(state.get("grew")) or 0.0, ints(state.get("size"))
        self._size = size if len(size) == 2 else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for :meth:`resume`."""
        known = {"num_lines": self.num_lines, "began": self._began, "seen": self._seen}
        return known | {"beat": self.vitals.beat, "grew": self.grew, "size": self._size}

    def silent_seconds(self) -> float:
        """Seconds since the last sign of the run: its heartbeat, or else its newest line."""
        silent = self.vitals.silent_seconds(self.incarnation)
        if silent is not None:
            return silent
        return max(0.0, self._clock() - max(self.moved, self._line_time, self._seen))

    def age(self) -> float | None:
        """Seconds since its newest line; None without any."""
        newest = max(self.moved, self._line_time)
        return max(0.0, self._clock() - newest) if newest else None

    def last_incident(self) -> str:
        """The newest trouble; empty for none."""
        one = self.incident
        return f"{one.kind.replace('_', ' ')}, step {one.step:,}" if one else ""

    def goodput(self) -> float | None:
        """The share of its time that counts: in all once it has ended, else lately; or unknown."""
        if (summary := self.vitals.summary(self.incarnation)) is not None:
            return number(summary.get("goodput"))
        lately = self._clock() - self._lately_since
        return self._lately.goodput(lately) if self._lately_since and lately > 0 else None

    def cells(self) -> tuple[str, ...]:
        """As :data:`RUN_HEADS` names them."""
        step = f"{self.step:,}" + (f" of {self.total:,}" if self.total is not None else "")
        loss = f"{self.loss:.4f}" if self.loss == self.loss else ""
        age, share = self.age(), self.goodput()
        old = "" if age is None else duration(age)
        good = "" if share is None or share != share else f"{share:.0%}"
        return self.name, self.status, step, loss, self.last_incident(), old, good

    def update(self) -> None:
        """Read how the run is; where that fails it stays as it was, and ``unread`` says why."""
        try:
            self.fresh = self._read()
            self.unread = ""
        except (OSError, ConfigError) as error:
            self.fresh, self.unread = [], str(error)

    def _read(self) -> list[dict[str, Any]]:
        """Returns the journal lines that are new."""
        if self._journal.was_replaced():  # each start puts it in place anew
            self._journal.restart()
        fresh, place = [], 0 if self._journal.offset == 0 else self.num_lines
        for line in self._journal.lines():
            place += 1
            if place == 1 and self._began != line.get("time"):
                self.num_lines = 0 if self._began is not None else self.num_lines
                self._began = line.get("time")
            self._line_time = plausible_seconds(line.get("time")) or self._line_time
            self.incident = _trouble(line) or self.incident
            if line.get("kind") == "start":  # a known one as well: the summary may be of another
                detail = line.get("detail")
                self.incarnation = detail.get("incarnation") if isinstance(detail, dict) else None
                self._start_step = whole(line.get("step"))
                self._seen = self._clock() if place > self.num_lines > 0 else self._seen
            if place > self.num_lines and type(line.get("step")) is int and "kind" in line:
                fresh.append(line)
        self.num_lines = max(place, self.num_lines)
        if (version := version_of(self.run_dir.metrics)) != self._metrics:
            lines = last_lines(self.run_dir.metrics)
            last = lines[-1] if lines else {}
            timed = [one for one in map(timed_of, lines) if one and one["time"]]
            self._lately, self._lately_since = account(timed, ()), 0.0
            if timed:
                self._lately_since = timed[0]["time"] - timed[0]["seconds"]
            self.step = max(0, whole(last.get("step")) - (last.get("action") != "apply"))
            self.loss = number(last.get("loss"))
            self.moved = plausible_seconds(last.get("time")) or 0.0
            self._has_steps, self._metrics = bool(last), version
            before, self._size = self._size, [version[0], version[-1]] if version else [0, 0]
            is_beyond = whole(last.get("step")) > self._start_step
            if before and before[0] == self._size[0]:
                is_beyond = before[1] < self._size[1]
            self.grew = self._clock() if before and is_beyond else self.grew
        total = self.vitals.settings().get("steps")
        self.total = total if type(total) is int else None
        summary = self.vitals.summary(self.incarnation) or {}
        self.reason = str(summary.get("reason", ""))[:2000]
        self.status = self.vitals.status(self.incarnation, has_steps=self._has_steps)
        if self.status == SILENT and self.silent_seconds() < self._alive_seconds:
            self.status = STARTING  # it has not beaten yet
        return fresh


def _trouble(line: Mapping[str, Any]) -> Line | None:
    return line_of(line) if line.get("kind") in INCIDENT_KINDS else None


class Runs:
    """The runs in folders, or runs themselves; those that come later as well. Only reads.

    Args:
        paths: folders in which runs are, or will be, or directories of runs.
        make: makes the glance of a run that was found in one of the paths.
        known: directories of runs that were seen in an earlier life.

    Attributes:
        unread: what the last look could not read, with the reason.
        reading: what is being read just now: a disk that hangs does so here.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        make: Callable[[Path, Path], Glance] | None = None,
        known: Iterable[str] = (),
    ) -> None:
        self._paths = paths
        self._make = make or _glance
        self._known = {Path(name) for name in known}
        self._glances: dict[Path, Glance] = {}
        self.unread: list[str] = []
        self.reading = paths[0]

    def update(self) -> list[Glance]:
        """The runs that are there now, by name; one that cannot be read stays as it was."""
        found, unread = [], []
        for path in self._paths:
            self.reading = path
            try:
                outs = list(find_runs(path)) if path.exists() else []
            except OSError as error:
                unread.append(f"{path} ({error.strerror})")
                continue
            if not outs and any(out.is_relative_to(path.absolute()) for out in self._known):
                unread.append(f"{path} (its runs are gone)")
            for out in outs:
                one = self._glances.get(out) or self._make(out, path)
                self._glances[out] = one
                self._known.add(out.absolute())
                self.reading = out
                one.update()
                found.append(one)
        self.unread = unread + [f"{one.run_dir.out} ({one.unread})" for one in found if one.unread]
        return found


def _glance(out: Path, folder: Path) -> Glance:
    return Glance(out, name="" if out == folder else str(out.relative_to(folder)))


def version_of(path: Path) -> tuple[int, ...] | None:
    """What changes with a file's content; None if it is not there."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def is_run(folder: Path) -> bool:
    """Whether a folder is the directory of a run.

    Raises:
        OSError: it cannot be read.
    """
    paths = RunDir(folder)
    return any(path.exists() for path in (paths.journal, paths.metrics, paths.incarnation))


def find_runs(folder: Path, deep: int = _DEEP) -> Iterator[Path]:
    """The directories of runs in a folder, or the folder itself, in the order of their names.

    Raises:
        OSError: it cannot be read.
    """
    if is_run(folder):
        yield folder
    elif deep:
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.is_symlink():
                yield from find_runs(inside, deep - 1)


def timed_of(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fields of a metrics line that the account uses; None if one is missing."""
    seconds = plausible_seconds(record.get("seconds"))
    wait = plausible_seconds(record.get("data_wait_seconds"))
    step = record.get("step")
    if seconds is None or wait is None or type(step) is not int or step != whole(step):
        return None
    return {
        "seconds": seconds,
        "data_wait_seconds": wait,
        "step": step,
        "time": plausible_seconds(record.get("time")) or 0.0,
        "stalls": seconds_by_kind(record.get("stalls")),
        "action": record.get("action"),
    }
