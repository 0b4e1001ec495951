"""``journal.jsonl``: one line per incident, never rolled back, on disk before it takes effect.

Rank 0 writes; every rank folds the same incidents into the same :class:`History`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from runner.policy.decision.history import History, Incident, discarded_signals
from runner.system.environment import redacted
from runner.system.error import ConfigError
from runner.system.json_lines import LineFile, lines_after, read_lines
from runner.system.parsing import whole

_LIMIT = 1 << 63
_LAST_SAMPLE = 1 << 60  # ranges from data.skip
# Numbers in ``detail`` that a restart uses, and values that none of them can have.
_MOST = {
    "incarnation": 10**7,
    "world_size": 1 << 20,
    "serial": 10**12,
    "next_serial": 10**12,
    "onset_step": _LIMIT,
    "good_step": _LIMIT,
    "to_step": _LIMIT,
    "cursor": _LAST_SAMPLE,
    "repeat": 10**6,
    "metrics_bytes": _LIMIT,
    "cut_steps": _LIMIT,
    "cut_start": _LIMIT,
    "interval_steps": _LIMIT,
    "from_step": _LIMIT,
    "parts": 1 << 40,
    "crashes": 10**7,
}
_MOST_ABANDONED = 10**6  # checkpoints that one rollback can leave behind
_POSITIONS = {  # lists in ``detail``
    "unreadable": ("positions", "indices"),
    "out_of_memory": ("positions",),
    "redo": ("skipped",),
}
_MOST_PROBES = 1_000_000  # replays that one incident may have cost


def read_journal(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the lines of a journal and their length in bytes.

    Raises:
        ConfigError: a line is not one of ours, or whole lines follow a damaged one: each of
            them was acknowledged, and a crash tears only the last.
    """
    lines, length = read_lines(path)
    folded = History()
    for number, line in enumerate(lines, start=1):
        try:
            _check(line, folded)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            cause = f"{type(error).__name__}: {error}"[:300]
            raise ConfigError(
                f"{path} line {number}: not a journal line ({cause}); repair it or choose another "
                "out"
            ) from None
    if lost := lines_after(path, length):
        raise ConfigError(
            f"{path} line {len(lines) + 1}: is damaged, and {lost} whole lines follow it; put the "
            "file back from a copy, or take the damaged line out if you know what it said"
        )
    return lines, length


def _check(line: dict[str, Any], folded: History) -> None:
    """Add one line to the history, as a restart will.

    Raises:
        LookupError, TypeError, ValueError, ArithmeticError: it cannot be added, or makes no sense.
    """
    if not isinstance(line["detail"], dict):
        raise TypeError(f"detail is {type(line['detail']).__name__}, no object")
    incident = Incident.from_json(line)
    whole(incident.step, "step")
    for rank in incident.ranks:
        whole(rank, "rank", below=_MOST["world_size"])
    for position in incident.samples or ():
        whole(position, "sample", below=_LAST_SAMPLE + 1)
    if not (math.isfinite(incident.cost_seconds) and 0 <= float(line.get("time", 0)) < 1e11):
        raise ValueError("time or cost_seconds is no number of seconds")
    for name, most in _MOST.items():
        if name in incident.detail:
            whole(incident.detail[name], name, below=most)
    _check_kind(incident)
    folded.add(incident)


def _check_kind(incident: Incident) -> None:
    """Check what a restart uses from lines of this kind; raises as :func:`_check`."""
    if incident.kind in ("discard", "rollback", "redo") and incident.samples is None:
        raise ValueError(f"a {incident.kind} without samples")
    if incident.kind == "discard":
        discarded_signals(incident)
    for name in _POSITIONS.get(incident.kind, ()):
        for number in incident.detail[name]:
            whole(number, name, below=_LAST_SAMPLE)
    if isinstance(incident.detail.get("cause"), dict):  # an episode's is a word
        whole(incident.detail["cause"]["steps"], "cause.steps", below=_MOST_PROBES)
    if "wide_until" in incident.detail:
        whole(incident.detail["wide_until"], "wide_until", below=_LAST_SAMPLE)
    if incident.kind == "rollback":
        _check_rollback(incident.detail)
    if incident.kind == "mixture":
        _check_mixture(incident.detail)


def _check_mixture(detail: Mapping[str, Any]) -> None:
    whole(detail["start"], "start", below=_LAST_SAMPLE)
    weights = detail["weights"]
    if not isinstance(weights, dict):
        raise TypeError(f"weights are {type(weights).__name__}, no object")
    if not all(isinstance(w, float | int) and 0 <= w <= 1e9 for w in weights.values()):
        raise ValueError(f"weights are {weights}")
    if not math.fsum(weights.values()) > 0:
        raise ValueError("all weights are 0")


def _check_rollback(detail: Mapping[str, Any]) -> None:
    abandoned = detail["next_serial"] - detail["serial"]
    whole(abandoned, "next_serial - serial", below=_MOST_ABANDONED)
    if detail["cut_steps"] and not 0 < float(detail["cut_factor"]) <= 1:
        raise ValueError(f"cut_factor is {detail['cut_factor']}")
    held = detail.get("held_limits", [None, None])
    if len(held) != 2 or not all(one is None or type(one) in (int, float) for one in held):
        raise ValueError(f"held_limits are {held}")


class Journal:
    """The run's incidents.

    Args:
        lines: of the journal so far.
        told_to_skip: half-open ranges of sample positions that the settings skip.
        file: None on every rank except 0.
        clock: seconds since the epoch.
        tell: called with each line that this process wrote; must neither block nor raise.

    Attributes:
        began: seconds since the epoch at which the run was first started.
    """

    def __init__(
        self,
        lines: Iterable[dict[str, Any]],
        *,
        told_to_skip: Iterable[tuple[int, int]],
        file: LineFile | None,
        clock: Callable[[], float] = time.time,
        tell: Callable[[Mapping[str, Any]], None] = lambda line: None,
    ) -> None:
        self._tell = tell
        self.history = History(told_to_skip)
        self.file = file
        self._clock = clock
        self._lock = threading.Lock()  # another thread writes a crash
        known = list(lines)
        self.began = float(known[0].get("time", clock())) if known else clock()
        for line in known:
            self.history.add(Incident.from_json(line))

    @property
    def num_lines(self) -> int:
        return len(self.history.incidents)

    @property
    def attempt(self) -> int:
        """1 for the first start of this run, 2 for the first restart."""
        return self.history.num_starts

    def add(self, incident: Incident) -> None:
        """Write, sync, then add to the history: an incident counts only once it is written."""
        with self._lock:
            if self.file is not None:
                starts = self.attempt + int(incident.kind == "start")
                head = {"seq": self.num_lines, "time": self._clock(), "attempt": starts}
                line = head | redacted(incident.to_json())
                self.file.append(line, durably=True)
                self._tell(line)
            self.history.add(incident)

    def add_once(self, incident: Incident) -> bool:
        """:meth:`add`, unless a restart repeats an incident that the journal has."""
        known = (incident.kind, incident.step, incident.samples, incident.reason)
        past = self.history.incidents
        is_new = all((i.kind, i.step, i.samples, i.reason) != known for i in past)
        if is_new:
            self.add(incident)
        return is_new
