"""What a person is told of a run: one message when trouble begins, and one when it is over.

Pure: journal lines and states of the run come in with their times, messages come out. Shared by
``track.command``, in the run, and by ``holdfast watch``, outside of it, so that both tell the same
under the same keys.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runner.policy.decision.history import WARNING

TRIGGER, RESOLVE, NOTICE = "trigger", "resolve", "notice"
DONE, HALTED, PREEMPTED, FAILED = "done", "halted", "preempted", "failed"
RUNNING, STARTING, SILENT = "running", "starting", "silent"
UNREACHABLE = "unreachable"  # its files cannot be read: its status is unknown
# Without an end in the journal, bad steps are over after so many steps beyond the last of them.
FAR_STEPS = 30
EVERY_SECONDS = 60.0
BAD_STEPS = frozenset({"discard", "redo", "rollback", "rebaseline", "halt"})
TROUBLE = BAD_STEPS | {"unreadable", "out_of_memory", "evaluation"}
_DOWN = frozenset({"crash", "gave_up", SILENT, FAILED, PREEMPTED, UNREACHABLE})
_TRAINING, _RUN = "training", "run"
EARLY_STOP = "early_stop"
# Kinds of incidents with these levels; all others are warnings.
_GRAVE = frozenset(
    {"halt", "crash", "gave_up", SILENT, FAILED, "unproven", "replica_mismatch"}
    | {"checkpoint_damaged"}
)
_CALM = frozenset(
    {"start", "setting_changed", "restored", "episode", "interval", "throughput", EARLY_STOP, DONE}
)
_LAST = frozenset({"halt", "gave_up", SILENT})  # nobody but a person starts it again
_MOST_KINDS = 30


def is_calm(line: Mapping[str, Any]) -> bool:
    """Whether a journal line is information only: nobody needs to be told."""
    detail = line.get("detail")
    is_sign = line["kind"] == WARNING and isinstance(detail, Mapping) and not detail.get("agreeing")
    return line["kind"] in _CALM or is_sign


def level_of(line: Mapping[str, Any]) -> int:
    """The :mod:`logging` level of a journal line."""
    if line["kind"] in _GRAVE:
        return logging.ERROR
    return logging.INFO if is_calm(line) else logging.WARNING


@dataclass(slots=True, kw_only=True)
class _Open:
    """Trouble that is not over. ``weight`` is the gravest so far, ``well_since`` 0 for not well."""

    key: str
    level: str
    began: float
    last_time: float
    last_step: int
    weight: int
    counts: dict[str, int]
    is_told: bool
    well_since: float = 0.0


class Episodes:
    """The trouble of one run: bad steps are one episode, and being down is another.

    Lines of an episode that is open are counted, not told, unless it gets worse (a warning, an
    error, and then an end that only a person can undo). A line of another kind has no end; it is
    told, and its like not again for ``every_seconds``.

    Args:
        name: of the run, the first part of all keys.
        every_seconds: an episode is over when all was well for so long; trouble that comes sooner
            belongs to it.
        state: of :meth:`to_json`.
    """

    def __init__(
        self,
        name: str,
        *,
        every_seconds: float = EVERY_SECONDS,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        state = state or {}
        self._name = name
        self._every_seconds = every_seconds
        self._status = str(state.get("status", ""))
        self._open = {group: _Open(**one) for group, one in state.get("open", {}).items()}
        self._noticed: dict[str, float] = dict(state.get("noticed", {}))

    def to_json(self) -> dict[str, Any]:
        """Plain values that ``state`` takes."""
        opened = {group: asdict(one) for group, one in self._open.items()}
        return {"status": self._status, "open": opened, "noticed": self._noticed}

    def add(
        self, line: Mapping[str, Any], now: float, *, is_told: bool = True
    ) -> list[dict[str, Any]]:
        """Take one journal line; returns the messages to send.

        Args:
            line: with ``kind`` and ``step``; others of its fields are passed on.
            now: seconds since the epoch.
            is_told: whether messages are sent; if not, none is sent when it is over, either.
        """
        kind, step = str(line["kind"])[:40], int(line["step"])
        if is_calm(line):
            return []
        group = _group_of(kind)
        if group is None:
            return self._notice(kind, line, now) if is_told else []
        one = self._open.get(group)
        weight = (level_of(line) >= logging.ERROR) + (kind in _LAST)
        is_worse = one is None or weight > one.weight or (is_told and not one.is_told)
        level = logging.getLevelName(level_of(line)).lower()
        if one is None:
            one = self._open[group] = _Open(
                key=f"{self._name}/{group}/{_number_of(line, now)}",
                level=level, began=now, last_time=now, last_step=step, weight=weight,
                counts={}, is_told=is_told,
            )  # fmt: skip
        one.last_time, one.well_since = now, 0.0
        one.last_step = max(one.last_step, step)
        one.is_told = one.is_told or is_told
        if len(one.counts) < _MOST_KINDS or kind in one.counts:
            one.counts[kind] = one.counts.get(kind, 0) + 1
        if not (is_worse and is_told):
            one.weight = max(one.weight, weight)
            return []
        one.weight, one.level = max(one.weight, weight), level
        return [{**line, "event": TRIGGER, "key": one.key, "level": level}]

    def see(
        self,
        status: str,
        step: int,
        now: float,
        *,
        line: Mapping[str, Any] | None = None,
        moved: float | None = None,
        is_told: bool = True,
    ) -> list[dict[str, Any]]:
        """Take the status of the run; returns the messages to send.

        Args:
            status: done, halted, preempted, failed, running, starting or silent.
            step: applied updates.
            line: what to say of this status, beside ``kind`` and ``step``.
            moved: when the last step was made, in seconds since the epoch; by default ``now``.
        """
        was, self._status = self._status, status
        told = {"reason": "", "decision": "", "detail": {}, **(line or {}), "step": step}
        if status == DONE:
            messages = [m for group in list(self._open) for m in self._over(group, step, now, DONE)]
            is_news = was != DONE and is_told
            end = {"kind": DONE, "level": "info", "event": NOTICE, "key": f"{self._name}/{DONE}"}
            return [*messages, *([told | end] if is_news else [])]
        kind = "halt" if status == HALTED else status
        if status in (HALTED, PREEMPTED, FAILED, SILENT):
            group = _group_of(kind) or ""
            is_known = group in self._open and kind in self._open[group].counts
            if was == status or is_known:
                return []
            return self.add(told | {"kind": kind}, now, is_told=is_told)
        if status == RUNNING:
            return self._well(step, now, now if moved is None else moved)
        return []

    @property
    def is_trouble(self) -> bool:
        """Whether an episode is open."""
        return bool(self._open)

    def _well(self, step: int, now: float, moved: float) -> list[dict[str, Any]]:
        over = []
        for group, one in list(self._open.items()):
            is_past = step >= one.last_step + FAR_STEPS or group == _RUN
            if not (moved > one.last_time and is_past):
                continue
            one.well_since = one.well_since or now
            if now - one.well_since >= self._every_seconds:
                over += self._over(group, step, now, "trains again" if group == _RUN else "clean")
        return over

    def _over(self, group: str, step: int, now: float, how: str) -> list[dict[str, Any]]:
        one = self._open.pop(group)
        counted = ", ".join(f"{kind} x{n}" if n > 1 else kind for kind, n in one.counts.items())
        message = {
            "event": RESOLVE, "key": one.key, "level": one.level, "kind": "recovered",
            "step": step, "reason": f"over: {how} after {counted}", "decision": "nothing to do",
            "counts": one.counts, "seconds": now - one.began, "detail": {},
        }  # fmt: skip
        return [message] if one.is_told else []

    def _notice(self, kind: str, line: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
        last, at = self._noticed.get(kind), _number_of(line, now)
        if last is not None and abs(at - last) < self._every_seconds:
            return []
        if kind in self._noticed or len(self._noticed) < _MOST_KINDS:
            self._noticed[kind] = at
        key = f"{self._name}/{kind}/{at}"
        level = logging.getLevelName(level_of(line)).lower()
        return [{**line, "event": NOTICE, "key": key, "level": level}]


def _group_of(kind: str) -> str | None:
    """The episode that a line belongs to; None for a line that stands for itself."""
    if kind in TROUBLE:
        return _TRAINING
    return _RUN if kind in _DOWN else None


def _number_of(line: Mapping[str, Any], now: float) -> int:
    """The time of a line, the same for all that report it."""
    when = line.get("time", now)
    return int(when) if isinstance(when, int | float) and 0 <= when < 1e11 else int(now)


def addressed(message: Mapping[str, Any], out: str, host: str, now: float) -> dict[str, Any]:
    """A message with the run it is of, the host that tells it, its time, and ``text``, a sentence.

    Args:
        out: the run's directory.
    """
    kind, then = message["kind"], f" -> {message['decision']}" if message["decision"] else ""
    text = f"{out}: step {message['step']} {kind}: {message['reason']}{then}"
    return {"out": out, "host": host, "time": now, "text": text, **message}


def merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages that wait, without those of an episode that is over by now but its end."""
    waiting = list(messages)
    ended = {one["key"] for one in waiting if one["event"] == RESOLVE}
    return [one for one in waiting if one["event"] != TRIGGER or one["key"] not in ended]
