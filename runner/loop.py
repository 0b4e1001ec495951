"""The story of a run: read a batch, step, agree, judge, decide, act, checkpoint, stop.

Knows policy and protocols by name; how things are done stands elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from runner.cadence import Cadence
from runner.checkpoint.protocol import Moment
from runner.checkpoint.ring import Ring
from runner.data.cursor import SampleStream
from runner.dist.heartbeat import Heartbeat
from runner.error import Halted, Preempted, SaveError
from runner.observe.journal import Journal
from runner.policy.history import Incident, discarded_signals
from runner.policy.pilot import rule
from runner.policy.remedy import Apply, Discard, Halt, Rebaseline, RemedyRules
from runner.policy.schedule import Schedule, cut_factor
from runner.policy.verdict import Kind, Verdict
from runner.recover import Recovery, Scene
from runner.report import Reporter
from runner.state import TrainState
from runner.step import Stepper
from runner.watch.stop import StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """In applied updates; 0 means never."""

    steps: int
    evaluate: int


class Loop:
    """One run on one rank, from its first or restored state to its end."""

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
        saved = self._newest_step()
        if saved != self._state.updates:
            raise SaveError(
                f"all steps are applied, but the last checkpoint is of step {saved}: the end state "
                "could not be saved (see the journal); free space and give the same command again"
            )

    def begin(self) -> None:
        """Commit the initial state: the first checkpoint there is to go back to."""
        if not self._ring.records:
            with self._reporter.stall("checkpoint"):
                self._save()
                self._ring.drain()

    def step(self) -> None:
        """Attempt the next global batch and act on what it told. Raises as :meth:`run`."""
        ledger = self._journal.history.ledger
        plan = self._stream.plan(self._state.cursor, ledger)
        if self._repeat_known_discard(before=plan.start):
            return
        outcome = self._stepper.attempt(
            plan,
            step=self._state.updates + 1,
            ledger=ledger,
            limits=self._state.baseline.limits,
            learning_rate=self._learning_rate(),
            stop=self._stop.is_set,
            work_done=self._ring.tell(),
            decisions=self._decisions(),
        )
        self._ring.settle(
            outcome.num_done, outcome.num_failed, outcome.num_sent, outcome.num_unsent
        )
        self._judge_and_act(Scene(signals=outcome.signals, plan=plan, outcome=outcome))
        if outcome.stop_requested:
            self._save_and_leave()

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
        learning_rate = self._learning_rate()
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

    def _repeat_known_discard(self, *, before: int) -> bool:
        """Judge a step again that was discarded before a restart; nothing is computed.

        So the guard's memory after a restart is what it would have been without one.
        """
        if not self._known_discards or _start(self._known_discards[0]) >= before:
            return False
        incident = self._known_discards.popleft()
        self._judge_and_act(Scene(signals=discarded_signals(incident), known=incident))
        return True

    def _learning_rate(self) -> float:
        updates = self._state.updates
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

    def _save(self) -> None:
        self._heart.enter("save")
        self._ring.save(
            Moment(
                step=self._state.updates,
                cursor=self._state.cursor,
                train_state=self._state.to_json(),
                metrics_bytes=self._reporter.metrics_bytes(),
                journal_lines=self._journal.num_lines,
            )
        )

    def _save_last(self, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Commit the present state unless it is; False when it became too late to wait."""
        self._heart.enter("save")
        with self._reporter.stall("checkpoint"):
            return self._save_and_wait(is_late)

    def _save_and_wait(self, is_late: Callable[[], bool]) -> bool:
        if not self._ring.drain(is_late):
            return False
        if self._newest_step() == self._state.updates:
            return True
        self._save()
        return self._ring.drain(is_late)

    def _newest_step(self) -> int:
        return self._ring.records[-1].step if self._ring.records else -1

    def _save_and_leave(self) -> None:
        asked = "; ".join(
            f"rank {rank}: {reason}" for rank, reason in enumerate(self._stop_reasons()) if reason
        )
        in_time = self._save_last(lambda: self._stop.is_late)
        saved = self._newest_step()
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
