"""Decides when checkpoints are saved and proven, including the last one of the run.

The ring knows how; see :mod:`runner.checkpoint.ring`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from runner.checkpoint.protocol import CheckpointMetadata
from runner.checkpoint.ring import Ring
from runner.health.heartbeat import Heartbeat
from runner.health.preemption import StopLook, StopRequest, StopRequested, who_asked
from runner.observe.backlog import Backlog
from runner.observe.journal import Journal
from runner.policy.decision.ladder import RemedyRules
from runner.system.error import Preempted, SaveError
from runner.train.agreed_step import StepInfo
from runner.train.best import BestCheckpoint
from runner.train.corpus_check import CorpusCheck
from runner.train.final_proof import LastProof
from runner.train.report import Reporter
from runner.train.save_schedule import SaveTimes
from runner.train.state import TrainState, reach_of

_LAST_TRIES = 2  # attempts if the end state is damaged when read back


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSchedule:
    """When saves are due: to ``disk``, and to ``memory`` (None: no separate snapshots).

    ``best``: the state with the best held-out loss is saved as well.
    """

    disk: SaveTimes
    memory: SaveTimes | None
    best: BestCheckpoint | None = None

    def is_due(self, updates: int) -> bool:
        """Whether the state after exactly ``updates`` updates is saved."""
        return self.is_due_in_memory(updates) or self.is_due_on_disk(updates)

    def is_due_on_disk(self, updates: int) -> bool:
        """Whether it is saved to disk."""
        return self.disk.is_due(updates) or (self.best is not None and self.best.is_new(updates))

    def is_due_in_memory(self, updates: int) -> bool:
        """Whether a snapshot is due, regardless of the disk."""
        return self.memory is not None and self.memory.is_due(updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proofs:
    """Further conditions of a proof: ``last`` for the end state, ``corpus`` for all."""

    last: LastProof
    corpus: CorpusCheck | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """A stop request and its reasons by rank, empty for none. ``reasons`` is collective.

    ``look`` looks at it between steps; None where nothing does.
    """

    stop: StopRequest
    reasons: Callable[[], list[str]]
    look: StopLook | None = None


class Checkpoints:
    """Saves and proves the checkpoints of one run, and applies what background jobs finished."""

    def __init__(
        self,
        ring: Ring,
        *,
        schedule: SaveSchedule,
        proofs: Proofs,
        rules: RemedyRules,
        journal: Journal,
        reporter: Reporter,
        heart: Heartbeat,
        backlog: Backlog,
    ) -> None:
        self._ring = ring
        self._schedule = schedule
        self._last = proofs.last
        self._corpus = proofs.corpus
        self._rules = rules
        self._journal = journal
        self._reporter = reporter
        self._heart = heart
        self._backlog = backlog

    def is_due(self, updates: int) -> bool:
        """Whether the state of exactly so many updates is saved."""
        return self._schedule.is_due(updates)

    def begin(self, state: TrainState) -> None:
        """Commit the initial state, so that the run has a checkpoint to go back to.

        Its proof begins at once, because the very first steps may be bad. So does the proof of a
        checkpoint whose probation was over when the run ended.
        """
        if self._ring.saved_step < 0:
            with self._reporter.stall("checkpoint"):
                self._save(state)
                self._ring.drain()
        self.prove(state)

    def apply_progress(self, info: StepInfo, state: TrainState) -> None:
        """Apply what all ranks have finished in the background. Collective.

        Raises:
            ConfigError: the corpus is not the one that the run was begun on.
        """
        self._ring.apply_progress(info.job_counts, info.jobs)
        if self._corpus is not None:
            self._corpus.look(state.updates)
        if info.signals.gated:
            self._settle_corpus(state)

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
        """
        disk, memory = self._schedule.disk, self._schedule.memory
        for times in (disk, memory):
            if times is not None:
                times.step(seconds, busy=self._ring.is_busy)
        if self._schedule.is_due_on_disk(state.updates):
            with self._reporter.stall("checkpoint"), disk.save(state.updates):
                self._save(state)
        elif memory is not None and memory.is_due(state.updates):
            with self._reporter.stall("checkpoint"), memory.save(state.updates):
                self._save(state, disk=False)

    def commit(self, state: TrainState) -> None:
        """Commit the present state to disk, if the disk accepts it. Collective."""
        self._save_last(state)

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
            self._save_last(state)
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
        self, state: TrainState, preemption: Preemption, attempted: StepInfo | None = None
    ) -> Iterator[None]:
        """Save the state and leave when a request to stop is seen inside. Collective then.

        An evaluation is left to the next start, and so is the ``attempted`` step that was bad.

        Raises:
            Preempted: it was seen.
        """
        if attempted is not None and preemption.look is not None:
            preemption.look.note(attempted.stop_requested)
        try:
            yield
        except StopRequested:
            self.save_and_leave(state, preemption, _left_to_next_start(state, attempted))
        if attempted is not None and attempted.stop_requested:
            self.save_and_leave(state, preemption)

    def save_and_leave(self, state: TrainState, preemption: Preemption, left: str = "") -> None:
        """Save the state within the grace. Collective; always raises Preempted.

        Args:
            left: what the next start has to do, for the reason.
        """
        reasons = who_asked(preemption.reasons()) + left
        in_time = self._save_last(state, lambda: preemption.stop.is_late)
        saved = self._ring.saved_step
        if in_time and saved == state.updates:
            raise Preempted(f"asked to stop ({reasons}); saved at step {saved}")
        why = "could not be saved" if in_time else "could not be saved in preempt.grace_seconds"
        raise Preempted(
            f"asked to stop ({reasons}); step {state.updates} {why}; the newest checkpoint is "
            f"of step {saved}",
            in_time=in_time,
        )

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

    def _save(self, state: TrainState, *, disk: bool = True) -> None:
        self._heart.enter("save")
        self._ring.save(
            CheckpointMetadata(
                step=state.updates,
                cursor=state.cursor,
                train_state=state.to_json(),
                metrics_bytes=self._reporter.metrics_bytes(durably=disk),
                journal_lines=self._journal.num_lines,
            ),
            disk=disk,
        )

    def _save_last(self, state: TrainState, is_late: Callable[[], bool] = lambda: False) -> bool:
        """Commit the present state unless it is committed; False when the grace ran out."""
        self._heart.enter("save")
        with self._reporter.stall("checkpoint"):
            if not self._ring.drain(is_late):
                return False
            if self._is_saved(state):
                return True
            self._save(state)
            return self._ring.drain(is_late)


def _left_to_next_start(state: TrainState, attempted: StepInfo | None) -> str:
    if state.unreported is not None:
        return f"; the next start makes the evaluation of step {state.updates}"
    if attempted is not None and attempted.signals.step > state.updates:
        step = attempted.signals.step
        return f"; step {step} is bad and not explained yet: the next start computes it again"
    return ""
