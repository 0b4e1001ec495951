"""Decides when checkpoints are saved and proven, including the last one of the run.

The ring knows how; see :mod:`runner.checkpoint.ring`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runner.checkpoint.elements import is_finite
from runner.checkpoint.protocol import CheckpointMetadata, ShardedState
from runner.health.notice import SPARE_SECONDS
from runner.health.preemption import StopRequested, who_asked
from runner.observe.metrics import held_out_before
from runner.policy.decision.history import Incident
from runner.policy.decision.ladder import RemedyRules
from runner.policy.retention.records import State, on_disk
from runner.system.error import Preempted, SaveError
from runner.system.units import counted
from runner.train.agreed_step import StepInfo
from runner.train.corpus_check import CorpusCheck
from runner.train.evaluate import Evaluator, FixedSet
from runner.train.run import EngineRun, Run
from runner.train.save_schedule import SaveSchedule
from runner.train.state import TrainState, reach_of

_CLOSE_SECONDS = 3.0  # of the grace, after the checkpoint is copied: digest, summary, page
_LAST_TRIES = 2  # attempts if the end state is damaged when read back


class Checkpoints:
    """Saves and proves the checkpoints of one run, and applies what background jobs finished.

    Args:
        last: proves the end state.
        corpus: no checkpoint counts as proven before it has compared the corpus.
    """

    def __init__(
        self,
        run: Run,
        *,
        schedule: SaveSchedule,
        rules: RemedyRules,
        last: LastProof,
        corpus: CorpusCheck | None = None,
    ) -> None:
        self._group = run.group
        self._report = run.written.report
        self._ring = run.ring
        self._schedule = schedule
        self._last = last
        self._corpus = corpus
        self._rules = rules
        self._journal = run.journal
        self._reporter = run.reporter
        self._heart = run.group.heart
        self._backlog = run.backlog
        # What a notice saves is said once, when this start's first checkpoint is on disk.
        self._is_unsaid = run.group.monitor.hears_notices
        self._first_save: tuple[int, float] | None = None  # its step, and since when
        self._first_seconds = 0.0  # that it took

    def is_due(self, updates: int) -> bool:
        """Whether the state of exactly so many updates is saved."""
        return self._schedule.is_due(updates)

    def begin(self, state: TrainState) -> None:
        """Commit the initial state, so that the run has a checkpoint to go back to; or the best one
        that was in memory only.

        Its proof begins at once, because the very first steps may be bad. So does the proof of a
        checkpoint whose probation was over when the run ended.
        """
        if self._ring.saved_step < 0 or self._schedule.is_best(state.updates):
            with self._reporter.stall("checkpoint"):
                self._save(state)
                self._ring.drain()
        self._say_what_notices_save()
        self.prove(state)

    def apply_progress(self, info: StepInfo, state: TrainState) -> None:
        """Apply what all ranks have finished in the background. Collective.

        Raises:
            ConfigError: the corpus is not the one that the run was begun on.
        """
        self._ring.apply_progress(info.job_counts, info.jobs)
        if info.is_advised:
            self._save_soon(info)
        if self._corpus is not None:
            self._corpus.look(state.updates)
        if info.signals.gated:
            self._settle_corpus(state)

    def _save_soon(self, info: StepInfo) -> None:
        """Save a step that is not launched yet: one may be, before this one was read."""
        step = info.signals.step + 1
        self._schedule.advised.add(step)
        advice = who_asked(self._group.ranks.gather(self._group.stop.advice))
        self._report(
            Incident(kind="notice", step=step, decision="save a checkpoint", reason=advice)
        )

    def prove(self, state: TrainState) -> None:
        """Begin the proofs of the checkpoints whose probation is over."""
        self._ring.after_step(
            state.updates,
            state.baseline.clean_streak,
            reach=reach_of(state, self._rules, self._journal.history),
            may_prove=self._corpus is None or not self._corpus.holds_proofs,
        )

    def after_update(self, state: TrainState, seconds: float) -> None:
        """Save when one is due. Collective.

        Args:
            seconds: duration of the update.

        Raises:
            Preempted: a stop was requested while an earlier save was waited for.
        """
        self._say_what_notices_save()
        disk, memory = self._schedule.disk, self._schedule.memory
        for times in (disk, memory):
            if times is not None:
                times.step(seconds, busy=self._ring.is_busy)
        if self._schedule.is_due_on_disk(state.updates):
            with self._reporter.stall("checkpoint"), disk.save(state.updates):
                may_save = self._ring.finish_save(lambda: self._group.stop.is_set)
                if may_save:
                    self._save(state)
            if not may_save:
                self.save_and_leave(state)
        elif memory is not None and memory.is_due(state.updates):
            with self._reporter.stall("checkpoint"), memory.save(state.updates):
                self._save(state, disk=False)

    def commit(self, state: TrainState, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Commit the present state to disk, if the disk accepts it and it is not committed yet.

        What is surely done comes first: a snapshot, then its copies on other nodes while a save
        under way is finished, then the disk. A disk that is too slow costs none of the others.

        Collective. False when the grace ran out.
        """
        ring = self._ring
        self._heart.enter("save")
        with self._reporter.stall("checkpoint"):
            if ring.is_on_its_way(state.updates) or not self._save(state, is_last=True):
                if not ring.drain(is_late):
                    return False
                if not self._is_saved(state):
                    self._save(state, is_last=True)
            # Other nodes need it only if the disk has refused it.
            return ring.drain(is_late) and (
                self._is_saved(state) or ring.drain(is_late, peers=True)
            )

    def finish(self, state: TrainState, held_out: Callable[[], float | None]) -> str | None:
        """Commit and prove the end state; returns why it is not clean, or None. Collective.

        Args:
            held_out: computes the held-out loss of ``state``; called if the proof needs it.

        Raises:
            SaveError: the end state is not on disk.
            Preempted: likewise, because the disk accepts no writes.
            ConfigError: the corpus is not the one that the run was begun on.
        """
        self._settle_corpus(state)
        for _ in range(_LAST_TRIES):
            self.commit(state)
            if not self._is_saved(state):
                break
            self._heart.enter("save")
            with self._reporter.stall("checkpoint"):
                fault = self._last.fault(held_out)
            if self._is_saved(state):  # else it was damaged while or after it was written
                return fault
        if disk_fault := self._backlog.standing():
            raise Preempted(
                f"all steps are applied, but the disk accepts no writes ({disk_fault}): the newest "
                f"checkpoint is of step {self._ring.saved_step}; free space and give the same "
                "command again"
            )
        raise SaveError(
            "all steps are applied, but the last checkpoint is not of step "
            f"{state.updates}, or is damaged: the end state could not be saved (see the "
            "journal); free space, check the disk, and give the same command again"
        )

    @contextmanager
    def saved_at_a_stop(
        self, state: TrainState, attempted: StepInfo | None = None
    ) -> Iterator[None]:
        """Save the state and leave when a request to stop is seen inside. Collective then.

        An evaluation is left to the next start, and so is the ``attempted`` step that was bad.

        Raises:
            Preempted: it was seen.
        """
        if attempted is not None:
            self._group.stop_look.note(attempted.stop_requested)
        try:
            yield
        except StopRequested:
            self.save_and_leave(state, _left_to_next_start(state, attempted))
        if attempted is not None and attempted.stop_requested:
            self.save_and_leave(state)

    def save_and_leave(self, state: TrainState, left: str = "") -> None:
        """Save the state within the grace. Collective; always raises Preempted.

        Args:
            left: what the next start has to do, for the reason.
        """
        reasons = who_asked(self._group.asked_to_stop()) + left
        in_time = self.commit(state, lambda: self._group.stop.is_late)
        step, saved = state.updates, self._ring.saved_step
        if saved == step:
            told = f"saved at step {saved}{self._copied() if in_time else ''}"
        else:
            why = "could not be saved" if in_time else "could not be saved in preempt.grace_seconds"
            told = f"step {step} {why}; the newest checkpoint is of step {saved}"
            is_held, is_replicated = self._ring.held_in_memory(step)
            if is_held:
                where = "also" if is_replicated else "not"
                told += f"; a snapshot of step {step} is in memory, {where} on other nodes"
        raise Preempted(f"asked to stop ({reasons}); {told}", in_time=in_time)

    def _copied(self) -> str:
        """Send the checkpoint to the remote, if that is done in time; what came of it."""
        uploads, stop = self._ring.uploads, self._group.stop
        if uploads is None:
            return ""
        with self._reporter.stall("checkpoint"):
            told = uploads.finish_at_a_stop(
                on_disk(self._ring.records), lambda: stop.left_seconds - _CLOSE_SECONDS
            )
        return f", {told}"

    def _settle_corpus(self, state: TrainState) -> None:
        """Wait for the corpus comparison that holds proofs back, then complete the proofs.

        What follows from a bad step must not depend on how long the corpus takes to read.
        """
        if self._corpus is None or not self._corpus.holds_proofs:
            return
        self._heart.enter("save")
        with self._reporter.stall("checkpoint"):
            self._corpus.finish(state.updates)
            self.prove(state)
            self._ring.drain()

    def _is_saved(self, state: TrainState) -> bool:
        return self._ring.saved_step == state.updates

    def _say_what_notices_save(self) -> None:
        saved, uploads = self._first_save, self._ring.uploads
        if saved is None or not self._is_unsaid or self._ring.saved_step < saved[0]:
            return
        self._first_seconds = self._first_seconds or time.monotonic() - saved[1]
        if uploads is None or uploads.has_tried:
            remote = uploads.seconds if uploads else 0.0
            self._group.console.say(what_notices_save(self._first_seconds, remote))
            self._is_unsaid = False

    def _save(self, state: TrainState, *, disk: bool = True, is_last: bool = False) -> bool:
        self._heart.enter("save")
        if disk and self._first_save is None:
            self._first_save = state.updates, time.monotonic()
        return self._ring.save(
            CheckpointMetadata(
                step=state.updates,
                cursor=state.cursor,
                train_state=state.to_json(),
                metrics_bytes=self._reporter.metrics_bytes(durably=disk),
                journal_lines=self._journal.num_lines,
            ),
            disk=disk,
            is_last=is_last,
        )


def what_notices_save(seconds: float, remote: float = 0.0) -> str:
    """What is saved when a machine is taken back, for a save that takes this long.

    Args:
        remote: seconds of its copy to checkpoint.remote; 0: none was made.
    """
    said = []
    for notice, clouds in ((30.0, "Google, Azure"), (120.0, "AWS")):
        left = notice - SPARE_SECONDS - seconds
        further = left - remote - _CLOSE_SECONDS
        if left <= 1:
            what = "is too short for it: the newest checkpoint remains"
        else:
            what = f"saves the last step if a step takes less than {left:.0f} s"
            if remote and further > 1:
                what += f", and its copy if less than {further:.0f} s"
            elif remote:
                what += ", not its copy"
        said.append(f"a notice of {notice:.0f} s ({clouds}) {what}")
    copy = f" and its copy at checkpoint.remote {remote:.1f} s" if remote else ""
    return f"a checkpoint takes {seconds:.1f} s{copy}; {'; '.join(said)}"


def _left_to_next_start(state: TrainState, attempted: StepInfo | None) -> str:
    if state.unreported is not None:
        return f"; the next start makes the evaluation of step {state.updates}"
    if attempted is not None and attempted.signals.step > state.updates:
        step = attempted.signals.step
        return f"; step {step} is bad and not explained yet: the next start computes it again"
    return ""


Loss = Callable[[], float | None]  # nats per token, or None. Collective


class LastProof:
    """
    Args:
        last_batch: computes the loss over the batch that ends at the cursor.
        earlier: returns the newest held-out loss from before the last step.
    """

    def __init__(self, run: Run, sharded: ShardedState, *, last_batch: Loss, earlier: Loss) -> None:
        self._ring = run.ring
        self._sharded = sharded
        self._ranks = run.ranks
        self._state = run.state
        self._last_batch = last_batch
        self._earlier = earlier
        self._report = run.written.report

    @classmethod
    def of(cls, run: EngineRun) -> LastProof:
        """With losses that the engine computes."""
        corpus, ranks, state = run.corpus, run.ranks, run.state

        def last_batch() -> float | None:
            plan = corpus.stream.plan_before(state.cursor, run.history.ledger)
            samples = FixedSet(indices=plan.indices, what="samples of the last batch")
            evaluator = ranks.all_or_none(
                "reading the last batch", lambda: Evaluator(run, run.feed, corpus.dataset, samples)
            )
            return evaluator.loss()

        def earlier() -> float | None:
            metrics = run.group.run_dir.metrics
            loss: float | None = ranks.of_first(
                "reading the metrics", lambda: held_out_before(metrics, state.updates)
            )
            return loss

        return cls(run, run.engine, last_batch=last_batch, earlier=earlier)

    def fault(self, held_out: Loss) -> str | None:
        """Prove the newest checkpoint on disk; returns why it is not clean, or None. Collective.

        A damaged checkpoint is tainted. One that fails for another reason is intact and can serve a
        restart.
        """
        ring = self._ring
        if ring.last_state is State.clean:  # a finished run was started again
            return None
        fault = self._fault_of_values() or self._fault_of_loss(held_out)
        fault = fault or "; ".join(ring.prove_last())
        if fault and ring.last_state is State.committed:
            clean = ring.newest_clean()
            step = clean.step if clean else -1
            self._report(
                Incident(
                    kind="unproven",
                    step=self._state.updates,
                    decision=f"end; the newest clean checkpoint is of step {step}",
                    reason=f"the last checkpoint failed its proof: {fault}",
                )
            )
        return fault or None

    def _fault_of_values(self) -> str | None:
        sound = [is_finite(shard.local) for shard in self._sharded.shards()]
        [num_unsound] = self._ranks.sum([float(not all(sound))])
        return f"NaN or Inf in the state of {counted(num_unsound, 'rank')}" if num_unsound else None

    def _fault_of_loss(self, held_out: Loss) -> str | None:
        """Judge the end state by its loss, preferably held-out: the last batch was trained on.

        A held-out loss may be far above the training loss of a run that has memorised its data, or
        NaN because of one sample. So it counts against the state only relative to an earlier one.
        """
        baseline = self._state.baseline
        loss = held_out()
        if loss is not None and math.isfinite(loss):
            if loss <= baseline.end_limit():
                return None
            earlier = self._earlier()
            if earlier is not None:
                return _above("held-out loss", loss, baseline.end_limit(earlier))
        loss = self._last_batch()
        if loss is None or not math.isfinite(loss):
            return f"the loss over the last batch is {loss}"
        return _above("loss over the last batch", loss, baseline.end_limit())


def _above(what: str, loss: float, limit: float) -> str | None:
    return f"{what} {loss:.3f} > limit {limit:.3f}" if loss > limit else None
