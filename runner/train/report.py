"""Reports each step and incident: to metrics, trackers and the live line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

from runner.distributed.observers import Alone, alone_on_this_rank
from runner.observe.console import Progress
from runner.observe.metrics import MetricsLine, Pace, Throughput
from runner.observe.side_lines import RingLines, SideLines
from runner.policy.decision.history import Incident
from runner.policy.decision.judge import Verdict
from runner.policy.retention.records import State
from runner.run_dir.time_account import Past
from runner.system import output
from runner.system.json_lines import LineFile
from runner.train.agreed_step import StepInfo
from runner.train.run import Run
from runner.train.state import TrainState

# Columns of a step's line; those of an evaluation are asked for with None, when it is over.
Columns = Callable[[StepInfo | None], Mapping[str, float]]


class Outlet(Protocol):
    """A background writer, whose lines may be lost."""

    @property
    def loss(self) -> output.Loss | None: ...


class Reporter:
    """Passes reports on to the parts of :mod:`runner.observe`. Decides nothing.

    Opens the metrics, cut to what the run resumes from.

    Args:
        past: seconds by kind before this start.
        records_a_step: samples of a step that are no tokens; 0 for tokens.
        judged_by: the held-out number of ``eval.metric``, shown beside the held-out loss.
        alone: calls an observer; see :meth:`runner.distributed.observers.Observers.alone`.
            By default what fails is logged and left out on this rank.
        clock: seconds since the epoch; only rank 0's is used.
    """

    def __init__(
        self,
        run: Run,
        *,
        total_steps: int,
        past: Past,
        throughput: Throughput,
        records_a_step: int = 0,
        judged_by: str = "eval_loss",
        alone: Alone | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        group, check = run.group, run.lease.check
        run_dir, journal, ring = group.run_dir, run.journal, run.ring
        self._alone = alone or alone_on_this_rank()
        self.metrics_file: LineFile | None = None  # on rank 0
        if group.is_first:
            length = run.resumed.metrics_bytes
            self.metrics_file = LineFile(run_dir.metrics, length=length, check=check)
        self._ring_lines: RingLines | None = None
        if group.is_first:
            self._ring_lines = RingLines(
                SideLines(run_dir.ring_lines, check=check, attempt=lambda: journal.attempt),
                records=lambda: ring.records,
                stored=lambda: ring.uploads.stored if ring.uploads else (),
            )
        self._trackers = run.written.trackers
        self._outlets: list[Outlet | None] = [run.written.alerts, *self._trackers]
        self._is_first = group.is_first
        self._console = group.console
        self._throughput = throughput
        self._history = journal.history
        self._ring = ring
        self._total_steps = total_steps
        self._records_a_step = records_a_step
        self._judged_by = judged_by
        self._judged: tuple[str, float] | None = None
        self._eval_loss: float | None = None
        self._account = past.account
        self._last_life = past.last_life
        self._was_done = past.idle_seconds > 0
        self._began = journal.began
        self._clock = clock
        self._stalls: dict[str, float] = {}
        self._journal = journal.add
        self._columns: list[tuple[str, Columns]] = []
        self._receivers: list[Callable[[MetricsLine], None]] = []
        self._told_lost: set[str] = set()
        self._step = 0

    def add_columns(self, observer: str, columns: Columns) -> None:
        """Also write what ``columns`` returns with the line of each step, and each evaluation.

        Args:
            observer: what is left out if it fails.
        """
        self._columns.append((observer, columns))

    def also_applied(self, take: Callable[[MetricsLine], None]) -> None:
        """Also pass the line of each applied step to ``take``, after the existing receivers."""
        self._receivers.append(take)

    def also_lost(self, outlet: Outlet) -> None:
        """Also journal when the lines of ``outlet`` are lost."""
        self._outlets.insert(0, outlet)

    def step(
        self,
        info: StepInfo,
        verdict: Verdict,
        action: str,
        *,
        learning_rate: float,
        state: TrainState | None,
    ) -> None:
        """Report one attempted step. ``state`` is the state after the action."""
        self._report(self.line(info, verdict, action, learning_rate=learning_rate), state)

    def applied(self, state: TrainState, eval_loss: float | None) -> None:
        """Report ``state.unreported`` with the held-out loss of ``state``."""
        line, state.unreported = state.unreported, None
        assert line is not None, "there is an update to report"
        self._report(line, state, eval_loss=eval_loss)

    def line(
        self, info: StepInfo, verdict: Verdict, action: str, *, learning_rate: float
    ) -> MetricsLine:
        """The line of one attempted step, without an evaluation and the time."""
        signals, seconds = info.signals, info.seconds
        return MetricsLine(
            step=signals.step,
            cursor=signals.stop,
            samples=(signals.start, signals.stop),
            loss=signals.loss,
            grad_norm=signals.grad_norm,
            lr=learning_rate,
            tokens=signals.tokens,
            tokens_per_second=round(
                (self._records_a_step or signals.tokens) / (seconds or math.inf), 1
            ),
            seconds=round(seconds, 6),
            data_wait_seconds=round(info.wait_seconds, 6),
            verdict=verdict.kind.value,
            action=action,
            loss_limit=_limit(verdict.limits.loss),
            norm_limit=_limit(verdict.limits.grad_norm),
            columns={**self._columns_of(info), **info.metrics},
        )

    def _report(
        self, line: MetricsLine, state: TrainState | None, *, eval_loss: float | None = None
    ) -> None:
        now = self._clock()
        self._end_restart(now - line.seconds)
        stalls, self._stalls = self._stalls, {}
        more = {} if eval_loss is None else self._columns_of(None)
        line = replace(
            line,
            eval_loss=eval_loss,
            time=round(now, 3),
            stalls={kind: round(amount, 6) for kind, amount in stalls.items()},
            columns={**line.columns, **more},
        )
        if self.metrics_file is not None:
            self.metrics_file.append(line.to_json(), durably=False)
        self._account.add(line.to_json())
        tracked = line
        if self._records_a_step:  # there are no tokens
            speed = {"samples_per_second": line.tokens_per_second}
            tracked = replace(line, tokens_per_second=0.0, columns={**line.columns, **speed})
        for tracker in self._trackers:
            self._alone("tracker", partial(tracker.write, tracked), None)
        self._report_losses(line.step)
        if self._ring_lines is not None:
            self._alone("ring lines", partial(self._ring_lines.note, line.step), None)
        if state is not None and line.action == "apply":
            for take in self._receivers:
                take(line)
            self._alone("live line", lambda: self._show_progress(line, state), None)

    def _columns_of(self, info: StepInfo | None) -> dict[str, float]:
        columns: dict[str, float] = {}
        nothing: Mapping[str, float] = {}
        for observer, of in self._columns:
            columns |= self._alone(observer, partial(of, info), nothing)
        return columns

    @contextmanager
    def stall(self, kind: str) -> Iterator[None]:
        """Count the time inside as ``kind``, one of :data:`runner.run_dir.time_account.STALLS`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.stalled(kind, time.monotonic() - began)

    def stalled(self, kind: str, seconds: float) -> None:
        """Count ``seconds`` as one of :data:`runner.run_dir.time_account.KINDS`."""
        self._stalls[kind] = self._stalls.get(kind, 0.0) + seconds

    def undo(self, to_step: int) -> None:
        """Note a rollback: the steps after ``to_step`` no longer count."""
        self._account.undo(to_step)

    def take_stalls(self) -> dict[str, float]:
        """Take the seconds by kind that no metrics line has yet."""
        self._end_restart(self._clock())
        stalls = {kind: round(amount, 6) for kind, amount in self._stalls.items()}
        self._stalls = {}
        self._account.stalled(stalls)
        return stalls

    def spent(self) -> dict[str, float]:
        """Seconds by kind over all starts, except time still being counted."""
        return self._account.spent()

    def where_time_went(self) -> dict[str, float]:
        """Seconds since the first start by kind; see :meth:`TimeAccount.breakdown`."""
        now = self._clock()
        if self._was_done and self._last_life is not None:  # no step was left to do
            self._account.idle(now - self._last_life)
            self._last_life, self._stalls = None, {}
        self.take_stalls()
        return self._account.breakdown(now - self._began)

    def _end_restart(self, first_step_began: float) -> None:
        if self._last_life is not None:
            inside = sum(self._stalls.values())
            self._stalls["restart"] = max(0.0, first_step_began - inside - self._last_life)
            self._last_life = None

    def _show_progress(self, line: MetricsLine, state: TrainState) -> None:
        pace = self._throughput.note(line.seconds, line.tokens)
        if line.held_out is not None:
            self._eval_loss = line.held_out
            if self._judged_by != "eval_loss" and self._judged_by in line.columns:
                self._judged = self._judged_by, line.columns[self._judged_by]
        is_evaluated = line.held_out is not None
        if self._console.shows(state.updates, self._total_steps, is_evaluated=is_evaluated):
            self._console.progress(self._progress(line, state, pace))

    def _progress(self, line: MetricsLine, state: TrainState, pace: Pace) -> Progress:
        speed = pace.tokens_per_second
        if self._records_a_step:
            speed = self._records_a_step / (pace.seconds_per_step or math.inf)
        return Progress(
            step=state.updates,
            total=self._total_steps,
            loss=line.loss,
            grad_norm=line.grad_norm,
            lr=line.lr,
            speed=speed,
            counted="samples" if self._records_a_step else "tok",
            mfu=pace.mfu,
            eta_seconds=(self._total_steps - state.updates) * pace.seconds_per_step,
            num_clean=len({r.serial for r in self._ring.records if r.state is State.clean}),
            num_discarded=self._history.num_discarded,
            num_rollbacks=len(self._history.rollbacks),
            goodput=self._account.goodput(self._clock() - self._began),
            eval_loss=self._eval_loss,
            is_evaluated=line.held_out is not None,
            judged=self._judged,
        )

    def _report_losses(self, step: int) -> None:
        """Report each lost output once, in the outputs that still work."""
        self._step = step
        losses = [outlet.loss for outlet in self._outlets if outlet is not None]
        of_process = output.losses() if self._is_first else []
        for loss in (loss for loss in [*of_process, *losses] if loss is not None):
            if loss.outlet not in self._told_lost:
                self._told_lost.add(loss.outlet)
                self._journal(
                    Incident(
                        kind="output_lost",
                        step=step,
                        decision="go on without it",
                        reason=f"{loss.outlet}: {loss.reason}",
                        detail={"output": loss.outlet, "since": round(loss.time, 3)},
                    )
                )

    def incident(self, incident: Incident) -> None:
        """Print one permanent line."""
        self._console.incident(incident)

    def metrics_bytes(self, *, durably: bool = True) -> int:
        """Length of the metrics file; ``durably``: sync it first, or keep its lines."""
        if self.metrics_file is None:
            return 0
        return self.metrics_file.sync() if durably else self.metrics_file.num_bytes()

    def close(self) -> None:
        if self.metrics_file is not None:
            self.metrics_file.close()
        self._report_losses(self._step)
        if self._ring_lines is not None:
            self._alone("ring lines", partial(self._ring_lines.note, self._step), None)
            self._ring_lines.close()
        self._console.close()


def _limit(value: float) -> float | None:
    """A limit in seven digits; None for no limit."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
