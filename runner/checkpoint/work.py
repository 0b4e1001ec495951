"""Background work that all ranks finish together.

Each rank runs the same jobs in the same order in one thread of its own. Whether the oldest
job is done is told with the step's packed numbers, and it counts as done at the step at which
every rank has said so: the ring's records change at the same step everywhere, and no
collective ever runs in the thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    name: str
    work: Callable[[], None]
    then: Callable[[list[str]], None]


class AgreedWork:
    """A queue of jobs; ``tell`` and ``settle`` tie it to the agreement among ranks.

    Args:
        gather: collective; every rank's text, by rank.
    """

    def __init__(self, gather: Callable[[str], list[str]]) -> None:
        self._gather = gather
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ring")
        self._jobs: deque[_Job] = deque()
        self._running: Future[None] | None = None
        self.num_settled = 0  # on all ranks alike

    def __len__(self) -> int:
        return len(self._jobs)

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
