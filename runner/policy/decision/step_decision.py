"""Turns the numbers of one step into a verdict and an action, for both loop and backtest.

A loop has weights and a backtest has rows of a file, but both must judge and decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.policy.decision.episode import Diagnosis, Episode, stopped
from runner.policy.decision.history import History
from runner.policy.decision.judge import Baseline, Kind, Verdict
from runner.policy.decision.ladder import (
    NOT_REPLAYED,
    Action,
    Apply,
    BadStepTracker,
    DecisionInput,
    Halt,
    Rebaseline,
    RemedyRules,
    Replayed,
    Rollback,
    decide,
)
from runner.policy.decision.signals import StepSignals
from runner.policy.retention.records import Record

# A level above an untrained model's loss, by more than noise, is not a new data mix.
_UNTRAINED_MARGIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """The verdict on a step and the action to take.

    ``onset`` is the sample position at which the trouble began (for a clean step, its own),
    ``finding`` the episode that ended with this step, ``case`` the decision's input (None: a clean
    step).
    """

    verdict: Verdict
    action: Action
    onset: int
    finding: Diagnosis | None
    case: DecisionInput | None = None

    @property
    def lacks_target(self) -> bool:
        """Whether a checkpoint that is being proven could change the decision."""
        return isinstance(self.action, Rollback | Halt) and self.action.lacks_target


def decide_step(
    signals: StepSignals,
    *,
    baseline: Baseline,
    trouble: BadStepTracker,
    history: History,
    ring: Sequence[Record],
    rules: RemedyRules,
    replayed: Replayed = NOT_REPLAYED,
) -> StepDecision:
    """Judge one attempted step and decide on it; updates only ``trouble``.

    ``ring`` has the existing checkpoints, ``history`` the journal so far.
    """
    verdict = baseline.judge(signals)
    if signals.withheld is not None:  # the update was not applied, whatever the judge says
        verdict = replace(verdict, kind=Kind.non_finite, reason=signals.withheld)
    is_bad = verdict.kind in (Kind.non_finite, Kind.spike)
    finding = trouble.note(signals, baseline.before() if is_bad else None)
    if verdict.kind is Kind.clean:
        # Nothing to decide: nearly every step costs only the judgement.
        action: Action = Apply(reason=verdict.reason)
        return StepDecision(verdict=verdict, action=action, onset=signals.start, finding=finding)
    case = DecisionInput(
        verdict=verdict,
        signals=signals,
        trouble=trouble,
        history=history,
        ring=ring,
        rules=rules,
        untrained_loss=max(baseline.first_loss, rules.untrained_loss) * _UNTRAINED_MARGIN,
        recent=baseline.recent(rules.guard.level_steps),
        replayed=replayed,
    )
    return _decided(case, baseline, finding)


def decide_again(last: StepDecision, *, baseline: Baseline, ring: Sequence[Record]) -> StepDecision:
    """Decide the same step again, with the current checkpoints."""
    assert last.case is not None
    return _decided(replace(last.case, ring=ring), baseline, last.finding)


def _decided(case: DecisionInput, baseline: Baseline, finding: Diagnosis | None) -> StepDecision:
    action = decide(case)
    return StepDecision(
        verdict=case.verdict,
        action=action,
        onset=case.onset[1],
        finding=_ended_by(action, case, baseline) or finding,
        case=case,
    )


_HOW = {Rollback: "the run goes back", Halt: "the run halts", Rebaseline: "taken as a new level"}


def _ended_by(action: Action, case: DecisionInput, baseline: Baseline) -> Diagnosis | None:
    how = _HOW.get(type(action))
    if how is None:
        return None
    step, start = case.onset
    drifted = case.verdict.kind is Kind.drift
    known = None if drifted else case.trouble.episode
    episode = known or Episode.begin(step, start, baseline.before())
    if drifted:
        episode = replace(episode, stop=case.signals.stop)
    return stopped(episode, drifted=drifted, how=how)
