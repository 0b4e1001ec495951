"""Carries out what the ladder decided, and writes down what it cost.

A discard is journalled before the run moves on; a rollback after the checkpoint to go back to
has been verified and loaded, which is the moment from which a restart will repeat it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from runner.checkpoint.ring import Ring
from runner.data.cursor import BatchPlan
from runner.fault.inject import FaultInjector
from runner.observe.journal import Journal
from runner.policy.episode import Finding
from runner.policy.history import Incident, discard_incident
from runner.policy.remedy import Discard, Halt, Rebaseline, Rollback
from runner.policy.ring import Tier
from runner.policy.signals import StepSignals
from runner.policy.verdict import Kind, Verdict
from runner.report import Reporter
from runner.state import TrainState
from runner.step import Outcome, Stepper, Suspect


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A step to judge: computed just now, or ``known`` from the journal after a restart."""

    signals: StepSignals
    plan: BatchPlan | None = None
    outcome: Outcome | None = None
    known: Incident | None = None

    @property
    def seconds(self) -> float:
        return self.outcome.seconds if self.outcome else 0.0


class Recovery:
    """The acting half of the guard."""

    def __init__(
        self,
        *,
        stepper: Stepper,
        ring: Ring,
        journal: Journal,
        reporter: Reporter,
        faults: FaultInjector,
    ) -> None:
        self._stepper = stepper
        self._ring = ring
        self._journal = journal
        self._reporter = reporter
        self._faults = faults

    def discard(self, state: TrainState, scene: Scene, verdict: Verdict, action: Discard) -> None:
        """The step never happened: its samples go to the ledger, the run moves on."""
        self._note_discard(scene, verdict, action.reason)
        state.cursor = scene.signals.stop
        self._reporter.step(scene, verdict, "discard", learning_rate=0.0, state=state)

    def _note_discard(self, scene: Scene, verdict: Verdict, reason: str) -> None:
        if scene.known is not None:
            return
        ranks, names, where = self._who(scene)
        incident = discard_incident(scene.signals, verdict=verdict.kind.value, reason=reason)
        incident = replace(
            incident,
            ranks=ranks,
            sample_ids=names,
            cost_steps=1,
            cost_seconds=scene.seconds,
            detail={**incident.detail, "suspects": where},
        )
        self._journal.add(incident)
        self._reporter.incident(incident)

    def rebaseline(
        self, state: TrainState, scene: Scene, verdict: Verdict, action: Rebaseline
    ) -> None:
        """Go on from here with the new level as normal."""
        verdict = replace(verdict, kind=Kind.level_shift)
        if not action.applied:
            self._note_discard(scene, verdict, action.reason)
            state.cursor = scene.signals.stop
            self._reporter.step(scene, verdict, "rebaseline", learning_rate=0.0, state=state)
        state.baseline.restart_at(list(action.losses), list(action.grad_norms))
        state.trouble.settle()
        incident = Incident(
            kind="rebaseline",
            step=scene.signals.step,
            decision="new baseline",
            reason=action.reason,
            samples=(scene.signals.start, scene.signals.stop),
            cost_steps=0 if action.applied else len(action.losses),
        )
        self._journal.add_once(incident)
        self._reporter.incident(incident)

    def roll_back(
        self, state: TrainState, scene: Scene, verdict: Verdict, action: Rollback
    ) -> None:
        """Back to the newest usable checkpoint of ``action.targets``; never read its range."""
        began = time.monotonic()
        ranks, names, where = self._who(scene)
        self._reporter.step(scene, verdict, "rollback", learning_rate=0.0, state=state)
        metrics_bytes = self._reporter.metrics_bytes()
        lost = state.updates
        with self._reporter.stall("rollback"):
            self._faults.at("rollback", scene.signals.step)
            restored = self._ring.restore(action.targets)
        tier = " (memory)" if restored.tier is Tier.memory else ""
        incident = Incident(
            kind="rollback",
            step=scene.signals.step,
            decision=f"back to step {restored.step}{tier}, "
            f"{'read again' if action.read_again else 'skip'} samples "
            f"{action.skip[0]}-{action.skip[1] - 1}",
            reason=action.reason,
            ranks=ranks,
            samples=action.skip,
            sample_ids=names,
            cost_steps=lost - restored.step,
            cost_seconds=scene.seconds + time.monotonic() - began,
            detail={
                "verdict": verdict.kind.value,
                "suspects": where,
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
            },
        )
        self._journal.add(incident)
        self._reporter.undo(restored.step)
        self._ring.abandon_after(restored.serial)
        state.load_json(restored.train_state)
        self._reporter.incident(incident)

    def conclude(self, scene: Scene, finding: Finding) -> None:
        """Say what the trouble was that ended with this step. Nothing follows from it."""
        episode = finding.episode
        incident = Incident(
            kind="episode",
            step=scene.signals.step,
            decision=finding.shape,
            reason=finding.words(),
            samples=(episode.start, episode.stop),
            detail={"shape": finding.shape, "cause": finding.cause, "episode": episode.to_json()},
        )
        if self._journal.add_once(incident):
            self._reporter.incident(incident)

    def halt(self, scene: Scene, verdict: Verdict, action: Halt) -> None:
        """Write down why a person must look."""
        ranks, names, where = self._who(scene)
        self._reporter.step(scene, verdict, "halt", learning_rate=0.0, state=None)
        incident = Incident(
            kind="halt",
            step=scene.signals.step,
            decision="halt",
            reason=action.reason,
            ranks=ranks,
            samples=(scene.signals.start, scene.signals.stop),
            sample_ids=names,
            detail={"verdict": verdict.kind.value, "suspects": where},
        )
        self._journal.add(incident)
        self._reporter.incident(incident)

    def _who(self, scene: Scene) -> tuple[tuple[int, ...], tuple[str, ...], list[int]]:
        """Ranks, sample names and positions under suspicion. Collective for a live step."""
        if scene.plan is None:
            known = scene.known
            return (known.ranks, known.sample_ids, []) if known else ((), (), [])
        suspects: list[Suspect] = self._stepper.suspects(scene.plan)
        return (
            tuple(sorted({suspect.rank for suspect in suspects})),
            tuple(suspect.name for suspect in suspects),
            [suspect.position for suspect in suspects],
        )
