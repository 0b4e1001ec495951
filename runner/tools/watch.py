"""Watches runs from outside, and tells of each episode of trouble once, and once when it is over.

Reads the small files of the runs and writes nothing there. What was told is kept in a file, written
before a message is sent and after it: a watcher that is started again goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.policy import alert
from runner.policy.alert import Episodes, addressed, merged
from runner.run_dir.time_account import plausible_seconds
from runner.system.process import host_name, in_thread
from runner.system.units import duration
from runner.tools.report.vitals import Glance, Runs

_LEVELS = ("info", "warning", "error")
_MOST_WAITING = 1000  # messages; older ones are dropped
_READ_SECONDS = 60.0  # for all runs; a file system that takes longer is away
_FIRST_RETRY, _MOST_RETRY = 5.0, 600.0
_ENDS = (alert.DONE, alert.HALTED, alert.PREEMPTED, alert.FAILED)
_AGAIN = "if no launcher starts it again, give the same command again"
_ADVICE = {
    alert.SILENT: _AGAIN,
    alert.HALTED: "a restart would not help: remove the cause that the journal names",
    alert.PREEMPTED: _AGAIN,
    alert.FAILED: _AGAIN,
}

Send = Callable[[Mapping[str, Any]], None]


class QuietHours:
    """Minutes of the day in which only errors are told; the others wait for the end.

    Args:
        text: ``22:00-07:00``, in local time; empty for none.

    Raises:
        ValueError: it is written otherwise.
    """

    def __init__(self, text: str) -> None:
        self._span = None
        if text:
            begin, _, end = text.partition("-")
            self._span = _minutes(begin), _minutes(end)

    def holds(self, minute: int, level: str) -> bool:
        """Whether a message of this level waits at this minute of the day."""
        if self._span is None or level == "error":
            return False
        begin, end = self._span
        return begin <= minute < end if begin <= end else minute >= begin or minute < end


def _minutes(text: str) -> int:
    hours, _, minutes = text.partition(":")
    is_time = hours.isdigit() and minutes.isdigit() and len(minutes) == 2
    if not (is_time and int(hours) < 24 and int(minutes) < 60):
        raise ValueError(f"{text!r} is no time of day such as 22:00")
    return 60 * int(hours) + int(minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When to tell of what.

    Attributes:
        every_seconds: see :class:`Episodes`.
        silent_seconds: without a heartbeat, until a run counts as silent.
        level: the least that is told: info, warning or error.
        quiet: in these hours only errors are told; the others wait.
    """

    every_seconds: float = alert.EVERY_SECONDS
    silent_seconds: float = 120.0
    level: str = "info"
    quiet: QuietHours = field(default_factory=lambda: QuietHours(""))


class _Watched:
    """One run, and its episodes.

    Args:
        state: of :meth:`to_json`; anything else is left out.
        tells_past, tells_state: whether the first look tells of what was before it, and how the
            run is.
    """

    def __init__(
        self, glance: Glance, rules: Rules, state: Any, *, tells_past: bool, tells_state: bool
    ) -> None:
        state = state if isinstance(state, dict) else {}
        self.glance, self._tells_past, self._tells_state = glance, tells_past, tells_state
        self.has_looked = self._waits = False
        self._silent_seconds = rules.silent_seconds
        glance.resume(state.get("glance", {}))
        self.episodes = Episodes(
            glance.run_dir.alert_name,
            every_seconds=rules.every_seconds,
            state=state.get("episodes"),
        )

    def to_json(self) -> dict[str, Any]:
        return {"glance": self.glance.to_json(), "episodes": self.episodes.to_json()}

    def look(self, now: float, *, is_left: bool) -> Iterator[dict[str, Any]]:
        """The messages since the last look.

        Args:
            is_left: nobody is there who would start it again.
        """
        glance = self.glance
        for line in glance.fresh:
            if line["kind"] != alert.PREEMPTED:  # its status tells
                yield from self.episodes.add(line, now, is_told=self._tells_past)
        silent = glance.silent_seconds()
        said = {"reason": glance.reason or "ended", "decision": _ADVICE.get(glance.status, "")}
        if glance.status == alert.SILENT:
            said["reason"] = f"no sign of life for {duration(silent)}"
        # Also when a node joins the ranks are asked to stop, and started again at once.
        is_stopped = glance.status == alert.PREEMPTED and not is_left
        self._waits = is_stopped and silent < self._silent_seconds
        status = alert.STARTING if self._waits else glance.status
        yield from self.episodes.see(
            status, glance.step, now, line=said, moved=glance.grew, is_told=self._tells_state
        )
        self.has_looked = self._tells_past = self._tells_state = True

    @property
    def is_settled(self) -> bool:
        """Whether the run has ended, or it was told that it is silent."""
        status = self.glance.status
        is_over = status in _ENDS and not self._waits
        return is_over or (status == alert.SILENT and self.episodes.is_trouble)


class Watch:
    """Watches runs and folders of runs.

    Args:
        paths: run directories, or folders in which runs are, or will be.
        sends: what sends a message; raises OSError if it could not.
        state: of :meth:`to_json`; empty for a new watcher, which does not tell of what was before
            it, except how the runs that ``paths`` name are.
        keep: writes the state.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        sends: Sequence[Send],
        rules: Rules,
        *,
        state: Mapping[str, Any],
        keep: Callable[[Mapping[str, Any]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths, self._sends, self._rules = paths, sends, rules
        self._keep, self._clock = keep, clock
        self._known: dict[str, Any] = dict(state.get("runs", {}))
        self._watched: dict[Glance, _Watched] = {}
        self._runs = Runs(paths, self._glance, self._known)
        self._waiting: list[dict[str, Any]] = list(state.get("waiting", []))
        self._is_first = not state
        self.is_left = False  # see :meth:`_Watched.look`
        self._host = host_name()
        self._own = Episodes(
            f"watch-{self._host}", every_seconds=rules.every_seconds, state=state.get("own")
        )
        self._away_since: float | None = plausible_seconds(state.get("away_since"))
        self._reading: Future[list[dict[str, Any]]] | None = None
        self._unread: list[str] = []
        self._retry_at = self._retry_seconds = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values that ``state`` takes."""
        seen = (one for one in self._watched.values() if one.has_looked)
        runs = self._known | {_name(one.glance): one.to_json() for one in seen}
        own = {"own": self._own.to_json(), "away_since": self._away_since}
        return {"runs": runs, "waiting": self._waiting, **own}

    @property
    def is_settled(self) -> bool:
        """Whether every run has ended or is known to be silent, and all was sent."""
        return not self._waiting and all(one.is_settled for one in self._watched.values())

    def poll(self) -> None:
        """Look at all runs once, and send what is new. Never raises for a run or a message."""
        self._reading = self._reading or in_thread(self._look, "watch")
        messages: list[dict[str, Any]] = []
        if wait([self._reading], _READ_SECONDS).done:
            messages, self._reading = self._reading.result(), None
        else:
            self._unread = [str(self._runs.reading)]
        messages += self._away()
        self._waiting = merged([*self._waiting, *filter(self._is_wanted, messages)])
        del self._waiting[:-_MOST_WAITING]
        if self._reading is None:  # else its thread may be changing what is kept
            self._keep(self.to_json())
        if self._deliver() and self._reading is None:
            self._keep(self.to_json())

    def _look(self) -> list[dict[str, Any]]:
        messages = []
        for glance in self._runs.update():
            if not glance.unread:
                now, name = self._clock(), _name(glance)
                told = list(self._watched[glance].look(now, is_left=self.is_left))
                messages += [addressed(one, name, self._host, now) for one in told]
        self._unread, self._is_first = self._runs.unread, False
        return messages

    def _glance(self, out: Path, path: Path) -> Glance:
        state = self._known.get(str(out.absolute()))
        is_past, is_named = self._is_first and state is None, out == path
        glance = Glance(
            out,
            clock=self._clock,
            alive_seconds=self._rules.silent_seconds,
            # Of old runs in a folder that have died long ago nobody needs to be told.
            is_patient=is_named or not is_past,
        )
        self._watched[glance] = _Watched(
            glance, self._rules, state, tells_past=not is_past, tells_state=is_named or not is_past
        )
        return glance

    def _away(self) -> list[dict[str, Any]]:
        """Messages about runs that cannot be read, together one episode."""
        now = self._clock()
        if not self._unread:
            self._away_since = None
            messages = self._own.see(alert.RUNNING, 0, now)
        else:
            self._away_since = self._away_since or now
            if now - self._away_since < self._rules.silent_seconds:
                return []
            line = {"reason": f"cannot be read: {', '.join(self._unread)[:500]}", "decision": ""}
            messages = self._own.add({"kind": alert.UNREACHABLE, "step": 0, **line}, now)
        place = str(self._paths[0].absolute())
        return [addressed(message, place, self._host, now) for message in messages]

    def _is_wanted(self, message: Mapping[str, Any]) -> bool:
        return _LEVELS.index(message["level"]) >= _LEVELS.index(self._rules.level)

    def _deliver(self) -> bool:
        """Send what waits, to each receiver in order; whether anything was sent."""
        now, local = self._clock(), time.localtime(self._clock())
        if now < self._retry_at:
            return False
        minute = 60 * local.tm_hour + local.tm_min
        has_sent, failed = False, set[int]()
        for message in list(self._waiting):
            if self._rules.quiet.holds(minute, message["level"]):
                continue
            left = message.setdefault("left", list(range(len(self._sends))))
            for place in [one for one in left if one not in failed]:
                try:
                    self._sends[place]({k: v for k, v in message.items() if k != "left"})
                    has_sent = True
                    left.remove(place)
                except OSError:
                    failed.add(place)
            if not left:
                self._waiting.remove(message)
        again = min(_MOST_RETRY, max(_FIRST_RETRY, 2 * self._retry_seconds))
        self._retry_seconds = again if failed else 0.0
        self._retry_at = now + self._retry_seconds if failed else 0.0
        return has_sent


def _name(glance: Glance) -> str:
    return str(glance.run_dir.out.absolute())
