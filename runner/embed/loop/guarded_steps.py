"""The steps of a user's loop: judge, apply or discard; then count, prove, save.

With ``sync=False`` the device gates the update and the host checks the result one step later. If
the update was withheld, the step computed meanwhile is speculative: it is aborted, which undoes its
side effects, and its batches are replayed. So limits and results equal, bit for bit, those of a
guard that waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from runner.distributed.device import code_digest
from runner.embed.loop.device_gate import DeviceGate, HostSide, Scalers
from runner.embed.loop.measure import Measurer
from runner.embed.loop.out_of_memory import MemoryPlan
from runner.embed.loop.rollback_state import RollbackState
from runner.embed.opening import OpenRun
from runner.embed.state.loop_state import LoopState
from runner.embed.state.randomness import Randomness
from runner.policy.decision.history import Incident, discarded_signals
from runner.policy.decision.judge import Verdict
from runner.policy.decision.ladder import RemedyRules
from runner.system.error import ConfigError
from runner.train.agreed_step import CLOSED, GRAD_NORM, AgreedStep, RankReport, StepInfo, Sums
from runner.train.checkpoints import Checkpoints, LastProof
from runner.train.recovery import Recovery
from runner.train.save_schedule import SaveSchedule
from runner.train.step_guard import StepGuard

_AT_ONCE = 4  # steps of a start whose numbers are never read late: they show what changes


@dataclass(slots=True, kw_only=True)
class _Step:
    """Batches ``[start, stop)``, read and not decided on; ``before``: the generators before it,
    ``logged``: the loop's metrics before it."""

    start: int
    stop: int
    began: float
    before: Randomness
    logged: Sums


@dataclass(frozen=True, slots=True)
class _Allowed:
    """A step whose update the loop may make; ``verdict`` None: a loss scaler is to skip it."""

    info: StepInfo
    verdict: Verdict | None


@dataclass(frozen=True, slots=True)
class _Refused:
    """The state when a step was refused; what the loop changes after that is undone."""

    randomness: Randomness
    host_side: HostSide
    logged: Sums


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step whose gate result the host has not read, and the state needed to undo it."""

    agreed: AgreedStep
    step: _Step
    host_side: HostSide
    scales: list[torch.Tensor | float]


class GuardedSteps:
    """Handles the steps of a user's loop on one rank.

    Attributes:
        checkpoints: when to save and prove.
        has_rolled_back: whether a checkpoint was loaded since this was last set to False.
        must_replay: the batches in hand must be handed out once more; until it is set to False.
        reads_draw: reading a batch draws from the random generators of this rank.
        discards_first: the first step of this start is aborted and replayed.
        undoes_refused: what the loop does between a refusal and :meth:`settle` is undone; nothing
            but its own body may run in between.
        read_step_again: called when a step was refused and the generators are as before it.
            Collective.

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
        self._run, self._state, self._history = run, run.state, run.history
        self._sharded, self._carried = sharded, carried
        self._measurer, self._gate = measurer, gate
        self._known_discards = deque(run.resumed.known_discards)
        self._code = code_digest()
        self._scalers = Scalers(carried.schedulers)
        rules = RemedyRules(guard=run.config.guard, batch=run.config.batch.global_size)
        recovery = Recovery(
            run, suspects=measurer.suspects, rules=rules, data_goes_on=lambda: carried.data_goes_on
        )
        self._guard = StepGuard(run, rules=rules, recovery=recovery, steps=self)
        self.checkpoints = Checkpoints(
            run,
            schedule=SaveSchedule.of(run, run.config.checkpoint, in_memory=True),
            rules=rules,
            last=LastProof(
                run, sharded, last_batch=lambda: run.state.last_loss, earlier=lambda: None
            ),
        )
        self.has_rolled_back = self.must_replay = self.reads_draw = self.undoes_refused = False
        self.discards_first = run.state.updates > 0 and measurer.adds_differently_at_first()
        self.read_step_again: Callable[[], None] = lambda: None
        self.num_judged = 0  # steps of this start that the loop has asked about
        self._is_asked_to_stop = False
        self._own_seconds = 0.0  # of this rank's last step
        run.group.stop_look.is_in_steps = False  # a loop may forget to note its first losses
        self._step: _Step | None = None  # its batches are in hand
        self._decided: _Allowed | _Refused | None = None  # until :meth:`settle`
        self._unread: _Unread | None = None  # until the step after it is judged

    # -- for the recovery -----------------------------------------------------------------

    def forget_known_discards(self) -> None:
        """Called at a rollback: steps discarded later are planned again."""
        self._known_discards.clear()

    # -- reading --------------------------------------------------------------------------

    @property
    def in_hand(self) -> tuple[int, int] | None:
        """The batches of the step that is not decided on, half open."""
        return None if self._step is None else (self._step.start, self._step.stop)

    @property
    def is_unread(self) -> bool:
        """Whether the last update is still unconfirmed."""
        return self._unread is not None

    @property
    def num_uncounted(self) -> int:
        """Updates that were allowed and are not counted yet."""
        is_allowed = isinstance(self._decided, _Allowed) and self._decided.verdict is not None
        return int(is_allowed or self.is_unread)

    def next_number(self) -> int:
        """The number of the next batch that is not skipped."""
        position = self._state.cursor
        if self._step is not None:
            position = self._step.stop
        elif self._unread is not None:
            position = self._unread.step.stop
        return next(iter(self._history.ledger.allowed(position)))[0]

    def replay_known_discards(self) -> None:
        """Judge steps again that were discarded before a restart, without computing. Collective."""
        while self._known_discards and self._step is None:
            incident = self._known_discards[0]
            assert incident.samples is not None
            if incident.samples[0] >= self.next_number():
                return
            self._known_discards.popleft()
            self._judge(StepInfo(signals=discarded_signals(incident), known=incident))
            if not self.has_rolled_back:
                self._state.cursor = max(self._state.cursor, incident.samples[1])

    def begin_batch(self, number: int, randomness: Randomness | None) -> None:
        """Begin a step, or extend it by one more batch.

        Args:
            randomness: the generators to go back to where the step is refused; None: as they are
                now, or as was said of the step's batch before.
        """
        if self._step is None:
            self._measurer.begin_step()
            before = randomness or Randomness()
            self._sharded.before_batch(keep_older=self.is_unread)
            self._step = _Step(
                start=number,
                stop=number + 1,
                began=time.monotonic(),
                before=before,
                logged=self._carried.logged.sums,
            )
            self._run.group.heart.begin_step(self._state.updates + self.num_uncounted + 1)
            return
        self._step.before = randomness or self._step.before
        self._step.stop = number + 1

    # -- judging --------------------------------------------------------------------------

    def note(self, loss: torch.Tensor | float | None) -> None:
        """Record the loss of one micro-batch of an accumulated step."""
        if self._step is None:
            raise ConfigError(
                "guard.note: no batch of guard.over is in hand; call it inside the loop, for each "
                "batch of a step but the last, whose loss guard.ok is given"
            )
        self._measurer.note(loss, self._step.stop - 1)

    def judge(self, loss: torch.Tensor | float | None, tokens: int) -> bool:
        """Whether the update may be made. Collective."""
        is_allowed = self._decide(loss, tokens)
        if not is_allowed and self.undoes_refused:
            self._decided = _Refused(Randomness(), self._host_side(), self._carried.logged.sums)
        return is_allowed

    def _decide(self, loss: torch.Tensor | float | None, tokens: int) -> bool:
        if self.discards_first and self.undoes_refused and self._step is not None:
            # DDP rebuilds its buckets after the first backward: only later steps reduce in the
            # run's order.
            self.discards_first = False
            self.must_replay = True
            self._measurer.forget_gradients()
            self._undo_reading(self._step)
            return False
        if isinstance(self._decided, _Allowed):
            self.settle()
        step = self._step
        if step is None:
            raise ConfigError(
                "guard.ok: no batch of guard.over was read since the last call; call it once a "
                "step, inside the loop over guard.over(loader)"
            )
        if self._unread is not None and not self._confirm(self._unread):
            return False
        agreed = self._launch(loss, tokens, step)
        self._scalers.agree(agreed.numbers[GRAD_NORM])
        self.num_judged += 1
        if self._gate is not None and self._may_read_late():
            self._measurer.clip(agreed.numbers[GRAD_NORM])
            self._gate.closed = agreed.numbers[CLOSED].float()
            scales = self._scalers.scales()
            self._unread = _Unread(agreed, step, self._host_side(), scales)
            self._step = None
            return True
        info = self._read(agreed, step)
        is_overflow = self._scalers.is_overflow(info.signals, self._scalers.scales())
        verdict = None if is_overflow else self._judge(info)
        if is_overflow or verdict is not None:
            self._measurer.clip(agreed.numbers[GRAD_NORM])
            self._decided = _Allowed(info, verdict)
            return True
        if not self.has_rolled_back:
            self._measurer.require_unchanged()
        self._measurer.forget_gradients()
        if not self.has_rolled_back:
            self._undo_reading(step)
            self.read_step_again()
        self._step = None
        if info.stop_requested:
            self.leave()
        return False

    def _launch(self, loss: torch.Tensor | float | None, tokens: int, step: _Step) -> AgreedStep:
        run, state, rollbacks = self._run, self._state, self._history.rollbacks
        number, batches = state.updates + 1, (step.start, step.stop)
        run.group.heart.enter("agree")
        decisions = [
            self._history.num_discarded,
            len(rollbacks),
            rollbacks[-1].serial if rollbacks else 0,
        ]
        return self._measurer.launch(
            loss,
            step=number,
            batches=batches,
            tokens=tokens,
            bounds=state.baseline.bounds if run.config.guard.enabled else None,
            report=RankReport(
                identity={
                    "step": number,
                    "batches": list(batches),
                    "config": run.identity.config_digest,
                    "code": self._code,
                    "decisions": decisions,
                },
                progress=run.ring.progress(),
                stop=run.group.stop.is_set,
                is_slow=run.group.stop.is_short_for(self._own_seconds),
                is_advised=run.group.stop.is_advised(),
                keeps_lines=run.backlog.look(),
            ),
            draws=self.reads_draw,
        )

    def _read(self, agreed: AgreedStep, step: _Step) -> StepInfo:
        info = replace(self._measurer.read(agreed), seconds=time.monotonic() - step.began)
        self._own_seconds, self._run.group.stop_look.is_in_steps = info.seconds, info.is_slow
        self._guard.note_lines(info)
        self.checkpoints.apply_progress(info, self._state)
        return info

    def _judge(self, info: StepInfo) -> Verdict | None:
        """The verdict of an update that counts; None: the step is discarded. Collective."""
        num_rollbacks = len(self._history.rollbacks)
        verdict = self._guard.handle(info, self._state)
        self.has_rolled_back = self.has_rolled_back or len(self._history.rollbacks) > num_rollbacks
        return verdict

    def _undo_reading(self, step: _Step) -> None:
        """Restore buffers and generators from before the step's batches, which are let go."""
        self._sharded.undo_batch()
        step.before.restore()
        self._carried.logged.sums = step.logged
        self._step = None

    def _host_side(self) -> HostSide:
        return HostSide(self._sharded.optimizers, self._carried.schedulers)

    # -- reading late ---------------------------------------------------------------------

    def _may_read_late(self) -> bool:
        """Whether nothing needs the state behind this step before the next. Equal on all ranks."""
        return (
            self.num_judged > _AT_ONCE
            and not self.checkpoints.is_due(self._state.updates + 1)
            and not self._known_discards
            # After one bad step the next may be bad too: this only avoids wasted work.
            and not self._state.trouble.num_recent()
            and not self._is_asked_to_stop
            and not self._measurer.reads_draw
        )

    def _confirm(self, unread: _Unread) -> bool:
        """Read the step before; whether it was applied and counts. If not, abort the speculative
        step whose batches are in hand. Collective."""
        assert self._gate is not None
        self._unread = self._gate.closed = None
        info = self._read(unread.agreed, unread.step)
        self._is_asked_to_stop = self._is_asked_to_stop or info.stop_requested
        if self._scalers.is_overflow(info.signals, unread.scales):
            self._state.cursor = info.signals.stop  # the step computed meanwhile has the new scale
            return True
        verdict = self._judge(info)
        if verdict is not None:
            self._count(info, verdict)
            return True
        self.must_replay = self._step is not None
        self._measurer.forget_gradients()
        if not self.has_rolled_back:
            self._sharded.undo_batch(older=self.must_replay)
            unread.host_side.restore()
            unread.step.before.restore()
            self._carried.logged.sums = unread.step.logged
        self._step = None
        return False

    def finish_reading(self) -> None:
        """The state is that of the last update the host knows of when it returns. Collective."""
        if self._unread is not None:
            self._confirm(self._unread)

    # -- after the update -----------------------------------------------------------------

    def settle(self) -> None:
        """Count the update that the loop was allowed to make; prove and save. Collective.

        After a refusal undo what the loop did since: it may step its schedule or evaluate then too,
        and a batch that is skipped leaves no trace of that.
        """
        decided, self._decided = self._decided, None
        if isinstance(decided, _Refused):
            self._scalers.forget_step()
            decided.host_side.restore()
            decided.randomness.restore()
            self._carried.logged.sums = decided.logged
            self._sharded.undo_batch()
            self._measurer.forget_late_gradients()
        if not isinstance(decided, _Allowed):
            return
        step, self._step = self._step, None
        info, verdict = decided.info, decided.verdict
        if verdict is None:
            self._state.cursor = info.signals.stop
        else:
            assert step is not None
            self._count(replace(info, seconds=time.monotonic() - step.began), verdict)
        if info.stop_requested:
            self.leave()

    def _count(self, info: StepInfo, verdict: Verdict) -> None:
        state, groups = self._state, self._sharded.optimizers[0].param_groups
        rate = float(groups[0].get("lr", 0.0)) if groups else 0.0
        state.advance(info.signals)
        self._run.reporter.step(info, verdict, "apply", learning_rate=rate, state=state)
        self.checkpoints.prove(state)
        self._run.make_memory(lambda: self._sharded.capture()["tensors"])
        self.checkpoints.after_update(state, info.seconds)
        self._run.group.heart.enter("other")

    def leave(self) -> None:
        """Save the state within the grace. Collective; always raises Preempted."""
        self.checkpoints.save_and_leave(self._state)

    # -- the end --------------------------------------------------------------------------

    def abort(self) -> tuple[int, int] | None:
        """Abort the current step: undo its forward passes; the numbers of its batches, or None."""
        step = self._step
        if step is None:
            return None
        self._undo_reading(step)
        self._measurer.forget_gradients()
        return step.start, step.stop

    def leave_out(self, plan: MemoryPlan) -> None:
        """Skip the batches of the next step, with which memory ran out. Collective."""
        numbers, position = [], self.next_number()
        for _ in range(self._run.config.batch.global_size):
            position = next(iter(self._history.ledger.allowed(position)))[0]
            numbers.append(position)
            position += 1
        self._run.written.report(plan.left_out(numbers))
        self._state.cursor = position

    def skip_batches(self, start: int, stop: int) -> None:
        """Skip batches that were read, not applied, and cannot be read again. Collective."""
        skipped = list(range(start, stop))
        self._run.written.report(
            Incident(
                kind="unreadable",
                step=self._state.updates + 1,
                decision=f"skip {len(skipped)} batch{'es' if len(skipped) > 1 else ''}",
                reason="the loop was left with them in hand, and their loader cannot give them "
                "again",
                samples=(start, stop),
                sample_ids=tuple(f"batch {number}" for number in skipped),
                detail={"positions": skipped, "indices": skipped, "errors": []},
            )
        )
        self._state.cursor = stop
