"""Carries out the ladder's decisions, and records their cost.

A discard is journalled before the run moves on. A rollback is journalled after its checkpoint
has been verified and loaded: from that moment on a restart repeats it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from runner.data.cursor import BatchPlan
from runner.policy.decision.episode import Diagnosis, Episode
from runner.policy.decision.finding import Cause
from runner.policy.decision.history import Incident, discard_incident, may_be_data, verdict_within
from runner.policy.decision.judge import Kind, Verdict
from runner.policy.decision.ladder import Discard, Halt, Rebaseline, RemedyRules, Rollback
from runner.policy.decision.skip_ledger import GiveUp, decide_unreadable
from runner.policy.retention.records import Tier
from runner.system.error import DataError, RankError
from runner.system.units import counted
from runner.train.agreed_step import StepInfo, Suspect
from runner.train.run import Run
from runner.train.state import TrainState, reach_of

# The new level comes from samples that such a run never reads.
_ONLY_UNGUARDED = (
    "A run told to skip the same samples (data.skip) ends bit-identical only with guard=off: its "
    "guard would treat this level as a fault"
)
_NAMES_NOTHING = frozenset({Cause.unclear.value, Cause.not_reproducible.value})


class Recovery:
    """Carries out the guard's decisions.

    Args:
        suspects: returns the suspected samples of the last step that was read. Collective.
        before_restore: called with the step at which the rollback happens.
        data_goes_on: whether the data cannot be rewound; then a rollback skips all samples since
            its checkpoint.
    """

    def __init__(
        self,
        run: Run,
        *,
        suspects: Callable[[BatchPlan], list[Suspect]],
        rules: RemedyRules,
        max_unreadable: int = 0,
        before_restore: Callable[[int], None] = lambda step: None,
        data_goes_on: Callable[[], bool] = lambda: False,
    ) -> None:
        self._suspects = suspects
        self._ring = run.ring
        self._written = run.written
        self._history = run.history
        self._reporter = run.reporter
        self._before_restore = before_restore
        self._data_goes_on = data_goes_on
        self._rules = rules
        self._max_unreadable = max_unreadable

    def pass_over(self, info: StepInfo) -> None:
        """Skip samples that could not be read, and plan the step anew.

        The run continues as if they did not exist: the step was not attempted, for the guard as
        well.

        Raises:
            DataError: there are too many of them.
            RankError: a rank's storage is gone. Both are raised alike on all ranks.
        """
        unreadable, step = info.unreadable, info.signals.step
        decision = decide_unreadable(
            unreadable,
            shares=info.shares,
            known=self._history.unreadable,
            most=self._max_unreadable,
        )
        if isinstance(decision, GiveUp):
            raise (RankError if decision.may_pass else DataError)(f"step {step}: {decision.reason}")
        ordered = sorted(unreadable, key=lambda one: one.position)
        incident = Incident(
            kind="unreadable",
            step=step,
            decision=f"skip {counted(len(unreadable), 'sample')}",
            reason=decision.reason,
            ranks=tuple(sorted({one.rank for one in unreadable})),
            samples=(decision.positions[0], decision.positions[-1] + 1),
            sample_ids=tuple(one.name for one in ordered),
            cost_seconds=info.seconds,
            detail={
                "positions": list(decision.positions),
                "indices": [one.index for one in ordered],
                "errors": [one.error for one in ordered],
            },
        )
        self._written.report(incident)
        self._reporter.stalled("discarded", info.seconds)

    def note_lines(self, step: int, reason_text: str, patience_seconds: float | None) -> None:
        """Report that lines are kept in memory, or, with None, that they are written again."""
        if patience_seconds is None:
            decision, reason = (
                "go on",
                f"lines kept in memory are in their file now ({reason_text})",
            )
        else:
            decision, reason = f"keep lines in memory for up to {patience_seconds:g} s", reason_text
        incident = Incident(kind="unwritten", step=step, decision=decision, reason=reason)
        self._written.report(incident)

    def discard(self, state: TrainState, info: StepInfo, verdict: Verdict, action: Discard) -> None:
        """Discard the step: its samples go to the ledger, and the run moves on."""
        self._note_discard(info, verdict, action.reason)
        state.cursor = info.signals.stop
        self._reporter.step(info, verdict, "discard", learning_rate=0.0, state=state)

    def _note_discard(self, info: StepInfo, verdict: Verdict, reason: str) -> None:
        if info.known is not None:
            return
        ranks, names, known = self._blamed(info)
        incident = discard_incident(info.signals, verdict=verdict.kind.value, reason=reason)
        self._written.report(
            replace(
                incident,
                ranks=ranks,
                sample_ids=names,
                cost_steps=1,
                cost_seconds=info.seconds,
                detail={**incident.detail, **known},
            )
        )

    def rebaseline(
        self, state: TrainState, info: StepInfo, verdict: Verdict, action: Rebaseline
    ) -> None:
        """Accept the new level as normal from here on."""
        verdict = replace(verdict, kind=Kind.level_shift)
        if not action.applied:
            self._note_discard(info, verdict, action.reason)
            state.cursor = info.signals.stop
            self._reporter.step(info, verdict, "rebaseline", learning_rate=0.0, state=state)
        state.baseline.restart_at(list(action.losses), list(action.grad_norms))
        state.trouble.settle()
        incident = Incident(
            kind="rebaseline",
            step=info.signals.step,
            decision="new baseline",
            reason=f"{action.reason}. {_ONLY_UNGUARDED}",
            samples=(info.signals.start, info.signals.stop),
            cost_steps=0 if action.applied else len(action.losses),
        )
        self._written.report_once(incident)

    def roll_back(
        self, state: TrainState, info: StepInfo, verdict: Verdict, action: Rollback
    ) -> None:
        """Load the newest usable checkpoint of ``action.targets``; skip the bad range."""
        began = time.monotonic()
        ranks, names, known = self._blamed(info)
        self._reporter.step(info, verdict, "rollback", learning_rate=0.0, state=state)
        metrics_bytes = self._reporter.metrics_bytes()
        lost = state.updates
        with self._reporter.stall("rollback"):
            self._before_restore(info.signals.step)
            restored = self._ring.restore(action.targets)
        if self._data_goes_on():
            action = replace(action, skip=(restored.cursor, max(action.skip[1], info.signals.stop)))
        tier = " (memory)" if restored.tier is Tier.memory else ""
        incident = Incident(
            kind="rollback",
            step=info.signals.step,
            decision=f"back to step {restored.step}{tier}, "
            f"{'read again' if action.read_again else 'skip'} samples "
            f"{action.skip[0]}-{action.skip[1] - 1}",
            reason=action.reason,
            ranks=ranks,
            samples=action.skip,
            sample_ids=names,
            cost_steps=lost - restored.step,
            cost_seconds=info.seconds + time.monotonic() - began,
            detail={
                "verdict": verdict.kind.value,
                "onset_step": action.onset_step,
                "to_step": restored.step,
                "cursor": restored.cursor,
                "serial": restored.serial,
                "tier": restored.tier.value,
                "next_serial": self._ring.next_serial,
                "read_again": action.read_again,
                "repeat": action.repeat,
                "metrics_bytes": metrics_bytes,
                "cut_factor": action.cut_factor,
                "cut_steps": action.cut_steps,
                "held_limits": state.baseline.to_hold.to_json(),
                **({"cut_start": restored.step} if action.cuts_at_once else {}),
                **known,
            },
        )
        self._written.report(incident)
        self._reporter.undo(restored.step)
        state.load_json(restored.train_state)
        # Both are of the start that loaded it first.
        state.unreported = state.came_again = None
        state.baseline.hold(self._history.held)
        self._ring.abandon_after(restored.serial, reach=reach_of(state, self._rules, self._history))

    def conclude(self, info: StepInfo, finding: Diagnosis) -> None:
        """Report the episode that ended with this step; this changes nothing.

        A cause found by replays replaces the suspected one.
        """
        episode = finding.episode
        cause = self._verdict(info, episode)
        incident = Incident(
            kind="episode",
            step=info.signals.step,
            decision=finding.shape,
            reason=finding.describe(confirmed=cause),
            samples=(episode.start, episode.stop),
            detail={
                "shape": finding.shape,
                "cause": finding.cause if cause is None else str(cause["cause"]),
                "suspected": finding.cause,
                "episode": episode.to_json(),
            },
        )
        self._written.report_once(incident)

    def _verdict(self, info: StepInfo, episode: Episode) -> Mapping[str, Any] | None:
        """The cause found by replays of the episode's steps, including the current one."""
        if info.cause is not None and info.cause["cause"] not in _NAMES_NOTHING:
            return info.cause
        known = self._history.incidents
        before = verdict_within(known, (episode.start, episode.stop), _NAMES_NOTHING)
        return info.cause if before is None else before

    def halt(self, info: StepInfo, verdict: Verdict, action: Halt) -> None:
        """Journal why the run halts and a person must look."""
        ranks, names, known = self._blamed(info)
        self._reporter.step(info, verdict, "halt", learning_rate=0.0, state=None)
        incident = Incident(
            kind="halt",
            step=info.signals.step,
            decision="halt",
            reason=action.reason,
            ranks=ranks,
            samples=(info.signals.start, info.signals.stop),
            sample_ids=names,
            detail={"verdict": verdict.kind.value, "settings": list(action.settings), **known},
        )
        self._written.report(incident)

    def _blamed(self, info: StepInfo) -> tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]:
        """Suspected ranks and samples, and for the journal's detail: the samples' positions, the
        cause found by replays, the preceding early warnings. Collective for a live step."""
        suspects: list[Suspect] = []
        cause, known = info.cause, info.known
        ranks: tuple[int, ...] = ()
        names: tuple[str, ...] = ()
        if info.batch is None:
            if known is not None:
                ranks, names = known.ranks, known.sample_ids
        elif cause is not None and not may_be_data(cause):
            ranks = tuple(cause["ranks"])
        else:
            suspects = self._suspects(info.batch)
            ranks = tuple(sorted({suspect.rank for suspect in suspects}))
            names = tuple(suspect.name for suspect in suspects)
        warnings = self._history.warnings_before(info.signals.step)
        detail: dict[str, Any] = {"suspects": [suspect.position for suspect in suspects]}
        detail |= {"cause": dict(cause)} if cause is not None else {}
        return ranks, names, detail | ({"warnings": warnings} if warnings else {})
