"""A run on paper: the ladder's decisions carried out on plain numbers, as the loop does.

Verdicts are given, not judged; a checkpoint is a record and the state it would restore.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from runner.policy.decision.episode import PreOnset
from runner.policy.decision.history import History, Incident, discard_incident
from runner.policy.decision.judge import Kind, Verdict
from runner.policy.decision.ladder import (
    Action,
    Apply,
    BadStepTracker,
    DecisionInput,
    Discard,
    Rebaseline,
    RemedyRules,
    Rollback,
    decide,
    reach,
)
from runner.policy.decision.signals import StepSignals
from runner.policy.retention.records import (
    Reach,
    Record,
    State,
    abandoned_by_rollback,
    due_for_proof,
    retire,
    with_state,
)
from tests.policy.steps import BATCH, attempted

BEFORE = PreOnset(loss=3.0, grad_norm=1.0, creep=1.0, is_creep_clear=False, drift_share=0.0)
BAD_KINDS = (Kind.spike, Kind.non_finite)


class PaperRun:
    """``updates`` and ``cursor`` go back at a rollback; ``history`` and ``records`` do not."""

    def __init__(
        self,
        rules: RemedyRules,
        *,
        every: int = 10,
        clean_after: int = 3,
        keep: int = 3,
        untrained_loss: float = 10.0,
        before: PreOnset = BEFORE,
    ) -> None:
        self.rules = rules
        self.before = before
        self.history = History()
        self.trouble = BadStepTracker(rules.guard)
        self.records: list[Record] = []
        self.updates = 0
        self.cursor = 0
        self.clean_streak = 0
        self.last_clean: list[tuple[int, int]] = []
        self._every, self._clean_after, self._keep = every, clean_after, keep
        self._untrained_loss = untrained_loss
        self._next_serial = 1
        self._states: dict[int, dict[str, Any]] = {}
        self._save()
        self._prove()

    def healthy(self, steps: int) -> None:
        """So many clean steps."""
        for _ in range(steps):
            assert isinstance(self.attempt(Kind.clean), Apply)

    def attempt(
        self,
        kind: Kind,
        loss: float = 3.0,
        *,
        drift_steps: int = 0,
        recent: Sequence[tuple[float, float]] = (),
    ) -> Action:
        """One step with this verdict; a drift began ``drift_steps`` applied steps before."""
        signals = self._next_signals(loss)
        onset = (self.updates + 1, signals.start)
        if kind is Kind.drift and self.last_clean:
            onset = self.last_clean[-min(max(1, drift_steps), len(self.last_clean))]
        verdict = Verdict(kind=kind, reason=f"told {kind.value}", onset_step=0, onset=0)
        return self.act(signals, _with_onset(verdict, onset), recent)

    def act(
        self, signals: StepSignals, verdict: Verdict, recent: Sequence[tuple[float, float]] = ()
    ) -> Action:
        """Decide on one step and do it."""
        self.trouble.note(signals, self.before if verdict.kind in BAD_KINDS else None)
        action = decide(
            DecisionInput(
                verdict=verdict,
                signals=signals,
                trouble=self.trouble,
                history=self.history,
                ring=self.records,
                rules=self.rules,
                untrained_loss=self._untrained_loss,
                recent=recent,
            )
        )
        if isinstance(action, Apply):
            self._advance(signals)
        else:
            self.clean_streak = 0
        if isinstance(action, Rebaseline) and action.applied:
            self._advance(signals)
        elif isinstance(action, Discard | Rebaseline):
            self._discard(signals, verdict)
        if isinstance(action, Rebaseline):
            self.trouble.settle()
        if isinstance(action, Rollback):
            self._roll_back(action)
        return action

    def _next_signals(self, loss: float) -> StepSignals:
        allowed = (
            position
            for start, stop in self.history.ledger.allowed(self.cursor)
            for position in range(start, start + BATCH if stop is None else stop)
        )
        taken = list(islice(allowed, BATCH))
        return attempted(self.updates + 1, loss, start=taken[0], stop=taken[-1] + 1)

    def _advance(self, signals: StepSignals) -> None:
        self.clean_streak += 1
        self.updates += 1
        self.cursor = signals.stop
        self.last_clean.append((signals.step, signals.start))
        self._prove()
        if self.updates % self._every == 0:
            self._save()

    def _discard(self, signals: StepSignals, verdict: Verdict) -> None:
        self.cursor = signals.stop
        self.history.add(
            discard_incident(signals, verdict=verdict.kind.value, reason=verdict.reason)
        )

    def _roll_back(self, action: Rollback) -> None:
        target = action.targets[0]
        self.history.add(
            Incident(
                kind="rollback",
                step=self.updates + 1,
                decision="back",
                reason=action.reason,
                samples=action.skip,
                detail={
                    "onset_step": action.onset_step,
                    "to_step": target.step,
                    "cursor": target.cursor,
                    "serial": target.serial,
                    "next_serial": self._next_serial,
                    "read_again": action.read_again,
                    "repeat": action.repeat,
                    "metrics_bytes": 0,
                    "cut_factor": action.cut_factor,
                    "cut_steps": action.cut_steps,
                },
            )
        )
        left = abandoned_by_rollback(self.records, target.serial)
        self.records = [record for record in self.records if record not in left]
        state = json.loads(json.dumps(self._states[target.serial]))
        self.updates, self.cursor = target.step, target.cursor
        self.clean_streak = state["clean_streak"]
        self.last_clean = [tuple(pair) for pair in state["last_clean"]]
        self.trouble.load_json(state["trouble"])

    def _save(self) -> None:
        record = Record(
            serial=self._next_serial, step=self.updates, cursor=self.cursor, state=State.committed
        )
        self._next_serial += 1
        self._states[record.serial] = {
            "clean_streak": self.clean_streak,
            "last_clean": list(self.last_clean),
            "trouble": self.trouble.to_json(),
        }
        self.records.append(record)
        self._retire()

    def _retire(self) -> None:
        gone = retire(self.records, keep=self._keep, keep_every=0, reach=self.reach())
        self.records = [record for record in self.records if record not in gone]

    def reach(self) -> Reach:
        """How far back the next rollback may have to go."""
        return reach(
            self.trouble,
            self.rules,
            updates=self.updates,
            cursor=self.cursor,
            ledger=self.history.ledger,
        )

    def _prove(self) -> None:
        due = due_for_proof(
            self.records,
            step=self.updates,
            clean_streak=self.clean_streak,
            clean_after=self._clean_after,
        )
        for record in due:
            self.records = with_state(self.records, record.serial, State.clean)
        if due:
            self._retire()


def _with_onset(verdict: Verdict, onset: tuple[int, int]) -> Verdict:
    return Verdict(kind=verdict.kind, reason=verdict.reason, onset_step=onset[0], onset=onset[1])
