"""Finds the cause of a bad step before the ladder decides, and acts on a proven cause.

A transient fault leaves no trace: the step is computed again and nothing is skipped. If the data is
bad, only the culprits go to the ledger, and the step is planned anew without them. In both cases
the bad attempt never happened, also for the guard's memory; without proof the ladder decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from runner.data.cursor import BatchPlan
from runner.explain.bundle import Bundles, ExplainedStep
from runner.explain.case import Case, Earlier
from runner.explain.finding import Cause, Finding, Remedy
from runner.explain.probe import Attempt
from runner.explain.replay import Replay
from runner.observe.journal import Journal
from runner.policy.decision.history import MIX, NUMERICS, Incident, cause_of
from runner.policy.decision.judge import Verdict
from runner.policy.decision.signals import StepSignals
from runner.policy.restart import HARDWARE
from runner.system.error import RankError
from runner.train.guard import Guard
from runner.train.repeated_steps import RepeatedSteps
from runner.train.report import Reporter
from runner.train.state import TrainState
from runner.train.step import InFlightStep, StepInfo

# Limit on real repetitions of a step. A fault that persists is not transient, and data with ever
# more culprits is a bad range, which the ladder skips whole.
_MOST_REDONE = 4
_LATER = 16  # steps ahead: bad samples that far away are not one range


_SAME_MIX = Finding(
    cause=Cause.data_mix,
    remedy=Remedy.ladder,
    why="same as the step before it; it was not analysed again",
)


class Stepper(Protocol):
    """The part of :class:`runner.train.step.Stepper` used here."""

    @property
    def newest(self) -> InFlightStep: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRules:
    """Limits on replayed steps: for one incident, and for the whole run.

    ``may_load``: whether a checkpoint may be loaded to compare its weights.
    """

    an_incident: int
    in_all: int
    may_load: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Sources of the evidence that a person reads.

    Args:
        batch: returns the batch plan at a stream position.
        names: returns the data set's names of the samples at positions of a plan.
        bundles: writes all numbers; on rank 0 only.
        incarnation: number of this start.
    """

    batch: Callable[[int], BatchPlan]
    names: Callable[[BatchPlan, Sequence[int]], tuple[str, ...]]
    bundles: Bundles | None = None
    incarnation: int = 1


class ExplainingGuard:
    """A guard that looks for the cause before it decides.

    Args:
        guard: judges steps, and carries out the ladder.
        evidence: see :class:`Evidence`.
        repeated_steps: compares the steps after a rollback for bad weights; None to skip that.
    """

    def __init__(
        self,
        guard: Guard,
        replay: Replay,
        *,
        rules: ExplainRules,
        stepper: Stepper,
        journal: Journal,
        reporter: Reporter,
        evidence: Evidence,
        repeated_steps: RepeatedSteps | None = None,
    ) -> None:
        self._guard = guard
        self._replay = replay
        self._rules = rules
        self._stepper = stepper
        self._journal = journal
        self._reporter = reporter
        self._repeated = repeated_steps
        self._evidence = evidence

    def note_lines(self, info: StepInfo) -> None:
        """See :meth:`runner.train.guard.Guard.note_lines`."""
        self._guard.note_lines(info)

    def handle(self, info: StepInfo, state: TrainState) -> Verdict | None:
        """Like :meth:`runner.train.guard.Guard.handle`, which decides unless a cause is proven.

        Raises as that.

        Raises:
            RankError: the next start must exclude a node.
        """
        if self._repeated is not None and info.known is None:
            self._repeated.follow(info)
        if not _is_to_explain(info):
            return self._guard.handle(info, state)
        finding = self._explained(info, state)
        if finding is None:
            return self._guard.handle(info, state)
        self._keep(info, finding, state)
        if finding.remedy is Remedy.leave:
            raise self._leave(info, finding)
        if finding.remedy in (Remedy.redo, Remedy.skip, Remedy.widen):
            self._redo(info, finding, state)
            return None
        return self._decided(info, finding, state)

    def _decided(self, info: StepInfo, finding: Finding, state: TrainState) -> Verdict | None:
        """Let the ladder decide; on a rollback, begin to compare the steps."""
        rollbacks = self._journal.history.rollbacks
        before = len(rollbacks)
        verdict = self._guard.handle(replace(info, cause=finding.to_json()), state)
        went_back = len(rollbacks) > before
        is_open = finding.remedy is Remedy.go_back and finding.cause is not Cause.rate
        if self._repeated is not None and went_back and is_open and _reads_again(self._journal):
            # The checkpoint's limits: while the loss falls, the bad step's are lower.
            limits = state.baseline.limits
            self._repeated.begin(info, finding, to_step=rollbacks[-1].to_step, limits=limits)
        return verdict

    def _explained(self, info: StepInfo, state: TrainState) -> Finding | None:
        """Find the cause; None once the budget of replays is spent."""
        history, step, signals = self._journal.history, self._stepper.newest, info.signals
        left = self._rules.in_all - history.num_probes
        if left < self._rules.an_incident or info.batch is None:
            return None
        if history.num_redone_at(signals.step) >= _MOST_REDONE:
            return None
        if self._is_of_a_mix(signals):
            return _SAME_MIX
        attempt = Attempt(
            plan=info.batch,
            batches=step.fetched.micro_batches,
            seeds=step.seeds,
            sums=step.sums,
        )
        began = time.monotonic()
        came_again = self._repeated is not None and self._repeated.has_come_again(signals.step)
        finding = self._replay.explain(
            Case(
                attempt=attempt,
                limits=state.baseline.limits,
                later=self._evidence.batch(signals.stop + _LATER * (signals.stop - signals.start)),
                most_steps=self._rules.an_incident,
                overflowed=self._overflowed(signals),
                came_again=came_again,
                earlier=self._earlier(info, state),
            )
        )
        if self._repeated is not None and came_again and finding.remedy is Remedy.go_back:
            remaining = self._rules.an_incident - finding.steps
            finding = self._repeated.rate(info, state, finding, most_steps=remaining)
        self._reporter.stalled("discarded", time.monotonic() - began)
        return replace(finding, bundle=self._journal.num_lines)

    def _earlier(self, info: StepInfo, state: TrainState) -> Earlier | None:
        """Computes with the weights of a clean checkpoint; None if loading it costs too much."""
        if self._repeated is None or not self._rules.may_load:
            return None
        return partial(self._repeated.compute_earlier, info, state)

    def _is_of_a_mix(self, signals: StepSignals) -> bool:
        """Whether the previous step was discarded because of a new data mix."""
        before = self._journal.history.newest_discard()
        if before is None or before.samples is None:
            return False
        return before.samples[1] == signals.start and cause_of(before) == MIX

    def _overflowed(self, signals: StepSignals) -> bool:
        """Whether the previous step was computed in a wider precision."""
        before = self._journal.history.newest_redo()
        if before is None or before.samples is None:
            return False
        return before.samples[1] == signals.start and cause_of(before) == NUMERICS

    def _keep(self, info: StepInfo, finding: Finding, state: TrainState) -> None:
        """Write the evidence before the journal refers to it."""
        number = finding.bundle
        if self._evidence.bundles is not None and info.batch is not None and number is not None:
            report = ExplainedStep(
                step=info.signals.step,
                plan=info.batch,
                limits=state.baseline.limits,
                finding=finding,
            )
            self._evidence.bundles.write(number, report)

    def _leave(self, info: StepInfo, finding: Finding) -> RankError:
        """Report a failing device, so that the supervisor excludes the node."""
        message = f"step {info.signals.step}: {finding.describe()}"
        incident = Incident(
            kind="crash",
            step=info.signals.step,
            decision="restart from the ring, without this node",
            reason=message,
            ranks=finding.ranks,
            samples=(info.signals.start, info.signals.stop),
            detail={
                "incarnation": self._evidence.incarnation,
                "cause": HARDWARE,
                "signature": f"{finding.cause.value}: rank {finding.ranks[0]}",
                "host": finding.hosts[0],
                "traceback": "",
                "finding": finding.to_json(),
            },
        )
        self._journal.add(incident)
        self._reporter.incident(incident)
        return RankError(message)

    def _redo(self, info: StepInfo, finding: Finding, state: TrainState) -> None:
        """Undo the attempt: the loop plans the step anew from the same cursor."""
        signals, verdict = info.signals, state.baseline.judge(info.signals)
        assert info.batch is not None
        skipped = finding.positions if finding.remedy is Remedy.skip else ()
        incident = Incident(
            kind="redo",
            step=signals.step,
            decision=_decision(finding, len(skipped)),
            reason=f"{finding.describe()}{self._how_often(finding)}; {verdict.reason}",
            ranks=finding.ranks,
            samples=(signals.start, signals.stop),
            sample_ids=self._evidence.names(info.batch, finding.positions),
            cost_steps=1 + finding.steps,
            cost_seconds=info.seconds,
            detail={
                "verdict": verdict.kind.value,
                "skipped": list(skipped),
                **({"widened": True} if finding.remedy is Remedy.widen else {}),
                "cause": finding.to_json(),
            },
        )
        self._journal.add(incident)
        self._reporter.step(info, verdict, "redo", learning_rate=0.0, state=state)
        self._reporter.incident(incident)

    def _how_often(self, finding: Finding) -> str:
        """Count transient faults by rank: a device with several is going bad."""
        if finding.cause is not Cause.transient or len(finding.ranks) != 1:
            return ""
        before = self._journal.history.num_transient_on(finding.ranks[0])
        return f" (fault {before + 1} of this rank: check its device)" if before else ""


def _is_to_explain(info: StepInfo) -> bool:
    signals = info.signals
    is_ours = info.known is None and not info.unreadable and signals.withheld is None
    return is_ours and signals.gated


def _reads_again(journal: Journal) -> bool:
    """Whether the last rollback skips no samples."""
    incidents = reversed(journal.history.incidents)
    return next((i.detail["read_again"] for i in incidents if i.kind == "rollback"), False)


def _decision(finding: Finding, num_skipped: int) -> str:
    if finding.remedy is Remedy.widen:
        return "compute the step again in a wider precision, skip nothing"
    if not num_skipped:
        return "compute the step again, skip nothing"
    return f"skip {num_skipped} sample{'s' if num_skipped > 1 else ''}, compute the step again"
