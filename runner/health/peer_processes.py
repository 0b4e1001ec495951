"""Watches the processes of the other ranks of this machine: which died, and how.

Only a parent learns how a process ended; but until the parent has asked, ``/proc`` shows it to
every process, and newer kernels tell whoever has a pidfd at any time. torchrun asks ten times a
second, so a thread here waits for the deaths themselves.
Over NCCL this is how a death is noticed, because no collective fails when a peer is gone.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from runner.distributed.env import rank_name, recorded_exit
from runner.system.environment import variables
from runner.system.error import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_HALTED,
    EXIT_NO_CHECKPOINT,
    EXIT_PREEMPTED,
)
from runner.system.process import exit_status, exit_status_by_pidfd, is_alive

# With these codes a rank has reported its error, and the others end in the same way.
IN_ORDER = (EXIT_DONE, EXIT_CONFIG, EXIT_HALTED, EXIT_NO_CHECKPOINT, EXIT_PREEMPTED)
_LOOK_MILLISECONDS = 200  # where the kernel cannot notify of a death


class PeerProcesses:
    """Watches processes by rank.

    ``deaths`` maps a dead rank to its exit code or minus the signal; to None where the parent asked
    for it first and the rank left no code for a supervisor.

    Args:
        processes: by rank, as :func:`runner.system.process.own_process` returns them.
    """

    def __init__(self, processes: Mapping[int, Mapping[str, str | int]]) -> None:
        self.deaths: dict[int, int | None] = {}
        self._processes = dict(processes)
        self._open: dict[int, int] = {}  # pidfd to rank
        self._looked_at: set[int] = set()  # ranks without one: a kernel before 5.3
        self._thread = threading.Thread(target=self._run, name="neighbours", daemon=True)

    def start(self) -> None:
        """Start to watch; processes that are gone already count as dead."""
        for rank, process in self._processes.items():
            try:
                self._open[os.pidfd_open(int(process["pid"]))] = rank
            except ProcessLookupError:
                self._note(rank, self._exit_status(rank))
            except (OSError, AttributeError):
                self._looked_at.add(rank)
        if self._open or self._looked_at:
            self._thread.start()

    def ended_badly(self) -> list[int]:
        """Ranks that are known to have died without leaving in order."""
        return [rank for rank, status in list(self.deaths.items()) if status not in IN_ORDER]

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        left = len(self._open)
        while left or self._looked_at:
            for descriptor, _ in poll.poll(_LOOK_MILLISECONDS if self._looked_at else None):
                rank = self._open[descriptor]
                # The kernel tells by /proc until the parent asks, by pidfd from then on, and the
                # parent may ask at any moment: between two questions that both came too early.
                status = self._exit_status(rank)
                self._note(rank, exit_status_by_pidfd(descriptor) if status is None else status)
                poll.unregister(descriptor)
                os.close(descriptor)
                left -= 1
            for rank in sorted(self._looked_at):
                if not is_alive(self._processes[rank]):
                    self._note(rank, self._exit_status(rank))
                    self._looked_at.discard(rank)

    def _exit_status(self, rank: int) -> int | None:
        return exit_status(int(self._processes[rank]["pid"]))

    def _note(self, rank: int, status: int | None) -> None:
        # The parent may have reaped it first; the rank leaves its code for a supervisor.
        self.deaths[rank] = (
            recorded_exit(variables(), rank_name(rank)) if status is None else status
        )
