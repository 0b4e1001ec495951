"""The other ranks of this machine: which of them died, and of what.

Only a parent is told how a process ended; but until the parent has asked, ``/proc`` shows it to
everybody. torchrun asks ten times a second, so a thread waits for the deaths themselves.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from runner.dist.proc import exit_status


class Neighbours:
    """Watches processes by rank; ``deaths`` maps the dead to exit code or minus the signal."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.deaths: dict[int, int] = {}
        self._pids = dict(pids)
        self._open: dict[int, int] = {}  # pidfd to rank
        self._thread = threading.Thread(target=self._run, name="neighbours", daemon=True)

    def start(self) -> None:
        """Begin; processes that are gone already are left out."""
        for rank, pid in self._pids.items():
            try:
                self._open[os.pidfd_open(pid)] = rank
            except OSError:  # gone, or a kernel before 5.3
                continue
        if self._open:
            self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        left = len(self._open)
        while left:
            for descriptor, _ in poll.poll():
                rank = self._open[descriptor]
                status = exit_status(self._pids[rank])
                if status is not None:
                    self.deaths[rank] = status
                poll.unregister(descriptor)
                os.close(descriptor)
                left -= 1
