"""Judges a step and decides; ``recovery`` carries out each decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from runner.health.preemption import StopRequested
from runner.policy.decision.history import (
    GO_BACK,
    MIX,
    NUMERICS,
    RATE,
    STATE,
    STICKY,
    History,
    may_be_data,
)
from runner.policy.decision.judge import Kind, Verdict
from runner.policy.decision.ladder import Apply, Discard, Halt, Rebaseline, RemedyRules, Replayed
from runner.policy.decision.step_decision import StepDecision, decide_again, decide_step
from runner.system.error import Halted
from runner.system.units import name_ranks
from runner.train.agreed_step import StepInfo
from runner.train.recovery import Recovery
from runner.train.run import Run
from runner.train.state import TrainState

# Proven causes that lie in no sample.
_NOT_DATA = (STICKY, STATE, RATE, NUMERICS)


class Steps(Protocol):
    """The part of :class:`runner.train.step_runner.StepRunner` used here."""

    @property
    def is_ahead(self) -> bool: ...
    def forget_known_discards(self) -> None: ...


class StepGuard:
    """Decides what to do about a step, and does it.

    Attributes:
        leaves: whether a request to stop ends the wait for a checkpoint to go back to.
    """

    leaves = False

    def __init__(self, run: Run, *, rules: RemedyRules, recovery: Recovery, steps: Steps) -> None:
        self._stop = run.group.stop
        self._rules = rules
        self._recovery = recovery
        self._steps = steps
        self._ring = run.ring
        self._journal = run.journal
        self._reporter = run.reporter
        self._heart = run.group.heart
        self._backlog = run.backlog
        self._keeps_lines = False

    def note_lines(self, info: StepInfo) -> None:
        """Journal that rank 0 can no longer write its files, or can again."""
        if info.keeps_lines is not self._keeps_lines:
            self._keeps_lines = info.keeps_lines
            self._recovery.note_lines(
                info.signals.step,
                self._backlog.message(),
                self._backlog.patience_seconds if info.keeps_lines else None,
            )

    def handle(self, info: StepInfo, state: TrainState) -> Verdict | None:
        """Judge the step; discard it or roll back if that is the decision. Collective.

        Returns:
            The verdict of an applied update that counts; None if the step is finished.

        Raises:
            Halted: the guard's budget is spent.
            CheckpointError: no rollback target can be loaded.
            DataError: more samples than data.max_unreadable could not be read.
            RankError: a rank's storage is gone.
        """
        if info.unreadable:
            self._recovery.pass_over(info)
            return None
        signals = info.signals
        ruling = self._rule(info, state)
        verdict, action = ruling.verdict, ruling.action
        if ruling.finding is not None:
            self._recovery.conclude(info, ruling.finding)
        if info.known is not None and isinstance(action, Apply):
            # Settings may have changed since, but a discarded step stays discarded.
            action = Discard(reason=info.known.reason)
        assert isinstance(action, Apply) is not signals.gated or verdict.kind is Kind.drift
        assert isinstance(action, Apply) or not self._steps.is_ahead
        if isinstance(action, Apply):
            return verdict
        state.baseline.refuse(signals)
        if isinstance(action, Discard):
            self._recovery.discard(state, info, verdict, action)
        elif isinstance(action, Rebaseline):
            self._recovery.rebaseline(state, info, verdict, action)
            return verdict if action.applied else None
        elif isinstance(action, Halt):
            self._recovery.halt(info, verdict, action)
            raise Halted(action.reason)
        else:
            self._steps.forget_known_discards()
            self._heart.enter("roll back")
            self._recovery.roll_back(state, info, verdict, action)
        return None

    def _rule(self, info: StepInfo, state: TrainState) -> StepDecision:
        """Judge the step and decide. Collective if it waits for a checkpoint.

        Raises:
            StopRequested: meanwhile; the next start computes the step again.
        """
        before = state.trouble.to_json()
        ruling = decide_step(
            info.signals,
            baseline=state.baseline,
            trouble=state.trouble,
            history=self._journal.history,
            ring=self._ring.records,
            rules=self._rules,
            replayed=_replayed(info, self._journal.history),
        )
        if not ruling.lacks_target:
            return ruling
        # Whether the run halts must not depend on how long a proof takes.
        self._heart.enter("roll back")
        # Else the weights are not those of the last update that was counted.
        may_leave = self.leaves and info.signals.gated
        with self._reporter.stall("rollback"):
            if not self._ring.finish_proofs(lambda: may_leave and self._stop.is_set):
                state.trouble.load_json(before)
                raise StopRequested
        return decide_again(ruling, baseline=state.baseline, ring=self._ring.records)


def _replayed(info: StepInfo, history: History) -> Replayed:
    """The result of replays. For a step known from the journal, only what decides whether a level
    may settle counts again; the journal has the rest. Once no computations are left, a device that
    the last ones proved bad is still taken for bad."""
    cause = info.cause or {}
    noted = info.noted_cause
    # Of a good step nothing settles, and the history may be long.
    last = history.newest_cause(info.signals.start) if info.signals.gated and not noted else noted
    is_named = cause.get("cause") in _NOT_DATA
    return Replayed(
        proven=_named(cause) if is_named else "",
        may_discard=cause.get("cause") == NUMERICS,
        may_settle=may_be_data(noted) and last.get("cause") != STICKY,
        is_mix=noted.get("cause") == MIX,
        blames_weights=cause.get("remedy") == GO_BACK,
        rate_factor=cause.get("rate_factor"),
    )


def _named(cause: Mapping[str, Any]) -> str:
    """A proven cause in words, with its ranks and their hosts."""
    ranks, hosts = cause["ranks"], cause["hosts"]
    who = name_ranks(ranks) if ranks else ""
    where = f" on {', '.join(hosts)}" if hosts else ""
    return f"{cause['cause']}: {cause['why']}" + (f" ({who}{where})" if who else "")
