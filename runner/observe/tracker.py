"""Trackers of a run: they take its numbers, incidents and summary in a thread of their own.

Nothing waits for a tracker: it is made, called and closed in that thread, and one that fails or
hangs is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runner.observe.metrics import MetricsLine
from runner.system import output
from runner.system.files import read_bounded, write_json
from runner.system.output import Loss, Outlet
from runner.system.parsing import parse_json

_MOST_WAITING = 10_000  # steps and incidents
_CLOSE_SECONDS, _CLOSE_SECONDS_LATE = 10.0, 1.0
# A tracker is imported and connected for its first line; a run may be over before that is done.
_START_SECONDS = 60.0
_AHEAD = 100  # attempts reserved at a time: a crash leaves a gap of at most this many
_MOST_BYTES = 4096


class Tracker(Protocol):
    """The interface of a tracker. ``attempt`` counts attempted steps and never goes back."""

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        """Take the finite numbers of one attempted step, by name."""
        ...

    def incident(self, attempt: int, line: Mapping[str, Any]) -> None:
        """Take one line of ``journal.jsonl``."""
        ...

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Take the contents of ``summary.json``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a tracker learns of the run when it is made.

    Attributes:
        run_id: the run's random name, the same at each start.
        config: the settings as flat keys and plain values, without secrets.
        digest: of the settings.
        out: the run's directory.
    """

    run_id: str
    config: Mapping[str, Any]
    digest: str
    out: Path


def numbers_of(line: MetricsLine) -> dict[str, float]:
    """The finite numbers of one attempted step."""
    numbers = {
        "step": float(line.step),
        "train/loss": line.loss,
        "train/grad_norm": line.grad_norm,
        "train/lr": line.lr,
        "train/tokens_per_second": line.tokens_per_second,
        "eval/loss": line.eval_loss,
        "guard/discarded": float(line.action != "apply"),
        **{_name(column): value for column, value in line.columns.items()},
    }
    return {k: float(v) for k, v in numbers.items() if v is not None and math.isfinite(v)}


def _name(column: str) -> str:
    """A column's name in trackers; those of the layers have a group of their own."""
    return column if column.startswith("layers/") else f"sources/{column}"


class Attempts:
    """The number of attempted steps over all starts of a run: the axis of trackers.

    It never goes back, neither after a rollback nor after a crash, where the steps since the
    checkpoint are done again: trackers drop values for a number that they already have.

    Args:
        path: file of the reserved numbers.
        check: raises when this process may no longer write.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._check = check
        self.newest = self._reserved = _read(path)

    newest: int
    """The number given last; 0 before the first."""

    def next(self) -> int:
        """The number of the next attempt, from 1.

        Raises:
            OSError: no further numbers can be reserved.
        """
        if self.newest >= self._reserved:
            self._reserve(self.newest + _AHEAD)
        self.newest += 1
        return self.newest

    def close(self) -> None:
        """Give back the unused numbers.

        Raises:
            OSError: it cannot be written.
        """
        self._reserve(self.newest)

    def _reserve(self, number: int) -> None:
        self._check()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"newest": number})
        self._reserved = number


def _read(path: Path) -> int:
    try:
        stored: Any = parse_json(read_bounded(path, _MOST_BYTES))
        number = stored["newest"]
    except (OSError, ValueError, LookupError, TypeError):
        return 0
    return number if type(number) is int and number >= 0 else 0


class BackgroundTracker:
    """Calls a :class:`Tracker` from a thread.

    Args:
        name: of the tracker, for messages.
        make: makes the tracker, in the thread.
        attempts: numbers the steps.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], attempts: Attempts) -> None:
        self._make = make
        self._attempts = attempts
        self._tracker: Tracker | None = None
        self._has_failed = False
        self._outlet: Outlet[tuple[str, Any]] = Outlet(
            name,
            self._deliver,
            most=_MOST_WAITING,
            patience=lambda: _START_SECONDS if self._tracker is None else output.STALL_SECONDS,
        )

    @property
    def loss(self) -> Loss | None:
        """See :attr:`runner.system.output.Outlet.loss`."""
        return self._outlet.loss

    def write(self, line: MetricsLine) -> None:
        """Take the numbers of one attempted step."""
        self._outlet.put(("numbers", numbers_of(line)))

    def tell(self, line: Mapping[str, Any]) -> None:
        """Take one journal line."""
        self._outlet.put(("incident", dict(line)))

    def finish(self, summary: Mapping[str, Any], *, in_time: bool) -> str:
        """Take the summary. What is not sent within some seconds is lost.

        Returns:
            A sentence about what was lost; empty if all was sent.
        """
        self._outlet.put(("summary", dict(summary)))
        self._outlet.put(("close", None))
        seconds = _CLOSE_SECONDS if in_time and self.loss is None else _CLOSE_SECONDS_LATE
        is_sent = self._outlet.drain(seconds)
        if not is_sent and self._may_start(summary, in_time=in_time):
            is_sent = self._outlet.drain(_START_SECONDS)
        loss, name = self.loss, self._outlet.name
        if loss is not None and self._outlet.num_lost:
            return f"{name}: {loss.reason}"
        if is_sent:
            return ""
        if self._tracker is None:
            return f"{name}: the run was not sent; it was still being connected"
        return f"{name}: the end of the run was not sent; it takes too long"

    def _may_start(self, summary: Mapping[str, Any], *, in_time: bool) -> bool:
        """Whether this is a short run with time for a tracker that is still being connected."""
        is_stopped = summary.get("status") == "preempted"
        return in_time and not is_stopped and self._tracker is None and self.loss is None

    def _deliver(self, item: tuple[str, Any]) -> None:
        if self._has_failed:
            return  # a record after a torn one could not be read
        kind, value = item
        try:
            if self._tracker is None:
                self._tracker = self._make()
            if kind == "numbers":
                self._tracker.numbers(self._attempts.next(), value)
            elif kind == "incident":
                self._tracker.incident(self._attempts.newest, value)
            elif kind == "summary":
                self._tracker.summary(value)
            else:
                self._attempts.close()
                self._tracker.close()
        except Exception:
            self._has_failed = True
            raise
