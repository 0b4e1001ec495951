"""The story of a run: attempt a step, judge it, act on it, check the state, save it, stop.

The loop calls the actors by name; the other modules of this package implement them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from runner.policy.decision.judge import Verdict
from runner.train.agreed_step import StepInfo
from runner.train.checkpoints import Checkpoints
from runner.train.evaluate import Periodic
from runner.train.report import Reporter
from runner.train.state import TrainState
from runner.train.step_runner import StepRunner


class GuardsSteps(Protocol):
    """:class:`runner.train.step_guard.StepGuard`, or a guard that finds the cause first."""

    def note_lines(self, info: StepInfo) -> None: ...
    def handle(self, info: StepInfo, state: TrainState) -> Verdict | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One run on one rank, from its first or restored state to its end.

    Args:
        until: the number of applied updates at which the run is done.
        ended_early: why the run is done after so many updates already; empty to go on.
    """

    state: TrainState
    until: int
    steps: StepRunner
    guard: GuardsSteps
    checkpoints: Checkpoints
    periodic: Periodic
    reporter: Reporter
    ended_early: Callable[[int], str] = lambda updates: ""

    def run(self) -> str:
        """Train to the last update; returns a sentence that says how the run ended.

        Raises:
            Halted: the guard's budget is spent.
            Preempted: a rank was asked to stop, and the state is saved if possible; or the disk
                accepts no writes at the end.
            CheckpointError: no rollback target can be loaded, or nothing can be saved.
            RankError: one rank failed; all raise it.
            DataError: more samples than data.max_unreadable could not be read.
            ConfigError: the corpus is not the one that the run began on.
            SaveError: every step is applied, but the end state is not on disk.
        """
        self.begin()
        while self.state.updates < self.until and not self.ended_early(self.state.updates):
            self.step()
        early = self.ended_early(self.state.updates)
        with self._saved_at_a_stop():
            fault = self.checkpoints.finish(
                self.state, lambda: self.periodic.held_out_loss(self.state.updates)
            )
        but = f", but the last checkpoint is not clean: {fault}" if fault else ""
        return f"{early or 'all steps applied'}{but}"

    def begin(self) -> None:
        """Save a first checkpoint to go back to; report the update that a stop left unreported."""
        self.checkpoints.begin(self.state)
        if self.state.unreported is not None:
            with self._saved_at_a_stop():
                self._report()

    def step(self) -> None:
        """Run one step, then carry out the guard's decision. Raises as :meth:`run`."""
        with self._saved_at_a_stop():
            info = self.steps.next(self.state)
        with self._saved_at_a_stop(info):
            if info.known is None:  # otherwise the journal has the step, uncomputed
                self.guard.note_lines(info)
                self.checkpoints.apply_progress(info, self.state)
            verdict = self.guard.handle(info, self.state)
            if verdict is not None:
                self._advance(info, verdict)

    def _advance(self, info: StepInfo, verdict: Verdict) -> None:
        """Count an applied update, check the state, prove and save checkpoints."""
        state = self.state
        learning_rate = self.steps.learning_rate(state.updates)
        state.advance(info.signals)
        state.unreported = self.reporter.line(info, verdict, "apply", learning_rate=learning_rate)
        self._report()
        self.checkpoints.prove(state)
        self.periodic.inspect(state.updates)
        self.checkpoints.after_update(state, info.seconds)

    def _report(self) -> None:
        """Report the last update, with its held-out loss if that is due."""
        self.reporter.applied(self.state, self.periodic.evaluate(self.state.updates))

    def _saved_at_a_stop(self, info: StepInfo | None = None) -> AbstractContextManager[None]:
        return self.checkpoints.saved_at_a_stop(self.state, info)
