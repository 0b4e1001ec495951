"""Files beside the metrics, for later inspection of a run; no decision depends on them.

``ranks.jsonl``: how long each rank took, and how its GPU was. ``ring.jsonl``: the states of each
checkpoint. Both only grow; steps repeated after a restart or a rollback appear twice, in order of
time. Both are bounded: lines become rarer as a run grows long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.policy.outlier_ranks import GPU_COLUMNS, RankPace
from runner.policy.retention.records import Record, State, Tier
from runner.system.json_lines import LineFile, iter_lines, tail

_MOST_KEPT_BYTES = 1 << 20  # while the disk accepts no writes
_TAIL_BYTES = 1 << 16  # more than a line has
_MOST_RANKS = 256  # numbers of a line; with more ranks each stands for several
_LINES_A_FOLD = 1000  # that a run grows by a factor of e: 4,000 lines in 10^6 steps, every 50
_SNAPSHOTS_A_FOLD = 500
REMOTE = "remote"
_GONE = "gone"


class SideLines:
    """One such file. A disk that refuses writes loses lines, but stops nothing.

    Args:
        check: raises when this process may no longer write here.
        clock: seconds since the epoch.
        attempt: number of this start of the run.
    """

    def __init__(
        self,
        path: Path,
        *,
        check: Callable[[], None],
        attempt: Callable[[], int],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._attempt = attempt
        self._clock = clock
        self._file: LineFile | None = None
        try:
            _, length = tail(path, _TAIL_BYTES)
            self._file = LineFile(path, length=length, check=check)
        except OSError:  # metrics.jsonl is on the same disk, and reports the error
            return

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line, with its time and attempt."""
        if self._file is None:
            return
        kept = self._file.kept
        if kept is None or kept.num_bytes < _MOST_KEPT_BYTES:
            head = {"time": round(self._clock(), 3), "attempt": self._attempt()}
            self._file.append(head | dict(line), durably=False)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class RankTimes:
    """``ranks.jsonl``: seconds and GPU of each rank, the highest since the last line.

    Of the clock it is the lowest.

    Args:
        every: steps between measurements.
    """

    def __init__(self, lines: SideLines, *, every: int) -> None:
        self._lines = lines
        self._every = every
        self._next = 0
        self._worst: dict[str, list[float]] = {}

    def close(self) -> None:
        self._lines.close()

    def note(self, step: int, paces: Sequence[RankPace]) -> None:
        """Take the measurements after ``step``, by rank."""
        size = math.ceil(len(paces) / _MOST_RANKS)
        rows = {
            "own_seconds": [pace.host for pace in paces],
            "device_seconds": [pace.device for pace in paces],
            "step_seconds": [pace.step for pace in paces],
        }
        if any(any(pace.gpu) for pace in paces):
            for at, name in enumerate(GPU_COLUMNS):
                rows[name] = [pace.gpu[at] for pace in paces]
        for name, values in rows.items():
            worse = _lowest_known if name == "gpu_mhz" else max
            worst = [worse(values[at : at + size]) for at in range(0, len(values), size)]
            before = self._worst.get(name, worst)
            self._worst[name] = [worse(pair) for pair in zip(worst, before, strict=True)]
        if step < self._next:
            return
        self._next = step + max(self._every, step // _LINES_A_FOLD)
        short = {
            name: [float(f"{value:.4g}") for value in row] for name, row in self._worst.items()
        }
        self._worst = {}
        self._lines.write({"step": step, "ranks": len(paces), "ranks_a_value": size, **short})


def _lowest_known(values: Sequence[float]) -> float:
    return min((value for value in values if value), default=0.0)


class RingLines:
    """``ring.jsonl``: saved, proven, tainted, gone, of each copy in memory, on disk, remote.

    It finds changes between two steps by itself.

    Args:
        records: the copies that are whole.
        stored: those at the remote.
    """

    def __init__(
        self,
        lines: SideLines,
        *,
        records: Callable[[], Sequence[Record]],
        stored: Callable[[], Sequence[Record]] = tuple,
    ) -> None:
        self._lines = lines
        self._records = records
        self._stored = stored
        self._known = fold(iter_lines(lines.path))
        self._passed_over: set[tuple[str, int]] = set()
        self._told_snapshot = 0

    def note(self, step: int) -> None:
        """Write what changed by ``step``, if anything."""
        current = {(r.tier.value, r.serial): r for r in self._records()}
        current |= {(REMOTE, r.serial): r for r in self._stored()}
        states = {key: record.state.value for key, record in current.items()}
        if states == self._known:
            return
        known = {key: state for key, state in self._known.items() if key not in self._passed_over}
        for key in known.keys() - current.keys():
            self._write(step, key, _GONE)
        self._passed_over &= current.keys()
        for key, record in current.items():
            if key in self._passed_over or self._passes_over(key, record):
                self._passed_over.add(key)
                continue
            before = known.get(key)
            if before is None:
                self._write(step, key, State.committed.value, record.step)
            if record.state.value != (before or State.committed.value):
                self._write(step, key, record.state.value, record.step)
        self._known = states

    def _passes_over(self, key: tuple[str, int], record: Record) -> bool:
        """Whether to skip a snapshot: a long run has too many for a line each."""
        if key[0] != Tier.memory.value or key in self._known:
            return False
        last = self._told_snapshot
        if last <= record.step < last + last // _SNAPSHOTS_A_FOLD:
            return True
        self._told_snapshot = record.step  # after a rollback it is an earlier one
        return False

    def _write(self, step: int, key: tuple[str, int], state: str, of: int | None = None) -> None:
        further = {} if of is None else {"of": of}
        self._lines.write(
            {"step": step, "tier": key[0], "serial": key[1], "state": state} | further
        )

    def close(self) -> None:
        self._lines.close()


def fold(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], str]:
    """The state of each copy by tier and serial, after all lines; ignores invalid ones."""
    states: dict[tuple[str, int], str] = {}
    for line in lines:
        tier, serial, state = line.get("tier"), line.get("serial"), line.get("state")
        if isinstance(tier, str) and type(serial) is int and isinstance(state, str):
            if state == _GONE:
                states.pop((tier, serial), None)
            else:
                states[tier, serial] = state
    return states
