"""Work that may take hours on some ranks while the others wait, without waiting in a collective.

Each rank works in a thread. Meanwhile the ranks report every half second whether they
are done, whether one has failed or is asked to stop, and whether work proceeds: no collective
lasts longer than that, and the watchdog sees proceeding work as progress, and hanging work
as a hang, on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from runner.distributed.agreement import Ranks
from runner.system.error import RankError

T = TypeVar("T")

_LOOK_SECONDS = 0.5
_END_SECONDS = 10.0  # for a cancelled thread to clean up


class Cancelled(BaseException):
    """The work is no longer wanted: another rank failed, or the run was asked to stop.

    Not an ``Exception``: what the work calls may take those for faults of its own and try again.
    """


class Pulse:
    """The progress of the work. The working thread sets it, the waiting thread reads it."""

    def __init__(self) -> None:
        self.now: tuple[str, int, int] = ("", 0, 0)  # what, done, total
        self.count = 0
        self._is_cancelled = False

    def tell(self, what: str, done: int, total: int) -> None:
        """
        Raises:
            Cancelled: the work must end.
        """
        if self._is_cancelled:
            raise Cancelled("the work was cancelled")
        if (what, done, total) != self.now:
            self.now = (what, done, total)
            self.count += 1

    def cancel(self) -> None:
        """Make the next :meth:`tell` raise."""
        self._is_cancelled = True


class _Thread(threading.Thread, Generic[T]):
    """Runs ``work``, and keeps its result or exception."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="slow work", daemon=True)
        self._work = work
        self._result: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except (
            BaseException
        ) as error:  # a Rust panic is not an Exception; the waiting thread raises it
            self.error = error

    def outcome(self) -> T | None:
        """The result; None if the work was cancelled because another rank failed."""
        if self.error is None or isinstance(self.error, Cancelled):
            return self._result[0] if self._result else None
        if not isinstance(self.error, Exception):
            raise RankError(f"{type(self.error).__name__}: {self.error}") from self.error
        raise self.error


def all_or_none_slowly(
    ranks: Ranks,
    what: str,
    work: Callable[[Callable[[str, int, int], None]], T],
    *,
    moved: Callable[[], None],
    show: Callable[[str, int, int], None],
    is_asked_to_stop: Callable[[], bool],
) -> T | None:
    """Run ``work`` everywhere; if it failed anywhere, every rank raises the same error. Collective.

    Args:
        work: takes the :class:`Pulse` to which it reports its progress.
        moved: called when any rank's work has progressed.
        show: called with this rank's progress.

    Returns:
        The result of ``work``; None, on all ranks alike, when some rank was asked to stop.

    Raises:
        RunnerError: as ``Ranks.all_or_none``.
    """
    pulse = Pulse()
    thread = _Thread(lambda: work(pulse.tell))
    thread.start()
    last = -1.0
    while True:
        thread.join(_LOOK_SECONDS)
        is_done = not thread.is_alive()
        own = [float(is_done), float(thread.error is not None), float(is_asked_to_stop())]
        done, failed, stop, count = ranks.sum([*own, float(pulse.count)])
        if count != last:
            last = count
            moved()
        if done == ranks.world_size or failed or stop:
            break
        show(*pulse.now)
    pulse.cancel()
    thread.join(_END_SECONDS)
    if stop and not failed:
        return None
    if not failed:
        show(*pulse.now)
    return ranks.all_or_none(what, thread.outcome)
