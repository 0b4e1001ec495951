"""The story of a run: read a batch, step, agree, judge, decide, act, checkpoint, stop.

Knows policy and protocols by name; how things are done stands elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from runner.cadence import Cadence
from runner.checkpoint.protocol import Moment
from runner.checkpoint.ring import Ring
from runner.data.cursor import BatchPlan, SampleStream
from runner.dist.heartbeat import Heartbeat
from runner.error import Halted, Preempted, SaveError
from runner.observe.journal import Journal
from runner.policy.history import Incident, discarded_signals
from runner.policy.pilot import rule
from runner.policy.remedy import Apply, Discard, Halt, Rebaseline, RemedyRules
from runner.policy.schedule import Schedule, cut_factor
from runner.policy.signals import Bounds
from runner.policy.verdict import Kind, Verdict
from runner.recover import Recovery, Scene
from runner.report import Reporter
from runner.state import TrainState
from runner.step import Order, Outcome, Pending, Stepper
from runner.watch.stop import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """In applied updates; 0 means never. ``inspect``: of what is looked at, see ``Loop``."""

    steps: int
    memory: int
    evaluate: int
    inspect: tuple[int, ...] = ()

    def is_boundary(self, updates: int) -> bool:
        """Whether something looks at the state of exactly so many updates."""
        every = (self.memory, self.evaluate, *self.inspect)
        return updates >= self.steps or any(e > 0 and updates % e == 0 for e in every)


class Loop:
    """One run on one rank, from its first or restored state to its end.

    Args:
        late: launch a step before the numbers of the one before are read, where that one can
            only be applied or discarded; the run is the same, see :meth:`step`.
        inspect: called after an update, with their number.
    """

    def __init__(
        self,
        *,
        state: TrainState,
        stepper: Stepper,
        stream: SampleStream,
        ring: Ring,
        journal: Journal,
        recovery: Recovery,
        reporter: Reporter,
        schedule: Schedule,
        rules: RemedyRules,
        intervals: Intervals,
        cadence: Cadence,
        evaluate: Callable[[], float | None],
        stop: StopRequest,
        stop_reasons: Callable[[], list[str]],
        heart: Heartbeat,
        inspect: Callable[[int], None],
        known_discards: list[Incident],
        late: bool = False,
    ) -> None:
        self._state = state
        self._stepper = stepper
        self._stream = stream
        self._ring = ring
        self._journal = journal
        self._recovery = recovery
        self._reporter = reporter
        self._schedule = schedule
        self._rules = rules
        self._intervals = intervals
        self._cadence = cadence
        self._evaluate = evaluate
        self._stop = stop
        self._stop_reasons = stop_reasons
        self._heart = heart
        self._inspect = inspect
        self._known_discards = deque(known_discards)
        self._late = late
        self._ahead: Pending | None = None

    def run(self) -> None:
        """Train to the last update.

        Raises:
            Halted: the guard's budget is spent.
            Preempted: a rank was asked to stop; the state is saved.
            CheckpointError: nothing to go back to can be loaded, or nothing can be saved.
            RankError: one rank failed; all raise it.
            SaveError: every step is applied, but the end state is not on disk.
        """
        self.begin()
        while self._state.updates < self._intervals.steps:
            self.step()
        self._save_last()
        saved = self._ring.saved_step
        if saved != self._state.updates:
            raise SaveError(
                f"all steps are applied, but the last checkpoint is of step {saved}: the end state "
                "could not be saved (see the journal); free space and give the same command again"
            )

    def begin(self) -> None:
        """Commit the initial state: the first checkpoint there is to go back to."""
        if self._ring.saved_step < 0:
            with self._reporter.stall("checkpoint"):
                self._save()
                self._ring.drain()

    def step(self) -> None:
        """Attempt the next global batch and act on what it told. Raises as :meth:`run`.

        In the late mode the step after it is launched before it is read. That one then has
        what it would have had (weights, samples, limits, rate), or was not applied, because this
        one was not, and is launched again.
        """
        pending, self._ahead = self._ahead, None
        if pending is None:
            plan = self._stream.plan(self._state.cursor, self._journal.history.ledger)
            if self._repeat_known_discard(before=plan.start):
                return
            pending = self._launch(plan, self._state.updates, self._state.baseline.bounds)
        if self._may_run_ahead(pending):
            self._ahead = self._launch_after(pending)
        outcome = self._stepper.read(pending)
        if outcome.signals.gated or outcome.stop_requested:
            outcome = self._without_ahead(outcome)
        self._ring.settle(outcome.num_done, outcome.num_failed, pending.order.told.jobs)
        self._judge_and_act(
            Scene(signals=outcome.signals, plan=pending.order.plan, outcome=outcome)
        )
        if outcome.stop_requested:
            self._save_and_leave()

    def _launch(
        self, plan: BatchPlan, updates: int, bounds: Bounds, after: Pending | None = None
    ) -> Pending:
        order = Order(
            plan=plan,
            step=updates + 1,
            bounds=bounds,
            learning_rate=self._learning_rate(updates),
            stop=self._stop.is_set,
            told=self._ring.tell(),
            decisions=self._decisions(),
        )
        return self._stepper.launch(order, self._journal.history.ledger, after=after)

    def _launch_after(self, pending: Pending) -> Pending:
        """The next step, on the assumption that ``pending`` is applied and clean."""
        plan = self._stream.plan(pending.order.plan.stop, self._journal.history.ledger)
        bounds = self._state.baseline.bounds_ahead
        return self._launch(plan, self._state.updates + 1, bounds, after=pending)

    def _may_run_ahead(self, pending: Pending) -> bool:
        """Whether the step behind ``pending`` may be launched before that is read.

        It may where ``pending`` can only be applied, and nothing then looks at the state, or be
        left out, with the gate of the step behind it closed. Alike on all ranks.
        """
        state, updates = self._state, self._state.updates + 1
        return (
            self._late
            and not self._intervals.is_boundary(updates)
            and not self._cadence.is_due(updates)
            and not self._known_discards
            and pending.withheld is None
            # A drift is applied, and found afterwards.
            and not state.baseline.may_alarm
            # Where one step was bad the next may be: only to waste less.
            and not state.trouble.num_recent()
            and not self._stepper.has_drill(updates + 1)
        )

    def _without_ahead(self, outcome: Outcome) -> Outcome:
        """Forget the step behind one that was not applied; this one bears the cost."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return outcome
        return replace(outcome, seconds=outcome.seconds + self._stepper.drop(ahead))

    def _judge_and_act(self, scene: Scene) -> None:
        signals = scene.signals
        ruling = rule(
            signals,
            baseline=self._state.baseline,
            trouble=self._state.trouble,
            history=self._journal.history,
            ring=self._ring.records,
            rules=self._rules,
        )
        verdict, action = ruling.verdict, ruling.action
        if ruling.finding is not None:
            self._recovery.conclude(scene, ruling.finding)
        if scene.known is not None and isinstance(action, Apply):
            # Settings were changed on purpose since; what was discarded stays discarded.
            action = Discard(reason=scene.known.reason)
        assert isinstance(action, Apply) is not signals.gated or verdict.kind is Kind.drift
        assert isinstance(action, Apply) or self._ahead is None
        if isinstance(action, Apply):
            self._advance(scene, verdict)
            return
        self._state.baseline.refuse(signals)
        if isinstance(action, Discard):
            self._recovery.discard(self._state, scene, verdict, action)
        elif isinstance(action, Rebaseline):
            self._recovery.rebaseline(self._state, scene, verdict, action)
            if action.applied:
                self._advance(scene, verdict)
        elif isinstance(action, Halt):
            self._recovery.halt(scene, verdict, action)
            raise Halted(action.reason)
        else:
            self._known_discards.clear()
            self._heart.enter("roll back")
            self._recovery.roll_back(self._state, scene, verdict, action)

    def _advance(self, scene: Scene, verdict: Verdict) -> None:
        """The update was applied: move on, evaluate, prove and save checkpoints."""
        state, signals = self._state, scene.signals
        learning_rate = self._learning_rate(state.updates)
        state.baseline.accept(signals)
        state.updates += 1
        state.cursor = signals.stop
        state.last_loss = signals.loss
        eval_loss = self._evaluated() if self._is_due(self._intervals.evaluate) else None
        self._reporter.step(
            scene, verdict, "apply", learning_rate=learning_rate, state=state, eval_loss=eval_loss
        )
        self._ring.after_step(state.updates, state.baseline.clean_streak)
        self._inspect(state.updates)
        self._cadence.step(scene.seconds, busy=self._ring.is_busy)
        if self._cadence.is_due(state.updates):
            with self._reporter.stall("checkpoint"), self._cadence.save(state.updates):
                self._save()
        elif self._is_due(self._intervals.memory):
            with self._reporter.stall("checkpoint"):
                self._save(disk=False)

    def _repeat_known_discard(self, *, before: int) -> bool:
        """Judge a step again that was discarded before a restart; nothing is computed.

        So the guard's memory after a restart is what it would have been without one.
        """
        if not self._known_discards or _start(self._known_discards[0]) >= before:
            return False
        incident = self._known_discards.popleft()
        self._judge_and_act(Scene(signals=discarded_signals(incident), known=incident))
        return True

    def _learning_rate(self, updates: int) -> float:
        return self._schedule.rate(updates) * cut_factor(updates, self._journal.history.cuts)

    def _decisions(self) -> str:
        history = self._journal.history
        last = history.rollbacks[-1].serial if history.rollbacks else 0
        return f"{history.num_discarded} discards, {len(history.rollbacks)} rollbacks, last {last}"

    def _is_due(self, every: int) -> bool:
        return every > 0 and self._state.updates % every == 0

    def _evaluated(self) -> float | None:
        self._heart.enter("evaluate")
        with self._reporter.stall("evaluation"):
            return self._evaluate()

    def _save(self, *, disk: bool = True) -> None:
        self._heart.enter("save")
        self._ring.save(
            Moment(
                step=self._state.updates,
                cursor=self._state.cursor,
                train_state=self._state.to_json(),
                metrics_bytes=self._reporter.metrics_bytes(durably=disk),
                journal_lines=self._journal.num_lines,
            ),
            disk=disk,
        )

    def _save_last(self, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Commit the present state unless it is; False when it became too late to wait."""
        self._heart.enter("save")
        with self._reporter.stall("checkpoint"):
            return self._save_and_wait(is_late)

    def _save_and_wait(self, is_late: Callable[[], bool]) -> bool:
        if not self._ring.drain(is_late):
            return False
        if self._ring.saved_step == self._state.updates:
            return True
        self._save()
        return self._ring.drain(is_late)

    def _save_and_leave(self) -> None:
        asked = "; ".join(
            f"rank {rank}: {reason}" for rank, reason in enumerate(self._stop_reasons()) if reason
        )
        in_time = self._save_last(lambda: self._stop.is_late)
        saved = self._ring.saved_step
        if in_time and saved == self._state.updates:
            raise Preempted(f"asked to stop ({asked}); saved at step {saved}")
        why = "could not be saved" if in_time else "could not be saved in preempt.grace_seconds"
        raise Preempted(
            f"asked to stop ({asked}); step {self._state.updates} {why}; the newest checkpoint is "
            f"of step {saved}",
            in_time=in_time,
        )


def _start(incident: Incident) -> int:
    assert incident.samples is not None
    return incident.samples[0]
