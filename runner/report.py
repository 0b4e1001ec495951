"""Tells the world about each step and incident: metrics, trackers, the live line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from runner.observe.console import Console, Progress
from runner.observe.goodput import Past
from runner.observe.metrics import Metrics, MetricsLine, finite_or_none
from runner.observe.throughput import Pace, Throughput
from runner.observe.tracker import Tracker
from runner.policy.history import History, Incident
from runner.policy.ring import Record, State
from runner.policy.signals import StepSignals
from runner.policy.verdict import Verdict
from runner.state import TrainState
from runner.step import Outcome


class Happened(Protocol):
    """A step as :class:`runner.recover.Scene` holds it."""

    @property
    def signals(self) -> StepSignals: ...
    @property
    def outcome(self) -> Outcome | None: ...


class Records(Protocol):
    @property
    def records(self) -> Sequence[Record]: ...


class Reporter:
    """Fans out to the parts of :mod:`runner.observe`. Decides nothing.

    Args:
        past: where the time went before this start.
        began: seconds since the epoch at which the run was first started.
        clock: seconds since the epoch; only the first rank's is looked at.
    """

    def __init__(
        self,
        *,
        metrics: Metrics,
        trackers: Sequence[Tracker],
        console: Console,
        throughput: Throughput,
        history: History,
        ring: Records,
        total_steps: int,
        past: Past,
        began: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self._console = console
        self._throughput = throughput
        self._history = history
        self._ring = ring
        self._total_steps = total_steps
        self._eval_loss: float | None = None
        self._account = past.account
        self._last_life = past.last_life
        self._began = began
        self._clock = clock
        self._stalls: dict[str, float] = {}

    def step(
        self,
        happened: Happened,
        verdict: Verdict,
        action: str,
        *,
        learning_rate: float,
        state: TrainState | None,
        eval_loss: float | None = None,
    ) -> None:
        """One attempted step. ``state`` is as it is after the action."""
        signals, outcome = happened.signals, happened.outcome
        seconds = outcome.seconds if outcome else 0.0
        now = self._clock()
        self._end_restart(now - seconds)
        stalls, self._stalls = self._stalls, {}
        line = MetricsLine(
            step=signals.step,
            cursor=signals.stop,
            samples=(signals.start, signals.stop),
            loss=finite_or_none(signals.loss),
            grad_norm=finite_or_none(signals.grad_norm),
            lr=learning_rate,
            tokens=signals.tokens,
            tokens_per_second=round(signals.tokens / seconds, 1) if seconds else 0.0,
            seconds=round(seconds, 6),
            data_wait_seconds=round(outcome.wait_seconds, 6) if outcome else 0.0,
            verdict=verdict.kind.value,
            action=action,
            eval_loss=eval_loss,
            time=round(now, 3),
            stalls={kind: round(amount, 6) for kind, amount in stalls.items()},
        )
        self._metrics.write(line)
        self._account.add(line.to_json())
        for tracker in self._trackers:
            tracker.write(line)
        if state is not None and action == "apply":
            self._tell_progress(line, signals, state)

    @contextmanager
    def stall(self, kind: str) -> Iterator[None]:
        """Count what is done inside as ``kind``, one of :data:`runner.observe.goodput.STALLS`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._stalls[kind] = self._stalls.get(kind, 0.0) + time.monotonic() - began

    def undo(self, to_step: int) -> None:
        """A rollback: the steps after ``to_step`` count no more."""
        self._account.undo(to_step)

    def take_stalls(self) -> dict[str, float]:
        """Seconds by kind that no metrics line has told, in the account from now on."""
        self._end_restart(self._clock())
        taken = {kind: round(amount, 6) for kind, amount in self._stalls.items()}
        self._stalls = {}
        self._account.stalled(taken)
        return taken

    def spent(self) -> dict[str, float]:
        """Seconds by kind over all starts, but for what is still being counted."""
        return self._account.spent()

    def where_time_went(self) -> dict[str, float]:
        """Seconds since the first start by kind; see :meth:`TimeAccount.breakdown`."""
        self.take_stalls()
        return self._account.breakdown(self._clock() - self._began)

    def _end_restart(self, first_step_began: float) -> None:
        if self._last_life is not None:
            inside = sum(self._stalls.values())
            self._stalls["restart"] = max(0.0, first_step_began - inside - self._last_life)
            self._last_life = None

    def _tell_progress(self, line: MetricsLine, signals: StepSignals, state: TrainState) -> None:
        pace = self._throughput.note(line.seconds, line.tokens)
        if line.eval_loss is not None:
            self._eval_loss = line.eval_loss
        is_evaluated = line.eval_loss is not None
        if self._console.shows(state.updates, self._total_steps, is_evaluated=is_evaluated):
            self._console.progress(self._progress(line, signals, state, pace))

    def _progress(
        self, line: MetricsLine, signals: StepSignals, state: TrainState, pace: Pace
    ) -> Progress:
        return Progress(
            step=state.updates,
            total=self._total_steps,
            loss=signals.loss,
            grad_norm=signals.grad_norm,
            lr=line.lr,
            tokens_per_second=pace.tokens_per_second,
            mfu=pace.mfu,
            eta_seconds=(self._total_steps - state.updates) * pace.seconds_per_step,
            num_clean=len({r.serial for r in self._ring.records if r.state is State.clean}),
            num_discarded=self._history.num_discarded,
            num_rollbacks=len(self._history.rollbacks),
            goodput=self._account.goodput(self._clock() - self._began),
            eval_loss=self._eval_loss,
            is_evaluated=line.eval_loss is not None,
        )

    def incident(self, incident: Incident) -> None:
        """Say it in one line that stays."""
        self._console.incident(incident)

    def metrics_bytes(self, *, durably: bool = True) -> int:
        """Length of the metrics file; ``durably``: all of it is on the disk."""
        return self._metrics.sync() if durably else self._metrics.num_bytes()

    def close(self) -> None:
        self._metrics.close()
        for tracker in self._trackers:
            tracker.close()
        self._console.close()
