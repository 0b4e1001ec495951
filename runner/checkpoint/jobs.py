"""Background work that all ranks finish together.

Each rank runs the same jobs in the same order in one thread of its own. Whether the oldest job
is done travels with the numbers that each step sums over ranks, and it counts as done at the step
at which every rank has done it: the ring's records change at the same step everywhere, and no
collective ever runs in the thread.

A :class:`QueuedJob` is a value. A :data:`Process` is a generator that yields jobs, one after
another; it is resumed, with the failures of the ranks, at the step at which every rank has done
the job::

    failures = yield disk.write(save, copies, check)
    if not failures:
        failures = yield disk.commit(save)
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from runner.checkpoint.protocol import RingRanks

_NICER_BY = 10  # niceness, at most 19
_PATIENCE_SECONDS = 0.2  # between checks of the time while a disk is slow


def _be_nice() -> None:
    """Lower this thread's priority, so that the training step has priority (Linux).

    The value is relative to what the thread inherits: under ``nice -n 15`` the step is at 15.
    """
    own = threading.get_native_id()
    with contextlib.suppress(OSError):
        given = os.getpriority(os.PRIO_PROCESS, own)
        os.setpriority(os.PRIO_PROCESS, own, min(19, given + _NICER_BY))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """One rank's part of something that all ranks do, and the queue in which it waits."""

    queue: LockstepQueue
    work: Callable[[], None]


_Result = TypeVar("_Result")

# Yields a job and is resumed with a sentence for each rank that failed. A process with a result is
# a part of another one, which runs it with "yield from".
Process = Generator[QueuedJob, list[str], _Result]


def start(process: Process[None]) -> None:
    """Run a process up to its first job, on every rank. The end of each job carries it on."""
    _carry_on(process, None)


def _carry_on(process: Process[None], failures: list[str] | None) -> None:
    try:
        job = next(process) if failures is None else process.send(failures)
    except StopIteration:
        return
    job.queue.submit(job.work, lambda failures: _carry_on(process, failures))


def start_alone(job: QueuedJob) -> None:
    """Queue a job that no process waits for, on every rank; its failures are dropped."""
    job.queue.submit(job.work, lambda failures: None)


class JobProgress(NamedTuple):
    """One rank's progress with the oldest job of each queue.

    ``counts`` (done and failed, 0 or 1 each, queue by queue) are summed over ranks; ``jobs`` says
    which jobs they belong to, the same on all ranks.
    """

    counts: tuple[float, ...]
    jobs: tuple[int, ...]


class LockstepQueue:
    """A queue of jobs; ``progress`` and ``apply_progress`` tie it to the agreement among ranks.

    Args:
        gather: collective; takes this rank's text and returns every rank's, by rank.
    """

    def __init__(self, gather: Callable[[str], list[str]]) -> None:
        self._gather = gather
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="ring", initializer=_be_nice
        )
        self._jobs: deque[tuple[Callable[[], None], Callable[[list[str]], None]]] = deque()
        self.running: Future[None] | None = None
        self.num_finished = 0  # on all ranks alike

    @property
    def num_jobs(self) -> int:
        """Of all that have not ended. No ``__len__``: an idle queue would count as none."""
        return len(self._jobs)

    def submit(self, work: Callable[[], None], then: Callable[[list[str]], None]) -> None:
        """Queue a job on every rank. ``then`` gets the sentences of the ranks that failed."""
        self._jobs.append((work, then))
        self._start()

    def progress(self) -> tuple[float, float]:
        """(done, failed) of this rank for the oldest job, for the sum over ranks."""
        if self.running is None or not self.running.done():
            return 0.0, 0.0
        return 1.0, float(self.running.exception() is not None)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for this rank's part of the oldest job, at most ``seconds``."""
        if self.running is not None:
            wait([self.running], timeout=seconds)

    def apply_progress(self, num_done: float, num_failed: float, world_size: int) -> None:
        """Finish the oldest job if the summed counts show that all ranks have done it."""
        if not self._jobs or num_done < world_size:
            return
        (_, then), done = self._jobs.popleft(), self.running
        self.running = None
        self.num_finished += 1
        failures: list[str] = []
        if num_failed:
            error = done.exception() if done else None
            errors = self._gather(f"{type(error).__name__}: {error}" if error else "")
            failures = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
        self._start()
        then(failures)

    def close(self, *, wait: bool = True) -> None:
        """End the thread; drop the jobs that have not begun."""
        self._jobs.clear()
        self._thread.shutdown(wait=wait, cancel_futures=True)

    def _start(self) -> None:
        # One at a time: a commit must not begin before every rank's write is known.
        if self.running is None and self._jobs:
            self.running = self._thread.submit(self._jobs[0][0])


class LockstepQueues:
    """Several queues whose jobs do not wait for each other."""

    def __init__(self, ranks: RingRanks, *, count: int) -> None:
        self.queues = [LockstepQueue(ranks.gather) for _ in range(count)]
        self._ranks = ranks

    def progress(self) -> JobProgress:
        """:meth:`LockstepQueue.progress` of all queues."""
        return JobProgress(
            counts=tuple(number for queue in self.queues for number in queue.progress()),
            jobs=tuple(queue.num_finished for queue in self.queues),
        )

    def apply_progress(self, sums: Sequence[float], jobs: Sequence[int]) -> None:
        """Call :meth:`LockstepQueue.apply_progress` of each queue.

        Args:
            sums: :attr:`JobProgress.counts`, summed over ranks.
            jobs: the jobs to which the sums belong; sums of a finished job are ignored.
        """
        for queue, job, done, failed in zip(self.queues, jobs, sums[::2], sums[1::2], strict=True):
            if job == queue.num_finished:
                queue.apply_progress(done, failed, self._ranks.world_size)

    def drain(
        self, queues: Sequence[LockstepQueue], is_late: Callable[[], bool] = lambda: False
    ) -> bool:
        """Finish every job of some of the queues. Collective.

        Returns False, on all ranks alike, when some rank said it is too late to wait longer.
        """
        while any(queue.num_jobs for queue in queues):
            num_late = self.turn(queues, is_late=is_late)
            if num_late and any(queue.num_jobs for queue in queues):
                return False
        return True

    def turn(
        self,
        queues: Sequence[LockstepQueue] | None = None,
        *,
        is_late: Callable[[], bool] = lambda: False,
    ) -> float:
        """Wait a moment for some queues, or all, and apply what is done. Collective.

        Returns how many ranks are late.
        """
        waited_for = self.queues if queues is None else queues
        running = [queue.running for queue in waited_for if queue.running is not None]
        if running:
            wait(running, timeout=_PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
        own = self.progress()
        *sums, num_late = self._ranks.sum([*own.counts, float(is_late())])
        self.apply_progress(sums, own.jobs)
        return num_late
