"""The steps of a user's loop: read, judge, act; then count, prove, save."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import torch

from runner.checkpoint.memory.tier import NO_MEMORY
from runner.config.rules import remedy_rules
from runner.embed.measure import Measurer
from runner.embed.opening import OpenRun, memory_for
from runner.embed.randomness import Randomness
from runner.embed.rollback_state import RollbackState
from runner.embed.state import LoopState
from runner.policy.decision.history import discarded_signals
from runner.policy.decision.judge import Verdict
from runner.run_dir.build_info import code_digest
from runner.session import parts
from runner.startup.shared_memory import memory_every
from runner.system.error import ConfigError
from runner.train.checkpoints import Checkpoints, Preemption, Proofs, SaveSchedule
from runner.train.final_proof import LastProof
from runner.train.guard import Guard as StepGuard
from runner.train.recovery import Recovery
from runner.train.step import StepInfo


class GuardedSteps:
    """Handles the steps of a user's loop on one rank.

    Attributes:
        pending: the step whose update was allowed, but is not counted yet.
        has_rolled_back: whether a checkpoint was loaded since this was last set to False.
    """

    is_ahead = False  # no step begins before the previous one is judged

    def __init__(
        self, run: OpenRun, sharded: LoopState, carried: RollbackState, measurer: Measurer
    ) -> None:
        self._run = run
        self._state = run.state
        self._sharded = sharded
        self._measurer = measurer
        self._history = run.written.journal.history
        self._known_discards = deque(run.resumed.known_discards)
        self._code = code_digest()
        self._guard, self._checkpoints = _make_guard(self, run, carried, measurer)
        self.pending: tuple[StepInfo, Verdict] | None = None
        self.has_rolled_back = False
        self._has_memory = run.memory.memory is not None
        self._start = 0  # range of the current step's batches; _stop is None between steps
        self._stop: int | None = None
        self._began = time.monotonic()
        self._randomness: Randomness | None = None

    # -- for the recovery -----------------------------------------------------------------

    def forget_known_discards(self) -> None:
        """Called at a rollback: steps discarded later are planned again."""
        self._known_discards.clear()

    # -- reading --------------------------------------------------------------------------

    def begin(self) -> None:
        """Save a first checkpoint as a rollback target. Collective."""
        self._checkpoints.begin(self._state)

    def next_number(self) -> int:
        """The number of the next batch that is not skipped."""
        position = self._state.cursor if self._stop is None else self._stop
        return next(iter(self._history.ledger.allowed(position)))[0]

    def replay_known_discards(self) -> None:
        """Judge steps again that were discarded before a restart, without computing. Collective."""
        while self._known_discards and self._stop is None:
            incident = self._known_discards[0]
            assert incident.samples is not None
            if incident.samples[0] >= self.next_number():
                return
            self._known_discards.popleft()
            info = StepInfo(signals=discarded_signals(incident), known=incident)
            if not self._handle_known(info):
                self._state.cursor = max(self._state.cursor, incident.samples[1])

    def begin_batch(self, number: int, randomness: Randomness | None) -> None:
        """Begin a step, or extend it by one more batch.

        Args:
            randomness: the generators from before the batch was read; None: as they are now.
        """
        if self._stop is None:
            self._start = number
            self._randomness = randomness or Randomness()
            self._sharded.buffers.capture()
            self._began = time.monotonic()
            self._run.group.heart.begin_step(self._state.updates + 1)
        self._stop = number + 1

    def _forget_batches(self) -> None:
        """End the current step's range of batches."""
        self._stop = self._randomness = None

    # -- judging --------------------------------------------------------------------------

    def judge(self, loss: torch.Tensor | float, tokens: int) -> bool:
        """Whether the update may be made. Collective."""
        if self.pending is not None:
            self.settle()
        if self._stop is None:
            raise ConfigError(
                "guard.ok: no batch of guard.over was read since the last call; call it once a "
                "step, inside the loop over guard.over(loader)"
            )
        info = self._info(loss, tokens, self._stop)
        self._guard.note_lines(info)
        self._checkpoints.apply_progress(info, self._state)
        verdict = self._judge_step(info)
        if verdict is not None:
            self._measurer.clip(info.signals.grad_norm)
            self.pending = (info, verdict)
            return True
        self._measurer.forget_gradients()
        if not self.has_rolled_back:
            self._undo_reading()
        self._forget_batches()
        if info.stop_requested:
            self._leave()
        return False

    def _info(self, loss: torch.Tensor | float, tokens: int, stop: int) -> StepInfo:
        run, state = self._run, self._state
        last_serial = self._history.rollbacks[-1].serial if self._history.rollbacks else 0
        step, batches = state.updates + 1, (self._start, stop)
        run.group.heart.enter("agree")
        return self._measurer.step(
            loss,
            step=step,
            batches=batches,
            limits=state.baseline.limits,
            identity={
                "step": step,
                "batches": list(batches),
                "config": run.lease.config_digest,
                "code": self._code,
                "decisions": [
                    self._history.num_discarded,
                    len(self._history.rollbacks),
                    last_serial,
                ],
            },
            flags=(run.group.stop.is_set, run.backlog.look(), tokens),
            progress=run.ring.progress(),
            began=self._began,
        )

    def _judge_step(self, info: StepInfo) -> Verdict | None:
        num_rollbacks = len(self._history.rollbacks)
        verdict = self._guard.handle(info, self._state)
        self.has_rolled_back = self.has_rolled_back or len(self._history.rollbacks) > num_rollbacks
        return verdict

    def _handle_known(self, info: StepInfo) -> bool:
        """Judge a known discard; whether it led to a rollback."""
        self._judge_step(info)
        return self.has_rolled_back

    def _undo_reading(self) -> None:
        """Restore buffers and randomness from before this step's batches."""
        self._sharded.buffers.restore()
        if self._randomness is not None:
            self._randomness.restore()

    # -- after the update -----------------------------------------------------------------

    def settle(self) -> None:
        """Count the update that the loop was allowed to make; prove and save. Collective."""
        if self.pending is None:
            return
        (info, verdict), self.pending = self.pending, None
        state = self._state
        info = replace(info, seconds=time.monotonic() - self._began)
        self._forget_batches()
        state.advance(info.signals)
        self._run.reporter.step(
            info, verdict, "apply", learning_rate=self._learning_rate(), state=state
        )
        self._checkpoints.prove(state)
        self._make_memory()
        self._checkpoints.after_update(state, info.seconds)
        self._run.group.heart.enter("other")
        if info.stop_requested:
            self._leave()

    def _learning_rate(self) -> float:
        groups = self._sharded.optimizers[0].param_groups
        return float(groups[0].get("lr", 0.0)) if groups else 0.0

    def _leave(self) -> None:
        group = self._run.group
        self._checkpoints.save_and_leave(
            self._state, Preemption(stop=group.stop, reasons=group.asked_to_stop)
        )

    def _make_memory(self) -> None:
        """Create slots in memory once the optimizer has its state. Collective."""
        run = self._run
        if self._has_memory or not memory_every(run.config.checkpoint):
            return
        # This may find other tensors than before, and drop the slots.
        captured = self._sharded.capture()
        self._has_memory = True
        memory_parts = memory_for(run.lease, run.group, self._sharded)
        if memory_parts.memory is not None:
            run.loads.in_memory = captured["tensors"]
            run.ring.replace_memory(memory_parts)

    def rebuild_memory(self) -> None:
        """Drop the slots in memory before a save with other tensors than before. Collective."""
        self._run.ring.drain()
        self._run.ring.replace_memory(NO_MEMORY)
        self._has_memory = False

    # -- the end --------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the current state to disk. Collective."""
        self._checkpoints.commit(self._state)

    def finish(self) -> str | None:
        """Commit and prove the final state; why it is not clean, or None. Collective."""
        return self._checkpoints.finish(self._state, lambda: None)


def _make_guard(
    steps: GuardedSteps, run: OpenRun, carried: RollbackState, measurer: Measurer
) -> tuple[StepGuard, Checkpoints]:
    """The guard and the checkpoints, as in ``python -m runner``."""
    config, group, run_history = run.config, run.group, run.written.journal
    rules = remedy_rules(config)
    recovery = Recovery(
        stepper=measurer,
        ring=run.ring,
        journal=run_history,
        reporter=run.reporter,
        rules=rules,
        data_goes_on=lambda: carried.data_goes_on,
    )
    guard = StepGuard(
        rules=rules,
        recovery=recovery,
        steps=steps,
        ring=run.ring,
        journal=run_history,
        reporter=run.reporter,
        heart=group.heart,
        backlog=run.backlog,
    )
    disk = parts.cadence(
        config,
        group.place,
        run.resumed.step,
        run_history.history,
        group.ranks,
        run.reporter.spent,
        run.written.report,
    )
    memory = parts.snapshot_times(config, run_history.history, group.ranks, run.written.report)
    checkpoints = Checkpoints(
        run.ring,
        schedule=SaveSchedule(disk=disk, memory=memory),
        proofs=Proofs(
            last=LastProof(
                ring=run.ring,
                sharded=run.sharded,
                ranks=group.ranks,
                state=run.state,
                last_batch=lambda: run.state.last_loss,
                earlier=lambda: None,
                report=run.written.report,
            )
        ),
        rules=rules,
        journal=run_history,
        reporter=run.reporter,
        heart=group.heart,
        backlog=run.backlog,
    )
    return guard, checkpoints
