"""Background work that all ranks finish together.

Each rank runs the same jobs in the same order in one thread of its own. Whether the oldest
job is done is told with the step's packed numbers, and it counts as done at the step at which
every rank has said so: the ring's records change at the same step everywhere, and no
collective ever runs in the thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

_NICENESS = 10  # of 19
_PATIENCE_SECONDS = 0.2  # between looks at the time while a disk is slow


def _be_nice() -> None:
    """Give way to the step: Linux gives each thread a priority of its own."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    name: str
    work: Callable[[], None]
    then: Callable[[list[str]], None]


class Told(NamedTuple):
    """This rank's numbers for the agreement, and which jobs they speak of.

    ``done`` and ``failed`` are to be summed over ranks; ``jobs`` are the same on all of them.
    """

    done: float
    failed: float
    jobs: tuple[int, ...]


class AgreedWork:
    """A queue of jobs; ``tell`` and ``settle`` tie it to the agreement among ranks.

    Args:
        gather: collective; every rank's text, by rank.
    """

    def __init__(self, gather: Callable[[str], list[str]]) -> None:
        self._gather = gather
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="ring", initializer=_be_nice
        )
        self._jobs: deque[_Job] = deque()
        self._running: Future[None] | None = None
        self.num_settled = 0  # on all ranks alike

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def running(self) -> Future[None] | None:
        """This rank's part of the oldest job."""
        return self._running

    def submit(
        self, name: str, work: Callable[[], None], then: Callable[[list[str]], None]
    ) -> None:
        """Queue a job on every rank. ``then`` gets the sentences of the ranks that failed."""
        self._jobs.append(_Job(name=name, work=work, then=then))
        self._start()

    def tell(self) -> tuple[float, float]:
        """(done, failed) of this rank for the oldest job, to be summed over ranks."""
        if self._running is None or not self._running.done():
            return 0.0, 0.0
        return 1.0, float(self._running.exception() is not None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for this rank's part of the oldest job, at most ``seconds``."""
        if self._running is not None:
            wait([self._running], timeout=seconds)

    def settle(self, num_done: float, num_failed: float, world_size: int) -> None:
        """Take the summed numbers; finish the oldest job when all ranks have."""
        if not self._jobs or num_done < world_size:
            return
        job, done = self._jobs.popleft(), self._running
        self._running = None
        self.num_settled += 1
        failures: list[str] = []
        if num_failed:
            error = done.exception() if done else None
            said = self._gather(f"{type(error).__name__}: {error}" if error else "")
            failures = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
        self._start()
        job.then(failures)

    def close(self, *, wait: bool = True) -> None:
        """End the thread; jobs not begun are dropped."""
        self._jobs.clear()
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _start(self) -> None:
        # One at a time: a commit must not begin before every rank's write is known.
        if self._running is None and self._jobs:
            self._running = self._thread.submit(self._jobs[0].work)


class Lanes:
    """Several queues whose jobs do not wait for each other, told in the same two numbers."""

    def __init__(self, gather: Callable[[str], list[str]], *, world_size: int, count: int) -> None:
        self.lanes = [AgreedWork(gather) for _ in range(count)]
        self._world_size = world_size
        # No sum over ranks reaches it: each lane has digits of its own. FP64 holds them exactly
        # for 200,000 ranks and three lanes, 9,700 and four.
        self._radix = world_size + 1
        assert self._radix**count < 1 << 53

    def __len__(self) -> int:
        return sum(map(len, self.lanes))

    def tell(self) -> Told:
        """As :meth:`AgreedWork.tell`, of all lanes."""
        told = [lane.tell() for lane in self.lanes]
        return Told(
            done=sum(number * self._radix**at for at, (number, _) in enumerate(told)),
            failed=sum(number * self._radix**at for at, (_, number) in enumerate(told)),
            jobs=tuple(lane.num_settled for lane in self.lanes),
        )

    def settle(self, num_done: float, num_failed: float, jobs: Sequence[int]) -> None:
        """As :meth:`AgreedWork.settle`, lane by lane.

        Args:
            jobs: that the sums speak of; those of a job that is over by now mean nothing.
        """
        done, failed = int(num_done), int(num_failed)
        for lane, job in zip(self.lanes, jobs, strict=True):
            done, of_lane = divmod(done, self._radix)
            failed, failed_of_lane = divmod(failed, self._radix)
            if job == lane.num_settled:
                lane.settle(of_lane, failed_of_lane, self._world_size)

    def drain(
        self,
        lanes: Sequence[AgreedWork],
        sum_over_ranks: Callable[[list[float]], list[float]],
        is_late: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Finish every job of some of the lanes. Collective.

        Returns False, on all ranks alike, when some rank said it is too late to wait longer.
        """
        while any(map(len, lanes)):
            wait_for_any(lanes, _PATIENCE_SECONDS)
            late = float(is_late())
            told = self.tell()
            num_done, num_failed, num_late = sum_over_ranks([told.done, told.failed, late])
            self.settle(num_done, num_failed, told.jobs)
            if num_late and any(map(len, lanes)):
                return False
        return True

    def wait(self, seconds: float) -> None:
        """See :func:`wait_for_any`."""
        wait_for_any(self.lanes, seconds)


def wait_for_any(lanes: Sequence[AgreedWork], seconds: float) -> None:
    """Wait until this rank's part of some lane's oldest job is done, at most ``seconds``."""
    running = [lane.running for lane in lanes if lane.running is not None]
    if running:
        wait(running, timeout=seconds, return_when=FIRST_COMPLETED)
