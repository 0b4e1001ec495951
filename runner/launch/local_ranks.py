"""The ranks of this node, seen by their supervisor: have they begun, did one die unnoticed.

The other ranks of a node report a rank that dies. If it was alone on its node, or all of them died,
no other node would notice: over NCCL no collective fails there.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from runner.distributed.env import rank_name, read_begun
from runner.health.rank_report import (
    CAUSE,
    Report,
    now,
    read_fatal_log,
    reported,
    write_report,
)
from runner.launch import process_tree
from runner.launch.outcome import read_exits
from runner.system.process import exit_status, host_name, is_alive

# Seconds: other ranks of the node notice a death at once, and know more about it.
_NEIGHBOURS_SECONDS = 3.0
_SCAN_SECONDS = 1.0  # between looks for processes: every process of the machine is asked


class BegunRanks:
    """The ranks of one attempt.

    Args:
        exits: the folder in which ranks note that they have begun, and how they ended.
        mark: the mark of the attempt's processes.
        limit_seconds: how long ranks may take to begin; None: no limit.
    """

    def __init__(self, exits: Path, mark: str, limit_seconds: float | None) -> None:
        self._exits = exits
        self._mark = mark
        self._limit = limit_seconds
        self._have_begun = limit_seconds is None
        self._there_since: float | None = None
        self._scanned = float("-inf")
        self._dead_since: dict[tuple[int, str], float] = {}
        self._status: dict[tuple[int, str], int | None] = {}

    def late(self) -> str:
        """A message when ranks exist and have not begun in time; empty while all is well."""
        if self._have_begun:
            return ""
        if read_begun(self._exits):
            self._have_begun = True
            return ""
        clock = time.monotonic()
        if self._there_since is None and clock > self._scanned + _SCAN_SECONDS:
            self._scanned = clock
            self._there_since = clock if process_tree.ranks(self._mark) else None
        assert self._limit is not None
        if self._there_since is None or clock - self._there_since < self._limit:
            return ""
        return (
            f"{host_name()}: its ranks have existed for {self._limit:g} s and none has begun "
            "(parallel.start_seconds + parallel.timeout_seconds + watchdog.slow_seconds)"
        )

    def look(self, *, is_over: bool = False) -> None:
        """Report dead ranks to the other nodes, unless they or the cause are reported already.

        The other nodes wait ``watchdog.settle_seconds`` for a report after their collective broke.

        Args:
            is_over: whether what started them has ended, so that nobody else can report them.
        """
        begun = read_begun(self._exits)
        ended = read_exits(self._exits) if begun else {}
        clock = time.monotonic()
        for rank, facts in begun.items():
            name = (rank, str(facts.get("incident")))
            if rank_name(rank) in ended or not self._others_elsewhere(facts):
                continue
            if name not in self._dead_since:
                if is_alive(facts["process"]) is not False:
                    continue
                self._dead_since[name] = clock
                self._status[name] = exit_status(int(facts["process"]["pid"]))
            is_due = clock - self._dead_since[name] > _NEIGHBOURS_SECONDS
            if is_over or is_due or not any(is_alive(one["process"]) for one in begun.values()):
                self._tell(rank, facts, self._status[name])

    def _others_elsewhere(self, facts: dict[str, Any]) -> bool:
        return int(facts["world_size"]) > int(facts["local_world_size"])

    def _tell(self, rank: int, facts: dict[str, Any], status: int | None) -> None:
        folder = Path(facts["incident"])
        if rank in reported(folder) or (folder / CAUSE).exists():
            return
        message = "gone without a report: SIGKILL, out of memory, or ended by its launcher"
        if status is not None:
            message = f"killed by signal {-status}" if status < 0 else f"ended with {status}"
        report = Report(
            rank=rank,
            world_size=int(facts["world_size"]),
            kind="exit" if status is None or status >= 0 else "signal",
            step=0,
            phase="some phase",
            message=f"{message} (seen by the supervisor of {host_name()})",
            host=host_name(),
            time=now(),
        )
        # Some signals leave a rank time for a fatal log.
        own = read_fatal_log(Path(facts["fatal"]), report) if facts.get("fatal") else None
        with contextlib.suppress(OSError):
            write_report(folder, own or report, for_other=True)
