"""Finds the cause of a bad step before the ladder decides, and acts on a proven cause.

A transient fault leaves no trace: the step is computed again and nothing is skipped. If the data is
bad, only the culprits go to the ledger, and the step is planned anew without them. In both cases
the bad attempt never happened, also for the guard's memory; without proof the ladder decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from runner.config.schema import ExplainKind, GuardConfig, RemedyKind
from runner.data.feed import named_samples
from runner.distributed.observers import Failure
from runner.explain.bundle import Bundles
from runner.explain.case import Case, inconclusive
from runner.explain.observer_note import ObserverNote
from runner.explain.probe import Bench
from runner.explain.repeated_steps import RepeatedSteps, without_rate
from runner.explain.replay import Replay
from runner.health.rank_checks import DeviceFault
from runner.policy.decision.finding import Cause, Finding, Remedy
from runner.policy.decision.history import (
    EXPLAIN,
    MIX,
    NUMERICS,
    STICKY,
    History,
    Incident,
    cause_of,
)
from runner.policy.decision.judge import Verdict
from runner.policy.decision.signals import StepSignals
from runner.system.error import LeaveError
from runner.system.units import counted
from runner.train.agreed_step import StepInfo
from runner.train.run import EngineRun
from runner.train.state import TrainState
from runner.train.step_guard import StepGuard
from runner.train.step_runner import StepPlanner

T = TypeVar("T")
# Limit on real repetitions of a step. A fault that persists is not transient, and data with ever
# more culprits is a bad range, which the ladder skips whole.
_MOST_REDONE = 4
# Steps that are computed in a wider precision at once, if the step before was as well.
_LEAST_WIDE, _MOST_WIDE = 16, 1024
# Limits on replayed steps: for one incident, and for all as a share of the run's steps.
_BUDGETS = {ExplainKind.quick: (10, 0.005), ExplainKind.full: (300, 0.05)}
_LEAST_INCIDENTS = 6  # incidents that any run may replay, however short
_LATER = 16  # steps ahead: bad samples that far away are not one range

_SAME_MIX = inconclusive("same as the step before it; it was not analysed again", Cause.data_mix)
_NOTHING_COUNTS = inconclusive(
    "no label of these samples counts, so they have no mean loss", Cause.data
)
_ENDED_STARTS = inconclusive("not tried: the starts before ended in its probes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainRules:
    """Limits on replayed steps: for one incident, and for the whole run.

    ``may_load``: whether a checkpoint may be loaded to compare its weights.
    """

    guard: GuardConfig
    an_incident: int
    in_all: int
    may_load: bool = False

    @classmethod
    def of(cls, kind: ExplainKind, guard: GuardConfig, steps: int) -> ExplainRules | None:
        """None if finding a cause is off, or would change nothing."""
        if kind is ExplainKind.off or guard.remedy is RemedyKind.discard or not guard.enabled:
            return None
        an_incident, share = _BUDGETS[kind]
        return cls(
            guard=guard,
            an_incident=an_incident,
            in_all=max(_LEAST_INCIDENTS * an_incident, round(share * steps)),
            may_load=kind is ExplainKind.full,
        )


class ExplainingGuard:
    """A guard that looks for the cause before it decides.

    What fails in looking for it becomes "not tried".

    Args:
        guard: judges steps, and carries out the ladder.
        repeated_steps: compares the steps after a rollback for bad weights.
        bundles: writes all numbers; on rank 0 only.
    """

    def __init__(
        self,
        rules: ExplainRules,
        run: EngineRun,
        guard: StepGuard,
        planner: StepPlanner,
        *,
        replay: Replay,
        repeated_steps: RepeatedSteps,
        bundles: Bundles | None = None,
    ) -> None:
        self._rules, self._run, self._guard, self._planner = rules, run, guard, planner
        self._replay, self._repeated, self._bundles = replay, repeated_steps, bundles
        self._observers, self._history = run.observers, run.history
        # Of the step that is explained, and of probes that follow a rollback, or a return from one.
        self._mark, self._later_mark = (
            ObserverNote.of(run, "explain"),
            ObserverNote.of(run, "later"),
        )

    @classmethod
    def of(
        cls,
        rules: ExplainRules,
        run: EngineRun,
        guard: StepGuard,
        planner: StepPlanner,
        *,
        seed: int,
        is_compiled: bool,
    ) -> ExplainingGuard:
        """The guard that computes a bad step again to find its cause first.

        Args:
            seed: the run's; ``is_compiled``: hooks in the model's modules would not be called.
        """
        bench = Bench(run, loss_floor=rules.guard.loss_floor, is_compiled=is_compiled)
        replay = Replay(bench)
        bundles = Bundles(run, seed) if run.group.is_first else None
        repeated = RepeatedSteps(rules.guard, run, planner, replay, bundles)
        return cls(
            rules, run, guard, planner, replay=replay, repeated_steps=repeated, bundles=bundles
        )

    def note_lines(self, info: StepInfo) -> None:
        """See :meth:`StepGuard.note_lines`."""
        self._guard.note_lines(info)

    def handle(self, info: StepInfo, state: TrainState) -> Verdict | None:
        """Like :meth:`StepGuard.handle`, which decides unless a cause is proven.

        Raises as that.

        Raises:
            LeaveError: the next start must exclude a node.
        """
        if info.known is None and self._repeated.is_following:
            self._follow(info, state)
        is_ours = info.known is None and not info.unreadable and info.signals.withheld is None
        finding = self._explained(info, state) if is_ours and info.signals.gated else None
        if finding is None:
            return self._guard.handle(info, state)
        self._keep(info, finding, state)
        if finding.remedy is Remedy.leave:
            raise self._leave(info, finding)
        persists = finding.cause is Cause.sticky and self._persists(info.signals.step)
        if finding.remedy in (Remedy.redo, Remedy.skip, Remedy.widen) and not persists:
            self._redo(info, finding, state)
            return None
        return self._decided(info, finding, state)

    def _persists(self, step: int) -> bool:
        """Whether a device has spoilt this step as often as guard.persist says, counting now."""
        redone = self._history.redone_at(step)
        num = sum(cause_of(incident) == STICKY for incident in redone)
        return num + 1 >= min(self._rules.guard.persist, _MOST_REDONE)

    def _decided(self, info: StepInfo, finding: Finding, state: TrainState) -> Verdict | None:
        """Let the ladder decide; on a rollback, begin to compare the steps."""
        rollbacks = self._history.rollbacks
        before = len(rollbacks)
        verdict = self._guard.handle(replace(info, cause=finding.to_json()), state)
        went_back = len(rollbacks) > before
        is_open = finding.remedy is Remedy.go_back and finding.cause is not Cause.rate
        if went_back and is_open and _reads_again(self._history):
            # The checkpoint's limits: while the loss falls, the bad step's are lower.
            to_step = rollbacks[-1].to_step
            self._look_later(
                info, lambda: self._repeated.begin(info, finding, state, to_step=to_step)
            )
        return verdict

    def _follow(self, info: StepInfo, state: TrainState) -> None:
        """Compare a recomputed step; the first that differs is probed, unless its probes have ended
        starts. Collective."""
        compared = self._look(lambda: self._repeated.follow(info, state))
        if callable(compared) and not self._history.has_ended_starts(info.signals.step):
            self._look_later(info, compared)

    def _look(self, work: Callable[[], T]) -> T | Failure | None:
        """Look for a cause; what fails is tried again at the next bad step. Collective."""
        result = self._observers.together(EXPLAIN, work, stays=True)
        if isinstance(result, Failure):
            self._repeated.stop()
        return result

    def _look_noted(
        self, mark: ObserverNote, signals: StepSignals, work: Callable[[], T]
    ) -> T | Failure | None:
        """:meth:`_look` for work that computes: ``mark`` notes the step before it begins."""

        def noted() -> T:
            self._observers.ranks.all_or_none("noting the step", lambda: mark.begin(signals))
            return work()

        with mark.ended_after():
            return self._look(noted)

    def _look_later(self, info: StepInfo, work: Callable[[], T]) -> T | Failure | None:
        return self._look_noted(self._later_mark, info.signals, work)

    def _explained(self, info: StepInfo, state: TrainState) -> Finding | None:
        """Find the cause; with no computations left, only a device that was proven bad before."""
        history, step, signals = self._history, self._run.stepper.newest, info.signals
        if info.batch is None:
            return None
        left = self._rules.in_all - history.num_probes
        if left < self._rules.an_incident or len(history.redone_at(signals.step)) >= _MOST_REDONE:
            return self._still_sticky(signals)
        if self._is_of_a_mix(signals):
            return _SAME_MIX
        if history.has_ended_starts(signals.step):
            return _ENDED_STARTS
        if not signals.tokens and not signals.nonfinite_ranks:
            return _NOTHING_COUNTS
        came_again = state.came_again == signals.step
        case = Case(
            plan=info.batch,
            batches=step.fetched.micro_batches,
            seeds=step.seeds,
            sums=step.sums,
            limits=state.baseline.limits,
            later=self._planner.batch(signals.stop + _LATER * (signals.stop - signals.start)),
            most_steps=self._rules.an_incident,
            overflowed=self._overflowed(signals),
            came_again=came_again,
            earlier=partial(self._repeated.compute_earlier, info, state)
            if self._rules.may_load
            else None,
        )
        with self._run.reporter.stall("discarded"):
            found = self._look_noted(self._mark, signals, lambda: self._replay.explain(case))
            if isinstance(found, Finding):
                finding = found
            else:
                why = _why_failed(found)
                finding = replace(inconclusive(f"not tried: {why}"), not_tried=(why,), steps=1)
            finding = self._repeated.blames_device(finding)
            if came_again and finding.remedy is Remedy.go_back:
                before, left = finding, self._rules.an_incident - finding.steps
                rated = self._look_later(
                    info, lambda: self._repeated.rate(info, state, before, most_steps=left)
                )
                finding = (
                    rated
                    if isinstance(rated, Finding)
                    else without_rate(before, f"G: not tried: {_why_failed(rated)}")
                )
        return replace(finding, bundle=self._run.journal.num_lines)

    def _still_sticky(self, signals: StepSignals) -> Finding | None:
        """The device at fault in the previous attempt at this step, without computing anew."""
        before = self._history.newest_redo()
        if before is None or before.samples is None or cause_of(before) != STICKY:
            return None
        if signals.start not in before.samples:
            return None
        cause = before.detail["cause"]
        return replace(
            inconclusive(f"as before, no more computations are left: {cause['why']}", Cause.sticky),
            ranks=tuple(cause["ranks"]),
            hosts=tuple(cause["hosts"]),
        )

    def _is_of_a_mix(self, signals: StepSignals) -> bool:
        """Whether the previous step was discarded because of a new data mix."""
        before = self._history.newest_discard()
        if before is None or before.samples is None:
            return False
        return before.samples[1] == signals.start and cause_of(before) == MIX

    def _overflowed(self, signals: StepSignals) -> bool:
        """Whether the previous step was computed in a wider precision."""
        before = self._history.newest_redo()
        if before is None or before.samples is None or cause_of(before) != NUMERICS:
            return False
        return before.samples[1] == signals.start or self._history.is_wide(signals.start - 1)

    def _wide_steps(self, finding: Finding, signals: StepSignals) -> int:
        """How many steps from this one on are computed in the wider precision at once.

        A proof for each would use up the budget. After the last of them one step is tried in the
        run's precision; if it is bad, there are twice as many.
        """
        if finding.remedy is not Remedy.widen or not self._overflowed(signals):
            return 0
        ranges = self._history.wide_ranges
        size = signals.stop - signals.start
        last = ranges[-1] if ranges else (0, 0)
        num = (last[1] - last[0]) // size if last[1] + size >= signals.start else 0
        return min(max(_LEAST_WIDE, 2 * num), _MOST_WIDE)

    def _keep(self, info: StepInfo, finding: Finding, state: TrainState) -> None:
        """Write the evidence before the journal refers to it."""
        number, limits = finding.bundle, state.baseline.limits
        if self._bundles is not None and info.batch is not None and number is not None:
            write = partial(self._bundles.write, number, info.signals.step, info.batch)
            self._observers.alone("evidence", lambda: write(limits, finding), None)

    def _leave(self, info: StepInfo, finding: Finding) -> LeaveError:
        """Report a failing device, so that the supervisor excludes the node."""
        message = f"step {info.signals.step}: {finding.describe()}"
        fault = DeviceFault(ranks=finding.ranks, host=finding.hosts[0], reason=message)
        incident = fault.incident(
            step=info.signals.step,
            incarnation=self._run.lease.number,
            signature=f"{finding.cause.value}: rank {finding.ranks[0]}",
            decision="restart from the ring, without this node",
        )
        detail = {**incident.detail, "finding": finding.to_json()}
        samples = (info.signals.start, info.signals.stop)
        self._run.written.report(replace(incident, samples=samples, detail=detail))
        return LeaveError(message)

    def _redo(self, info: StepInfo, finding: Finding, state: TrainState) -> None:
        """Undo the attempt: the loop plans the step anew from the same cursor."""
        signals, verdict, plan = info.signals, state.baseline.judge(info.signals), info.batch
        assert plan is not None
        skipped = finding.positions if finding.remedy is Remedy.skip else ()
        num_wide = self._wide_steps(finding, signals)
        wide_until = signals.start + num_wide * (signals.stop - signals.start)
        incident = Incident(
            kind="redo",
            step=signals.step,
            decision=_decision(finding, len(skipped), num_wide),
            reason=f"{finding.describe()}{self._how_often(finding)}; {verdict.reason}",
            ranks=finding.ranks,
            samples=(signals.start, signals.stop),
            sample_ids=self._observers.alone(
                "names",
                lambda: named_samples(self._run.corpus.dataset, plan, finding.positions),
                (),
            ),
            cost_steps=1 + finding.steps,
            cost_seconds=info.seconds,
            detail={
                "verdict": verdict.kind.value,
                "skipped": list(skipped),
                **({"widened": True} if finding.remedy is Remedy.widen else {}),
                **({"wide_until": wide_until} if num_wide else {}),
                "cause": finding.to_json(),
            },
        )
        self._run.journal.add(incident)
        self._run.reporter.step(info, verdict, "redo", learning_rate=0.0, state=state)
        self._run.reporter.incident(incident)

    def _how_often(self, finding: Finding) -> str:
        """Count transient faults by rank: a device with several is going bad."""
        if finding.cause is not Cause.transient or len(finding.ranks) != 1:
            return ""
        before = self._history.num_transient_on(finding.ranks[0])
        return f" (fault {before + 1} of this rank: check its device)" if before else ""


def _why_failed(failure: Failure | None) -> str:
    """Why a probe gave no finding; None: an earlier one has failed."""
    return failure.why if failure is not None else "an earlier probe has failed"


def _reads_again(history: History) -> bool:
    """Whether the last rollback skips no samples."""
    incidents = reversed(history.incidents)
    return next((i.detail["read_again"] for i in incidents if i.kind == "rollback"), False)


def _decision(finding: Finding, num_skipped: int, num_wide: int) -> str:
    if finding.remedy is Remedy.widen:
        steps = f"the step again and {num_wide - 1} after it" if num_wide else "the step again"
        return f"compute {steps} in a wider precision, skip nothing"
    if not num_skipped:
        return "compute the step again, skip nothing"
    return f"skip {counted(num_skipped, 'sample')}, compute the step again"
