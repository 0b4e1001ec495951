"""Standard output and error that never block, delay or end the process.

A reader may be gone (EPIPE, EIO), the disk under a log may be full (ENOSPC), and a reader that
sleeps leaves a full pipe or a stopped terminal on which a write waits for ever. So everything
that Python code writes goes through an :class:`AsyncWriter`, a bounded queue with a thread of its
own, and the descriptors 1 and 2 are set so that C++ code that writes to them directly (gloo, c10,
a fatal signal's traceback) does not block either, see
:func:`runner.system.process.unblock`. Losses are counted and reported once. Knows nothing of
runs.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TextIO, TypeVar

from runner.system.process import unblock

T = TypeVar("T")

# After this long an item counts as lost, although a late reader may still get it.
STALL_SECONDS = 5.0
# How long a process that ends waits for a slow reader.
END_SECONDS = 2.0
_MOST_BYTES = 1 << 20  # waiting for a reader
_MOST_LINE = 1 << 16  # characters without a line's end
_POLL_SECONDS = 0.005
_WRITABLE_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The first error of an outlet; ``time`` in seconds since the epoch."""

    outlet: str
    reason: str
    time: float


class AsyncWriter(Generic[T]):
    """Delivers items in a thread of its own: :meth:`put` never blocks and never fails.

    Args:
        name: of the outlet, for messages.
        deliver: delivers one item; may raise or block for ever. The item is lost if it raises.
        most: weight of items that may wait, by ``weigh``; further ones are lost.
        patience: seconds after which the item being delivered counts as lost, as of now; default
            :data:`STALL_SECONDS`.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[T], None],
        *,
        most: int,
        weigh: Callable[[T], int] = lambda _: 1,
        patience: Callable[[], float] = lambda: STALL_SECONDS,
    ) -> None:
        self.num_lost = 0
        self.name = name
        self._deliver = deliver
        self._most = most
        self._weigh = weigh
        self._patience = patience
        # Not queue.Queue: a signal handler or a finalizer may write in the midst of put.
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._waiting = 0
        self._since: float | None = None
        self._loss: Loss | None = None
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> bool:
        """Queue one item; False if it is lost."""
        with self._lock:
            weight = self._weigh(item)
            if self._waiting + weight > self._most:
                self._lose("no reader, and too much is waiting")
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # at the end of the interpreter
                    self._lose(str(error))
                    return False
                self._thread = thread
            self._waiting += weight
            self._queue.put(item)
            return True

    def drain(self, seconds: float | None) -> bool:
        """Wait until nothing waits; False when ``seconds`` (None: no limit) were too short."""
        limit = None if seconds is None else time.monotonic() + seconds
        while self._waiting:
            if limit is not None and time.monotonic() > limit:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    @property
    def loss(self) -> Loss | None:
        """The first error, if any."""
        since, patience = self._since, self._patience()
        if self._loss is None and since is not None and time.monotonic() > since + patience:
            self._note(f"no reader for {patience:g} s")
        return self._loss

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            self._since = time.monotonic()
            try:
                self._deliver(item)
            except Exception as error:
                self._lose(f"{type(error).__name__}: {error}")
            self._since = None
            with self._lock:
                self._waiting -= self._weigh(item)

    def _lose(self, reason: str) -> None:
        with self._lock:
            self.num_lost += 1
            self._note(reason)

    def _note(self, reason: str) -> None:
        if self._loss is None:
            self._loss = Loss(outlet=self.name, reason=reason, time=time.time())


class Sink(AsyncWriter[bytes]):
    """An open file for lines; works in a forked process as well."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(name, self._write, most=_MOST_BYTES, weigh=len)
        # A descriptor of its own: other code may replace 1 or 2 for a while.
        self._descriptor = os.dup(descriptor)
        self._told_lost = 0
        self._is_forked = False
        os.register_at_fork(after_in_child=self._forget_thread)

    def put(self, item: bytes) -> bool:
        """Queue text for writing, or lose it."""
        if self._is_forked:
            with contextlib.suppress(OSError):
                if _wait_until_writable(self._descriptor, 0):
                    os.write(self._descriptor, item)
            return True
        lost = self.num_lost
        if lost > self._told_lost:
            item = f"[{lost - self._told_lost} pieces of output are missing]\n".encode() + item
        is_queued = super().put(item)
        if is_queued:
            self._told_lost = lost
        return is_queued

    def _write(self, data: bytes) -> None:
        """
        Raises:
            OSError: it cannot be written.
        """
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                _wait_until_writable(self._descriptor, _WRITABLE_MS)

    def _forget_thread(self) -> None:
        # A forked process has no thread here, and perhaps a lock that is never released.
        self._is_forked, self._waiting, self._since = True, 0, None


def _wait_until_writable(descriptor: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(milliseconds))


class _Bytes(io.RawIOBase):
    """``sys.stdout.buffer`` for those who write bytes."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._sink.put(bytes(data))
        return len(data)


class Stream(io.TextIOBase):
    """Replaces ``sys.stdout`` or ``sys.stderr``: whole lines go to the sink.

    Args:
        descriptor: 1 or 2, for callers that need it (terminal size, subprocess).
        encoding: of the stream that it replaces.
    """

    def __init__(self, sink: Sink, descriptor: int, encoding: str) -> None:
        self.buffer = _Bytes(sink)
        self._sink = sink
        self._descriptor = descriptor
        self._encoding = encoding
        self._begun = ""
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew_lock)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    @property
    def loss(self) -> Loss | None:
        """See :attr:`AsyncWriter.loss`."""
        return self._sink.loss

    def write(self, text: str, /) -> int:
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            self._put(lines + newline)
            if len(self._begun) > _MOST_LINE:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Pass an unfinished line on; does not wait until it is written."""
        with self._lock:
            text, self._begun = self._begun, ""
            self._put(text)

    def drain(self, seconds: float | None) -> bool:
        """See :meth:`AsyncWriter.drain`."""
        self.flush()
        return self._sink.drain(seconds)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def _put(self, text: str) -> None:
        if text:
            self._sink.put(text.encode(self._encoding, "backslashreplace"))

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()
        self._begun = ""  # the parent's to say


def install() -> None:
    """Make this process's standard output and error non-blocking.

    Streams that a caller has replaced stay as they are.
    """
    if _installed():
        return
    same = False
    with contextlib.suppress(OSError):
        same = os.path.sameopenfile(1, 2)
    sink: Sink | None = None
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None or not _is_of(stream, descriptor):
            continue
        unblock(descriptor)
        with contextlib.suppress(OSError):
            stream.flush()
        if sink is None or not same:
            words = "standard output" if descriptor == 1 else "standard error"
            sink = Sink(descriptor, "standard output and error" if same else words)
        replacement = Stream(sink, descriptor, stream.encoding)
        setattr(sys, name, replacement)
        # Stored here as well: a live line replaces sys.stdout by a proxy.
        setattr(sys, f"__{name}__", replacement)
    atexit.register(finish)  # for a normal interpreter exit


def losses() -> Iterable[Loss]:
    """The errors of standard output and error, at most one each."""
    first_losses = {stream.loss for stream in _installed()}
    return [loss for loss in first_losses if loss is not None]


def finish(seconds: float | None = END_SECONDS) -> None:
    """Wait a last moment for pending output; the rest is lost.

    Args:
        seconds: in all; None: until it is written, for a command that only prints.
    """
    limit = None if seconds is None else time.monotonic() + seconds
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    for pump in _installed():
        pump.drain(None if limit is None else max(0.0, limit - time.monotonic()))


def _installed() -> list[Stream]:
    streams: list[object] = [sys.__stdout__, sys.__stderr__]
    return [stream for stream in streams if isinstance(stream, Stream)]


def _is_of(stream: TextIO, descriptor: int) -> bool:
    try:
        return stream.fileno() == descriptor
    except (OSError, ValueError):  # it has none, or is closed
        return False
