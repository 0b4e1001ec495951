"""The steps of a user's loop: read, judge, act; then count, prove, save.

Where the numbers are read late (``sync=False``) a step is decided on by the device, and the loop
goes on. The host reads the numbers when the next step is to be decided on; if the update was held
back, what was computed since was computed too early: all that it changed is put back, and its
batches are given to the loop once more. So the limits, and the bits, are those of a guard that
waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from runner.config.rules import remedy_rules
from runner.embed.loop.device_gate import DeviceGate, HostSide, Scalers
from runner.embed.loop.measure import Measurer
from runner.embed.loop.rollback_state import RollbackState
from runner.embed.opening import OpenRun
from runner.embed.state.generators import Randomness
from runner.embed.state.loop_state import LoopState
from runner.policy.decision.history import Incident, discarded_signals
from runner.policy.decision.judge import Verdict
from runner.run_dir.build_info import code_digest
from runner.system.error import ConfigError
from runner.train.agreed_step import CLOSED, GRAD_NORM, AgreedStep, RankReport, StepInfo
from runner.train.checkpoints import Preemption, Proofs
from runner.train.final_proof import LastProof
from runner.train.recovery import Recovery

_AT_ONCE = 4  # steps of a start whose numbers are never read late: they show what changes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """The state when a step was refused; what the loop changes after that is undone."""

    randomness: Randomness
    host_side: HostSide


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unread:
    """A step that the device has decided on and the host has not; with what it is undone by."""

    agreed: AgreedStep
    began: float
    randomness: Randomness | None
    host_side: HostSide


class GuardedSteps:
    """Handles the steps of a user's loop on one rank.

    Attributes:
        pending: the step whose update was allowed, but is not counted yet.
        has_rolled_back: whether a checkpoint was loaded since this was last set to False.
        was_too_early: the batches in hand are to be given once more; until it is set to False.
        reads_draw: reading a batch draws from the random generators of this rank.
        computes_twice: the first step of this start is to be computed once more.
        undoes_refused: what the loop does between a refusal and :meth:`settle` is undone; nothing
            but its own body may run in between.
        read_again: called when a step was refused and the generators are as before it. Collective.

    Args:
        gate: of the optimizers, where numbers may be read late; None: they are read at once.
    """

    is_ahead = False  # no step begins before the previous one is judged

    def __init__(
        self,
        run: OpenRun,
        sharded: LoopState,
        carried: RollbackState,
        measurer: Measurer,
        gate: DeviceGate | None,
    ) -> None:
        self._run = run
        self._state = run.state
        self._sharded = sharded
        self._measurer = measurer
        self._history = run.written.journal.history
        self._known_discards = deque(run.resumed.known_discards)
        self._code = code_digest()
        last = LastProof(
            ring=run.ring,
            sharded=run.sharded,
            ranks=run.group.ranks,
            state=run.state,
            last_batch=lambda: run.state.last_loss,
            earlier=lambda: None,
            report=run.written.report,
        )
        self._guard, self._checkpoints = run.guard(
            self,
            run.saves(in_memory=True),
            rules=remedy_rules(run.config),
            proofs=Proofs(last=last),
            recovery=partial(Recovery, stepper=measurer, data_goes_on=lambda: carried.data_goes_on),
        )
        self.pending: tuple[StepInfo, Verdict] | None = None
        self.has_rolled_back = self.was_too_early = self.reads_draw = False
        self.undoes_refused = False
        self.read_again: Callable[[], None] = lambda: None
        self.computes_twice = run.state.updates > 0 and measurer.adds_differently_at_first()
        self._refusal: _Refusal | None = None
        self._overflow: StepInfo | None = None  # a step that a loss scaler is to skip
        self._scalers = Scalers(carried.schedulers)
        self._carried = carried
        self._gate = gate
        self._unread: _Unread | None = None
        self._num_judged = 0
        self._is_asked_to_stop = False
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
        position = self._state.cursor if self._unread is None else self._unread.agreed.batch.stop
        position = position if self._stop is None else self._stop
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
            randomness: the generators to go back to where the step is refused; None: as they are
                now, or as was said of the step's batch before.
        """
        if self._stop is None:
            self._start = number
            self._measurer.begin_step()
            self._randomness = randomness or Randomness()
            self._sharded.before_batch(keep_older=self._unread is not None)
            self._began = time.monotonic()
            self._run.group.heart.begin_step(self._state.updates + 1)
        elif randomness is not None:
            self._randomness = randomness
        self._stop = number + 1

    def _forget_batches(self) -> None:
        """End the current step's range of batches."""
        self._stop = self._randomness = None

    # -- judging --------------------------------------------------------------------------

    def note(self, loss: torch.Tensor | float) -> None:
        """The loss of the batch in hand, where others of the same step follow."""
        if self._stop is None:
            raise ConfigError(
                "guard.note: no batch of guard.over is in hand; call it inside the loop, for each "
                "batch of a step but the last, whose loss guard.ok is given"
            )
        self._measurer.note(loss, self._stop - 1)

    def judge(self, loss: torch.Tensor | float, tokens: int) -> bool:
        """Whether the update may be made. Collective."""
        is_allowed = not self._gives_again() and self._decide(loss, tokens)
        if not is_allowed and self.undoes_refused:
            self._refusal = _Refusal(
                randomness=Randomness(),
                host_side=HostSide(self._sharded.optimizers, self._carried.schedulers),
            )
        return is_allowed

    def _decide(self, loss: torch.Tensor | float, tokens: int) -> bool:
        if self.pending is not None:
            self.settle()
        if self._stop is None:
            raise ConfigError(
                "guard.ok: no batch of guard.over was read since the last call; call it once a "
                "step, inside the loop over guard.over(loader)"
            )
        if self._unread is not None and not self._read_late():
            return False
        agreed = self._launched(loss, tokens, self._stop)
        self._num_judged += 1
        if self._may_read_late():
            self._hold_back(agreed)
            return True
        info = self._read(agreed, self._began)
        if self.undoes_refused and self._scalers.is_overflow(info.signals):
            self._measurer.clip(agreed.numbers[GRAD_NORM])
            self._overflow = info
            return True
        verdict = self._judge_step(info)
        if verdict is not None:
            self._measurer.clip(agreed.numbers[GRAD_NORM])
            self.pending = (info, verdict)
            return True
        if not self.has_rolled_back:
            self._measurer.require_unchanged()
        self._measurer.forget_gradients()
        if not self.has_rolled_back:
            self._undo_reading()
            self.read_again()
        self._forget_batches()
        if info.stop_requested:
            self._leave()
        return False

    def _gives_again(self) -> bool:
        """Undo the first step of a start: the next backward is as one in the midst of a run."""
        if not (self.computes_twice and self.undoes_refused and self._stop is not None):
            return False
        self.computes_twice = False
        self._measurer.forget_gradients()
        self._undo_reading()
        self._forget_batches()
        self.was_too_early = True
        return True

    def _launched(self, loss: torch.Tensor | float, tokens: int, stop: int) -> AgreedStep:
        run, state, rollbacks = self._run, self._state, self._history.rollbacks
        step, batches = state.updates + 1, (self._start, stop)
        run.group.heart.enter("agree")
        decisions = [
            self._history.num_discarded,
            len(rollbacks),
            rollbacks[-1].serial if rollbacks else 0,
        ]
        return self._measurer.launch(
            loss,
            step=step,
            batches=batches,
            tokens=tokens,
            bounds=state.baseline.bounds if run.config.guard.enabled else None,
            report=RankReport(
                identity={
                    "step": step,
                    "batches": list(batches),
                    "config": run.lease.config_digest,
                    "code": self._code,
                    "decisions": decisions,
                },
                progress=run.ring.progress(),
                stop=run.group.stop.is_set,
                keeps_lines=run.backlog.look(),
            ),
            draws=self.reads_draw,
        )

    def _read(self, agreed: AgreedStep, began: float) -> StepInfo:
        info = replace(self._measurer.read(agreed), seconds=time.monotonic() - began)
        self._guard.note_lines(info)
        self._checkpoints.apply_progress(info, self._state)
        return info

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
        self._sharded.undo_batch()
        if self._randomness is not None:
            self._randomness.restore()

    # -- reading late ---------------------------------------------------------------------

    def _may_read_late(self) -> bool:
        """Whether nothing needs the state behind this step before the next. Equal on all ranks."""
        return (
            self._gate is not None
            and self._num_judged > _AT_ONCE
            and not self._checkpoints.is_due(self._state.updates + 1)
            and not self._known_discards
            # After one bad step the next may be bad too: this only avoids wasted work.
            and not self._state.trouble.num_recent()
            and not self._is_asked_to_stop
            and not self._measurer.reads_draw
        )

    def _hold_back(self, agreed: AgreedStep) -> None:
        """Have the device apply the update or not."""
        assert self._gate is not None
        self._measurer.clip(agreed.numbers[GRAD_NORM])
        self._gate.closed = agreed.numbers[CLOSED].float()
        self._unread = _Unread(
            agreed=agreed,
            began=self._began,
            randomness=self._randomness,
            host_side=HostSide(self._sharded.optimizers, self._carried.schedulers),
        )
        self._forget_batches()

    def _read_late(self) -> bool:
        """Read the step before; whether it was applied and counts. Collective."""
        unread, self._unread = self._unread, None
        assert unread is not None and self._gate is not None
        self._gate.closed = None
        info = self._read(unread.agreed, unread.began)
        self._is_asked_to_stop = self._is_asked_to_stop or info.stop_requested
        verdict = self._judge_step(info)
        if verdict is not None:
            self._count(info, verdict)
            return True
        is_in_hand = self._stop is not None
        self.was_too_early = is_in_hand
        self._measurer.forget_gradients()
        if not self.has_rolled_back:
            self._sharded.undo_batch(older=is_in_hand)
            unread.host_side.restore()
            if unread.randomness is not None:
                unread.randomness.restore()
        self._forget_batches()
        return False

    def finish_reading(self) -> None:
        """The state is that of the last update the host knows of when it returns. Collective."""
        if self._unread is not None:
            self._read_late()

    @property
    def is_unread(self) -> bool:
        """Whether the last update may be none, and the host does not know it yet."""
        return self._unread is not None

    # -- after the update -----------------------------------------------------------------

    def settle(self) -> None:
        """Count the update that the loop was allowed to make; prove and save. Collective."""
        self._undo_after_refusal()
        if self._overflow is not None:
            info, self._overflow = self._overflow, None
            self._state.cursor = info.signals.stop
            self._forget_batches()
            if info.stop_requested:
                self._leave()
        if self.pending is None:
            return
        (info, verdict), self.pending = self.pending, None
        self._forget_batches()
        self._count(replace(info, seconds=time.monotonic() - self._began), verdict)
        if info.stop_requested:
            self._leave()

    def _undo_after_refusal(self) -> None:
        """A loop may step its schedule or evaluate after a refusal too: a batch that is skipped
        leaves no trace of that."""
        refusal, self._refusal = self._refusal, None
        if refusal is None:
            return
        self._scalers.forget_step()
        refusal.host_side.restore()
        refusal.randomness.restore()
        self._sharded.undo_batch()
        self._measurer.forget_late_gradients()

    def _count(self, info: StepInfo, verdict: Verdict) -> None:
        state = self._state
        state.advance(info.signals)
        self._run.reporter.step(
            info, verdict, "apply", learning_rate=self._learning_rate(), state=state
        )
        self._checkpoints.prove(state)
        self._run.make_memory(lambda: self._sharded.capture()["tensors"])
        self._checkpoints.after_update(state, info.seconds)
        self._run.group.heart.enter("other")

    def _learning_rate(self) -> float:
        groups = self._sharded.optimizers[0].param_groups
        return float(groups[0].get("lr", 0.0)) if groups else 0.0

    def _leave(self) -> None:
        group = self._run.group
        self._checkpoints.save_and_leave(
            self._state, Preemption(stop=group.stop, reasons=group.asked_to_stop)
        )

    # -- the end --------------------------------------------------------------------------

    def lay_down(self) -> tuple[int, int] | None:
        """The loop was left with batches in hand: it is as if they had not been read.

        Returns:
            Their numbers, half open; None if none were in hand.
        """
        if self._stop is None:
            return None
        numbers = (self._start, self._stop)
        self._undo_reading()
        self._measurer.forget_gradients()
        self._forget_batches()
        return numbers

    def pass_over(self, numbers: tuple[int, int]) -> None:
        """Skip batches that were read, not applied, and cannot be read again. Collective."""
        start, stop = numbers
        skipped = list(range(start, stop))
        self._run.written.report(
            Incident(
                kind="unreadable",
                step=self._state.updates + 1,
                decision=f"skip {len(skipped)} batch{'es' if len(skipped) > 1 else ''}",
                reason="the loop was left with them in hand, and their loader cannot give them "
                "again",
                samples=numbers,
                sample_ids=tuple(f"batch {number}" for number in skipped),
                detail={"positions": skipped, "indices": skipped, "errors": []},
            )
        )
        self._state.cursor = stop

    @property
    def is_in_hand(self) -> bool:
        """Whether a batch was read for which the loop has not asked yet."""
        return self._stop is not None

    @property
    def num_judged(self) -> int:
        """Steps of this start that the loop has asked about."""
        return self._num_judged

    def commit(self) -> None:
        """Commit the current state to disk. Collective."""
        self._checkpoints.commit(self._state)

    def finish(self) -> str | None:
        """Commit and prove the final state; why it is not clean, or None. Collective."""
        return self._checkpoints.finish(self._state, lambda: None)
