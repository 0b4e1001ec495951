"""A request to stop: a signal to any rank, or the scheduler's time limit.

The other ranks learn of it at the step's end, and in evaluations and probes at each micro-batch.
The watchdog looks too, because a Python signal handler does not run while the training thread waits
inside a collective. The loop then saves, and ends with exit code 75:
:meth:`runner.train.checkpoints.Checkpoints.save_and_leave`.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn, TypeVar

from runner.distributed.agreement import Ranks
from runner.health.leave import leave
from runner.system.error import EXIT_PREEMPTED
from runner.system.process import answer_hangup

_log = logging.getLogger(__name__)

Item = TypeVar("Item")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# A scheduler signals the launcher and its ranks, and the launcher forwards its own: within
# this time it is one request.
_SAME_REQUEST_SECONDS = 2.0


def who_asked(reasons: Sequence[str]) -> str:
    """A sentence that says which ranks were asked to stop, and by what.

    Args:
        reasons: :attr:`StopRequest.reason` of every rank, by rank.
    """
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


class StopRequest:
    """Whether this rank was asked to stop. A second request ends the process at once.

    Attributes:
        advice: why a checkpoint was wanted last.

    Args:
        grace_seconds: from the request to the exit, at most.
        stop_at: time at which to stop without a request, in seconds since the epoch; None: never.
        has_agent: whether a launcher watches this process; then it decides what the end of
            the terminal means.
    """

    def __init__(
        self, *, grace_seconds: float, stop_at: float | None = None, has_agent: bool = False
    ) -> None:
        self._grace_seconds = grace_seconds
        self._has_agent = has_agent
        # On the monotonic clock from here on: a jump of the wall clock would end the run.
        self._stop_at = None if stop_at is None else time.monotonic() + stop_at - time.time()
        self._asked: tuple[float, str] | None = None
        self._signalled: float | None = None  # when the first signal came
        self.advice = ""
        self._has_told = True
        self._lock = threading.Lock()
        self._pipe: int | None = None

    def listen(self) -> None:
        """Install the handlers; main thread only."""
        self._pipe, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The signal's number arrives here at once, whatever the training thread is doing.
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._handle)
        # A launcher's ranks have no terminal: for them SIGHUP is a request like the others.
        answer_hangup(self._handle, always=self._has_agent)

    @property
    def is_set(self) -> bool:
        self._read_pipe()
        if self._asked is None and self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._asked = (time.monotonic(), "the job's time limit is near")
        return self._asked is not None

    def is_short_for(self, seconds: float) -> bool:
        """Whether the grace may be over before something that takes this long, and a save."""
        return 2 * seconds > self._grace_seconds

    @property
    def is_late(self) -> bool:
        """Whether the grace is over."""
        return self.left_seconds < 0

    @property
    def left_seconds(self) -> float:
        """Until the grace is over; infinite if no stop is requested."""
        request = self._asked
        if request is None:
            return math.inf
        return request[0] + self._grace_seconds - time.monotonic()

    @property
    def reason(self) -> str:
        """Who asked this rank to stop; empty if nothing did."""
        return self._asked[1] if self._asked else ""

    def ask(self, reason: str, *, within: float | None = None) -> None:
        """Ask this rank to stop, as a signal would.

        Args:
            within: seconds in which it has to; None: the grace.
        """
        if self._asked is None:
            if within is not None:
                self._grace_seconds = max(1.0, within)
            self._asked = (time.monotonic(), reason)

    def advise(self, reason: str) -> None:
        """Have a checkpoint saved soon, without a stop."""
        self.advice, self._has_told = reason, False

    def advise_again(self) -> None:
        """The step that carried the advice was discarded unread."""
        self._has_told = False

    def is_advised(self) -> bool:
        """Whether :meth:`advise` was called; True once for each time."""
        has_told, self._has_told = self._has_told, True
        return not has_told

    def look(self, under_way: str) -> None:
        """End a rank that was asked to stop and cannot; called by the watchdog.

        This happens one second after the training thread should have stopped by itself.

        Args:
            under_way: what the rank is doing, for the message.
        """
        self._read_pipe()
        request = self._asked
        if request is not None and time.monotonic() > request[0] + self._grace_seconds + 1.0:
            _end(
                f"asked to stop ({request[1]}), but {under_way} did not end within "
                f"preempt.grace_seconds={self._grace_seconds:g}; the newest checkpoint remains",
                EXIT_PREEMPTED,
            )

    def _read_pipe(self) -> None:
        if self._pipe is None:
            return
        with self._lock:
            try:
                numbers = os.read(self._pipe, 64)
            except BlockingIOError:
                return
            for number in numbers:
                if number in (*SIGNALS, signal.SIGHUP):
                    self._note(signal.Signals(number))

    def _note(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = (now, number.name)
        if self._signalled is None:  # after a notice or a time limit, a signal follows
            self._signalled = now
        elif now > self._signalled + _SAME_REQUEST_SECONDS:
            _end(f"{number.name} for the second time: ending at once", 128 + number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Do nothing: the wakeup pipe has the signal. Without a handler there is no wakeup."""


class StopRequested(BaseException):
    """A rank was asked to stop while something was computed that no step needs.

    Raised alike on all ranks. Not an ``Exception``, so that what catches a probe's errors does
    not catch it.
    """


class StopLook:
    """Looks at the request in evaluations and probes, whose numbers do not carry it.

    Attributes:
        is_in_steps: whether the next step looks before each micro-batch: a start's first one, which
            may compile, and those that are slow for the grace. Equal on all ranks.

    Args:
        is_asked: whether this rank was asked to stop.
    """

    def __init__(self, is_asked: Callable[[], bool], ranks: Ranks) -> None:
        self._is_asked = is_asked
        self._ranks = ranks
        self._known = threading.Event()
        self.is_in_steps = True

    def through(self, ranks: Ranks) -> StopLook:
        """The same request, learnt by exchanges of another kind."""
        look = StopLook(self._is_asked, ranks)
        look._known = self._known
        return look

    def note(self, is_requested: bool) -> None:
        """Note what all ranks learnt from a step: no evaluation and no probe begins from then."""
        if is_requested:
            self._known.set()

    def now(self) -> None:
        """Look once. Collective, and waits for the device.

        Raises:
            StopRequested: a rank was asked to stop.
        """
        if not self._known.is_set():
            self.note(self._ranks.sum([float(self._is_asked())])[0] > 0)
        if self._known.is_set():
            raise StopRequested

    def over(self, batches: Sequence[Item]) -> Sequence[Item]:
        """The batches; before each is iterated over, :meth:`now` looks."""
        return _LookedAt(batches, self.now)


class _LookedAt(list[Item]):
    """A list that looks before each item that it is iterated over."""

    def __init__(self, items: Sequence[Item], look: Callable[[], None]) -> None:
        super().__init__(items)
        self._look = look

    def __iter__(self) -> Iterator[Item]:
        for item in super().__iter__():
            self._look()
            yield item


def _end(message: str, code: int) -> NoReturn:
    try:
        _log.warning("%s", message)
    finally:
        leave(code)
