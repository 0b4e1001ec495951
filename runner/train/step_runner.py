"""Plans and launches the next step, and runs one step ahead if that is safe.

In the late mode the next step is launched before this one's numbers are read. Either it then has
the weights, samples, limits and rate that it would have had anyway; or this one was not applied, so
the next was not either, and is launched again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from runner.data.cursor import BatchPlan
from runner.policy.decision.history import Incident, discarded_signals
from runner.policy.decision.signals import Bounds
from runner.policy.schedule import cut_factor
from runner.train.agreed_step import StepInfo
from runner.train.run import EngineRun
from runner.train.state import TrainState
from runner.train.step import InFlightStep, Stepper, StepPlan


class StepPlanner:
    """Plans a step, including this rank's reports to the others."""

    def __init__(self, run: EngineRun, schedule: Callable[[int], float]) -> None:
        self.stream = run.corpus.stream
        self.journal = run.journal
        self.schedule = schedule
        self.observers = run.observers
        self._ring = run.ring
        self._backlog = run.backlog
        self.stop = run.group.stop
        self.stop_look = run.group.stop_look
        self.own_seconds = 0.0  # of this rank's last step

    def batch(self, cursor: int) -> BatchPlan:
        """Plan the global batch that starts at a stream position."""
        return self.stream.plan(cursor, self.journal.history.ledger)

    def plan(self, batch: BatchPlan, updates: int, bounds: Bounds) -> StepPlan:
        """Plan the step after ``updates`` applied ones."""
        history, rollbacks = self.journal.history, self.journal.history.rollbacks
        last = rollbacks[-1].serial if rollbacks else 0
        return StepPlan(
            batch=batch,
            step=updates + 1,
            bounds=bounds,
            learning_rate=self.learning_rate(updates),
            keeps_lines=self._backlog.look(),
            stop=self.stop.is_set,
            observer_failed=self.observers.has_failed,
            is_slow=self.stop.is_short_for(self.own_seconds),
            is_advised=self.stop.is_advised(),
            progress=self._ring.progress(),
            decisions=f"{history.num_discarded} discards, {len(rollbacks)} rollbacks, last {last}",
            is_wide=history.is_wide(batch.start),
        )

    def learning_rate(self, updates: int) -> float:
        """Learning rate of the step after ``updates`` applied ones, with rollback cuts."""
        return self.schedule(updates) * cut_factor(updates, self.journal.history.cuts)


class StepRunner:
    """Runs one step after the other.

    Args:
        known_discards: steps discarded before a restart, in order.
        late: whether a step may be launched before the previous one is read.
        is_boundary: whether something uses the state after exactly this many updates.
    """

    def __init__(
        self,
        stepper: Stepper,
        planner: StepPlanner,
        *,
        known_discards: Sequence[Incident],
        late: bool,
        is_boundary: Callable[[int], bool],
    ) -> None:
        self._stepper = stepper
        self.planner = planner
        self._known_discards = deque(known_discards)
        self._late = late
        self._is_boundary = is_boundary
        self._ahead: InFlightStep | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether a launched step has not been read."""
        return self._ahead is not None

    def next(self, state: TrainState) -> StepInfo:
        """Run the next global batch. Collective.

        A step that was discarded before a restart is taken from the journal and not computed, so
        that the guard's memory becomes what it would have been without the restart.

        Raises:
            RankError: a rank's loader failed, or a rank is at another step than the others.
            StopRequested: a rank was asked to stop within a slow step.
        """
        step, self._ahead = self._ahead, None
        if step is None:
            batch = self.planner.batch(state.cursor)
            if self._known_discards and _start(self._known_discards[0]) < batch.start:
                incident = self._known_discards.popleft()
                return StepInfo(signals=discarded_signals(incident), known=incident)
            step = self._launch(batch, state.updates, state.baseline.bounds)
        if self._may_run_ahead(step, state):
            self._ahead = self._launch_after(step, state)
        info = self._stepper.read(step)
        self.planner.observers.step = info.signals.step
        self.planner.own_seconds, self.planner.stop_look.is_in_steps = info.seconds, info.is_slow
        if info.observer_failed:
            self.planner.observers.settle()
        if info.signals.gated or info.stop_requested:
            info = self._without_ahead(info)
        return info

    def forget_known_discards(self) -> None:
        """Forget the known discards at a rollback: later steps are planned anew."""
        self._known_discards.clear()

    def learning_rate(self, updates: int) -> float:
        """Learning rate of the step after ``updates`` applied ones."""
        return self.planner.learning_rate(updates)

    def _launch(
        self, batch: BatchPlan, updates: int, bounds: Bounds, after: InFlightStep | None = None
    ) -> InFlightStep:
        plan = self.planner.plan(batch, updates, bounds)
        look, ledger = self.planner.stop_look, self.planner.journal.history.ledger
        looked_at = look.over if look.is_in_steps else None
        return self._stepper.launch(plan, ledger, after=after, looked_at=looked_at)

    def _launch_after(self, step: InFlightStep, state: TrainState) -> InFlightStep:
        """Launch the next step, assuming that ``step`` is applied and clean."""
        batch, bounds = self.planner.batch(step.batch.stop), state.baseline.bounds_ahead
        return self._launch(batch, state.updates + 1, bounds, after=step)

    def _may_run_ahead(self, step: InFlightStep, state: TrainState) -> bool:
        """Whether the step after ``step`` may be launched before ``step`` is read.

        It may if ``step`` can only end in two ways: applied, with nothing else using the state, or
        discarded, with the next step's gate closed. Equal on all ranks.
        """
        updates = state.updates + 1
        return (
            self._late
            and not self.planner.stop_look.is_in_steps
            and not self._is_boundary(updates)
            and not self._known_discards
            and step.withheld is None
            # A drift is applied and detected afterwards.
            and not state.baseline.may_alarm
            # After one bad step the next may be bad too: this only avoids wasted work.
            and not state.trouble.num_recent()
            and self._stepper.may_be_speculative(updates + 1)
        )

    def _without_ahead(self, info: StepInfo) -> StepInfo:
        """Discard the step launched after one that was not applied; its time counts for that
        one."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return info
        if ahead.report.is_advised:  # nobody has read it
            self.planner.stop.advise_again()
        return replace(info, seconds=info.seconds + self._stepper.discard_speculative(ahead))


def _start(incident: Incident) -> int:
    assert incident.samples is not None
    return incident.samples[0]
