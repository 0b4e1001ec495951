"""Runs the guard over a recorded curve: the same judge and ladder on rows instead of steps.

A row stands for one attempted step and for one position of the stream. A rollback works as in the
loop: it restores the checkpoint's statistics, reads the rows up to the skipped range again, and
skips the range. A curve cannot show how the run would have continued after the repair: the rows
after the range are those of the unrepaired run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from runner.config.schema import CheckpointConfig
from runner.policy.decision.episode import Diagnosis
from runner.policy.decision.history import History, Incident, discard_incident
from runner.policy.decision.judge import Baseline, Kind
from runner.policy.decision.ladder import (
    Apply,
    BadStepTracker,
    Discard,
    Halt,
    Rebaseline,
    RemedyRules,
    Rollback,
    reach,
)
from runner.policy.decision.signals import Limits, StepSignals
from runner.policy.decision.skip_ledger import Ledger
from runner.policy.decision.step_decision import StepDecision, decide_step
from runner.policy.retention.interval import FIRST_PROBATIONS
from runner.policy.retention.records import Record, State, due_for_proof, retire, with_state

# States kept to follow recorded restarts.
_STATES_KEPT = 1000
_ROWS_AT_ONCE = 1000  # rows between reports of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCurve:
    """Columns of equal length, in the order of recording.

    ``steps`` as recorded; ``losses`` and ``grad_norms`` may have NaN and Inf, which count as such;
    ``fresh`` are rows without known predecessors (after a gap in the steps, or row 0 of a recording
    that starts later than the training), ``restarts`` rows whose step does not exceed the previous
    row's.
    """

    steps: Sequence[int]
    losses: Sequence[float]
    grad_norms: Sequence[float]
    fresh: frozenset[int] = frozenset()
    restarts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A row that was not applied as usual, and why.

    ``onset`` is the row where the trouble began, ``num_undone`` the number of applied rows that a
    rollback undid.
    """

    row: int
    verdict: str
    action: str
    reason: str
    onset: int
    num_undone: int = 0


class GuardReplay:
    """One pass over one curve: call :meth:`run`, then read the results.

    ``decisions`` are in order, ``findings`` have end row and diagnosis, ``skipped`` are the rows
    that rollbacks would have skipped, ``limits`` the limits at each row if ``keep_limits``.
    """

    def __init__(
        self,
        curve: RecordedCurve,
        *,
        rules: RemedyRules,
        checkpoint: CheckpointConfig,
        keep_limits: bool = False,
    ) -> None:
        assert rules.batch == 1, "a row is one position of the stream"
        self._curve, self._rules, self._checkpoint = curve, rules, checkpoint
        # A curve has no costs to choose it by, so auto is as it begins.
        first = FIRST_PROBATIONS * checkpoint.clean_after
        self._every = checkpoint.every if isinstance(checkpoint.every, int) else first
        self.decisions: list[Decision] = []
        self.findings: dict[int, tuple[int, Diagnosis]] = {}
        self.skipped = Ledger()
        self.limits: dict[int, Limits] | None = {} if keep_limits else None
        self._end = len(curve.steps)
        if 0 in curve.fresh:
            self._forget_start()
        self._start_over(0)

    def run(self, moved: Callable[[int], None] = lambda row: None) -> None:
        """GuardReplay the whole curve; calls ``moved`` with the row at intervals."""
        total = len(self._curve.steps)
        marks = sorted((self._curve.restarts | self._curve.fresh) - {0})
        for begin, end in pairwise([0, *marks, total]):
            if begin and begin in self._curve.fresh:
                self._forget_start()
                self._start_over(begin)
            row = self._recorded_restart(begin) if begin in self._curve.restarts else begin
            self._end = end
            while row < end:
                row = self._read(row, min(end, row + _ROWS_AT_ONCE))
                moved(row)

    def _forget_start(self) -> None:
        """Record that the next row is not an untrained model's, so its loss is no bound."""
        self._rules = replace(self._rules, untrained_loss=math.inf)

    def _start_over(self, row: int) -> None:
        """Reset to the state of a run that starts with this row."""
        self._baseline = Baseline(self._rules.guard)
        self._trouble = BadStepTracker(self._rules.guard)
        self._history = History()
        self._records: list[Record] = []
        self._saved: dict[int, tuple[Record, dict[str, Any]]] = {}
        self._next_serial = 1
        self._updates = 0
        self._known_until = row
        self._save(row)
        self._prove()

    def _read(self, row: int, end: int) -> int:
        """Read rows from ``row`` until one is not simply applied; returns the next row."""
        curve, updates, baseline = self._curve, self._updates, self._baseline
        losses, norms, ledger = curve.losses, curve.grad_norms, self._history.ledger
        limits, trouble, history = self.limits, self._trouble, self._history
        while row < end:
            if row < self._known_until and row in ledger:
                row += 1
                continue
            signals = StepSignals(
                step=updates + 1,
                start=row,
                stop=row + 1,
                loss=losses[row],
                grad_norm=norms[row],
                tokens=1,
                nonfinite_ranks=0,
                gated=False,
            )
            if limits is not None:
                limits[row] = baseline.limits
            ruling = decide_step(
                signals,
                baseline=baseline,
                trouble=trouble,
                history=history,
                ring=self._records,
                rules=self._rules,
            )
            row += 1
            if ruling.finding is not None:
                self.findings[ruling.finding.episode.start] = (row - 1, ruling.finding)
            if not isinstance(ruling.action, Apply):
                return self._act(row - 1, signals, ruling)
            baseline.accept(signals)
            self._updates = updates = updates + 1
            if updates % self._every == 0:
                self._save(row)
            if self._unproven:
                self._prove()
        return row

    def _act(self, row: int, signals: StepSignals, ruling: StepDecision) -> int:
        """Act as the loop would; returns the row to read next."""
        action, verdict = ruling.action, ruling.verdict
        self._baseline.refuse(signals)
        undone, following, kind = 0, row + 1, verdict.kind
        is_applied = isinstance(action, Rebaseline) and action.applied
        if isinstance(action, Discard | Rebaseline) and not is_applied:
            self._history.add(
                discard_incident(signals, verdict=verdict.kind.value, reason=verdict.reason)
            )
        if isinstance(action, Rebaseline):
            kind = Kind.level_shift
            self._baseline.restart_at(list(action.losses), list(action.grad_norms))
            self._trouble.settle()
        if is_applied:
            self._baseline.accept(signals)
            self._updates += 1
        if isinstance(action, Rollback):
            undone = self._updates - action.targets[0].step
            following = self._roll_back(signals, action)
        self.decisions.append(
            Decision(
                row=row,
                verdict=kind.value,
                action=type(action).__name__.lower(),
                reason=action.reason,
                onset=ruling.onset,
                num_undone=undone,
            )
        )
        if isinstance(action, Halt):
            # A person would intervene and restart; the judge starts over.
            first_loss = self._baseline.first_loss
            self._start_over(row + 1)
            self._baseline.first_loss = first_loss
        return following

    def _roll_back(self, signals: StepSignals, action: Rollback) -> int:
        target = action.targets[0]
        # Rows after a restart or a gap do not continue these rows.
        skip = action.skip[0], min(action.skip[1], self._end)
        self.skipped.add(*skip)
        self._history.add(
            Incident(
                kind="rollback",
                step=signals.step,
                decision=f"back to step {target.step}",
                reason=action.reason,
                samples=skip,
                detail={
                    "onset_step": action.onset_step,
                    "to_step": target.step,
                    "cursor": target.cursor,
                    "serial": target.serial,
                    "next_serial": self._next_serial,
                    # Reading a recorded row again would repeat the trouble forever.
                    "read_again": False,
                    "repeat": action.repeat,
                    "metrics_bytes": 0,
                    "cut_factor": action.cut_factor,
                    "cut_steps": action.cut_steps,
                    "held_limits": self._baseline.to_hold.to_json(),
                },
            )
        )
        self._known_until = max(self._known_until, skip[1])
        self._load(target.serial)
        return target.cursor

    def _recorded_restart(self, begin: int) -> int:
        """Follow a recorded restart: continue from the newest state before its step.

        The abandoned rows are never read again.
        """
        steps = self._curve.steps
        step = steps[begin]
        cursors = {serial: record.cursor for serial, (record, _) in self._saved.items()}
        earlier = [one for one, at in cursors.items() if at == 0 or steps[at - 1] < step]
        if not earlier:
            self._start_over(begin)
            return begin
        self._load(max(earlier))
        row = cursor = cursors[max(earlier)]
        while row < begin and steps[row] < step:
            row += 1
        if row < begin:
            self._history.ledger.add(row, begin)
        self._known_until = begin
        return cursor

    def _load(self, serial: int) -> None:
        record, state = self._saved[serial]
        self._baseline.load_json(state["baseline"])
        self._baseline.hold(self._history.held)
        self._trouble.load_json(state["trouble"])
        self._updates = record.step
        self._records[:] = [r for r in self._records if r.serial <= serial]
        self._saved = {key: value for key, value in self._saved.items() if key <= serial}
        self._unproven = any(r.state is State.committed for r in self._records)

    def _save(self, cursor: int) -> None:
        record = Record(
            serial=self._next_serial, step=self._updates, cursor=cursor, state=State.committed
        )
        self._next_serial += 1
        self._saved[record.serial] = (
            record,
            {"baseline": self._baseline.to_json(), "trouble": self._trouble.to_json()},
        )
        if len(self._saved) > _STATES_KEPT:
            del self._saved[next(iter(self._saved))]
        self._records.append(record)
        settings = self._checkpoint
        needed = reach(
            self._trouble,
            self._rules,
            updates=self._updates,
            cursor=cursor,
            ledger=self._history.ledger,
        )
        retired = retire(
            self._records, keep=settings.keep, keep_every=settings.keep_every, reach=needed
        )
        if retired:
            self._records[:] = [r for r in self._records if r not in retired]
        self._unproven = True

    def _prove(self) -> None:
        streak, clean_after = self._baseline.clean_streak, self._checkpoint.clean_after
        if streak < clean_after and self._updates:
            return
        due = due_for_proof(
            self._records, step=self._updates, clean_streak=streak, clean_after=clean_after
        )
        for record in due:
            self._records[:] = with_state(self._records, record.serial, State.clean)
        self._unproven = any(r.state is State.committed for r in self._records)
