"""Trackers of whole runs: send numbers, marks, configuration and summary from a thread.

Weights & Biases, MLflow, or an object of the user's own. Nothing waits for it: it is made, called
and closed in a thread of its own, and one that fails or hangs is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runner.observe.attempts import Attempts
from runner.observe.metrics import MetricsLine
from runner.system import output
from runner.system.output import Loss, Outlet

_MOST_WAITING = 10_000  # steps and incidents
_CLOSE_SECONDS, _CLOSE_SECONDS_LATE = 10.0, 1.0
# A tracker is imported and connected for its first line; a run may be over before that is done.
_START_SECONDS = 60.0


class RunTracker(Protocol):
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
        **{f"sources/{name}": value for name, value in line.columns.items()},
    }
    return {k: float(v) for k, v in numbers.items() if v is not None and math.isfinite(v)}


_Item = tuple[str, Any]


class BackgroundRunTracker:
    """Calls a :class:`RunTracker` from a thread.

    Args:
        name: of the tracker, for messages.
        make: makes the tracker, in the thread.
        attempts: numbers the steps.
    """

    def __init__(self, name: str, make: Callable[[], RunTracker], attempts: Attempts) -> None:
        self._make = make
        self._attempts = attempts
        self._tracker: RunTracker | None = None
        self._has_failed = False
        self._outlet: Outlet[_Item] = Outlet(
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

    def close(self) -> None:
        """Do nothing: the summary comes last, see :meth:`finish`."""

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

    def _deliver(self, item: _Item) -> None:
        if self._has_failed:
            return
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
