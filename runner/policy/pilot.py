"""From the numbers of one step to its verdict and its action: one place for loop and backtest.

The story around it differs (a loop has weights, a backtest has rows of a file); what is
judged and decided must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.policy.episode import Episode, Finding, stopped
from runner.policy.history import History
from runner.policy.remedy import (
    Action,
    Apply,
    Case,
    Halt,
    Rebaseline,
    RemedyRules,
    Rollback,
    Trouble,
    decide,
)
from runner.policy.ring import Record
from runner.policy.signals import StepSignals
from runner.policy.verdict import Baseline, Kind, Verdict

# A level above what an untrained model reaches, by more than noise, is no data mix.
_UNTRAINED_MARGIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What a step means and what to do about it.

    ``onset`` is the sample position at which the trouble began (of a clean step: its own),
    ``finding`` the trouble that ended with this step.
    """

    verdict: Verdict
    action: Action
    onset: int
    finding: Finding | None


def rule(
    signals: StepSignals,
    *,
    baseline: Baseline,
    trouble: Trouble,
    history: History,
    ring: Sequence[Record],
    rules: RemedyRules,
) -> Ruling:
    """Judge one attempted step and decide on it; only ``trouble`` takes note of it.

    ``ring`` are the checkpoints there are, ``history`` the journal so far.
    """
    verdict = baseline.judge(signals)
    if signals.withheld is not None:  # nothing was applied, whatever the judge makes of it
        verdict = replace(verdict, kind=Kind.non_finite, reason=signals.withheld)
    is_bad = verdict.kind in (Kind.non_finite, Kind.spike)
    finding = trouble.note(signals, baseline.before() if is_bad else None)
    if verdict.kind is Kind.clean:
        # Nothing to decide: what nearly every step costs is the judgement alone.
        action: Action = Apply(reason=verdict.reason)
        return Ruling(verdict=verdict, action=action, onset=signals.start, finding=finding)
    case = Case(
        verdict=verdict,
        signals=signals,
        trouble=trouble,
        history=history,
        ring=ring,
        rules=rules,
        untrained_loss=max(baseline.first_loss, rules.untrained_loss) * _UNTRAINED_MARGIN,
        recent=baseline.recent(rules.level_steps),
    )
    action = decide(case)
    return Ruling(
        verdict=verdict,
        action=action,
        onset=case.onset[1],
        finding=_ended_by(action, case, baseline) or finding,
    )


_HOW = {Rollback: "the run goes back", Halt: "the run halts", Rebaseline: "taken as a new level"}


def _ended_by(action: Action, case: Case, baseline: Baseline) -> Finding | None:
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
