"""The story of a step in somebody else's loop: read, judge, act; count, prove, save."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import torch

from runner.checkpoint.memory.tier import NO_MEMORY
from runner.config.rules import remedy_rules
from runner.embed.carried import LoopCarried
from runner.embed.measure import Measurer
from runner.embed.opening import Opened, memory_for
from runner.embed.randomness import Randomness
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


class Story:
    """What happens between a batch and the next, on one rank.

    Attributes:
        pending: the step whose update the loop was allowed to make, not yet counted.
        went_back: a checkpoint was loaded since it was last set to False.
    """

    is_ahead = False  # no step is begun before the one before it is judged

    def __init__(
        self, opened: Opened, sharded: LoopState, carried: LoopCarried, measurer: Measurer
    ) -> None:
        self._opened = opened
        self._state = opened.state
        self._sharded = sharded
        self._measurer = measurer
        self._history = opened.written.journal.history
        self._known = deque(opened.resumed.known_discards)
        self._code = code_digest()
        self._guard, self._checkpoints = _actors(self, opened, carried, measurer)
        self.pending: tuple[StepInfo, Verdict] | None = None
        self.went_back = False
        self._has_memory = opened.memory.memory is not None
        self._start = 0  # of the batches in hand, numbers; _stop is None between two steps
        self._stop: int | None = None
        self._began = time.monotonic()
        self._randomness: Randomness | None = None

    # -- for the recovery -----------------------------------------------------------------

    def forget_known_discards(self) -> None:
        """The run goes back: what was discarded from here on is planned anew."""
        self._known.clear()

    # -- reading --------------------------------------------------------------------------

    def begin(self) -> None:
        """Have something to go back to. Collective."""
        self._checkpoints.begin(self._state)

    def next_number(self) -> int:
        """Of the next batch that may be read."""
        at = self._state.cursor if self._stop is None else self._stop
        return next(iter(self._history.ledger.allowed(at)))[0]

    def repeat_known(self) -> None:
        """Judge again what was discarded before a restart, without computing it. Collective."""
        while self._known and self._stop is None:
            incident = self._known[0]
            assert incident.samples is not None
            if incident.samples[0] >= self.next_number():
                return
            self._known.popleft()
            info = StepInfo(signals=discarded_signals(incident), known=incident)
            if not self._handled(info):
                self._state.cursor = max(self._state.cursor, incident.samples[1])

    def opened_batch(self, number: int, before: Randomness | None) -> None:
        """A batch is in hand.

        Args:
            before: the random generators as they were before it was read; None: as they are.
        """
        if self._stop is None:
            self._start = number
            self._randomness = before or Randomness()
            self._sharded.buffers.remember()
            self._began = time.monotonic()
            self._opened.group.heart.begin_step(self._state.updates + 1)
        self._stop = number + 1

    def _forget_batches(self) -> None:
        """Between two steps no batch is in hand."""
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
        verdict = self._guard_handles(info)
        if verdict is not None:
            self._measurer.clip(info.signals.grad_norm)
            self.pending = (info, verdict)
            return True
        self._measurer.forget_gradients()
        if not self.went_back:
            self._put_back()
        self._forget_batches()
        if info.stop_requested:
            self._leave()
        return False

    def _info(self, loss: torch.Tensor | float, tokens: int, stop: int) -> StepInfo:
        opened, state = self._opened, self._state
        last = self._history.rollbacks[-1].serial if self._history.rollbacks else 0
        step, batches = state.updates + 1, (self._start, stop)
        opened.group.heart.enter("agree")
        return self._measurer.step(
            loss,
            step=step,
            batches=batches,
            limits=state.baseline.limits,
            identity={
                "step": step,
                "batches": list(batches),
                "config": opened.lease.config_digest,
                "code": self._code,
                "decisions": [self._history.num_discarded, len(self._history.rollbacks), last],
            },
            flags=(opened.group.stop.is_set, opened.backlog.look(), tokens),
            progress=opened.ring.progress(),
            began=self._began,
        )

    def _guard_handles(self, info: StepInfo) -> Verdict | None:
        before = len(self._history.rollbacks)
        verdict = self._guard.handle(info, self._state)
        self.went_back = self.went_back or len(self._history.rollbacks) > before
        return verdict

    def _handled(self, info: StepInfo) -> bool:
        """Whether a known discard led back to a checkpoint."""
        self._guard_handles(info)
        return self.went_back

    def _put_back(self) -> None:
        """As if the batches of this step had never been read."""
        self._sharded.buffers.put_back()
        if self._randomness is not None:
            self._randomness.put_back()

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
        self._opened.reporter.step(
            info, verdict, "apply", learning_rate=self._learning_rate(), state=state
        )
        self._checkpoints.prove(state)
        self._make_memory()
        self._checkpoints.after_update(state, info.seconds)
        self._opened.group.heart.enter("other")
        if info.stop_requested:
            self._leave()

    def _learning_rate(self) -> float:
        groups = self._sharded.optimizers[0].param_groups
        return float(groups[0].get("lr", 0.0)) if groups else 0.0

    def _leave(self) -> None:
        group = self._opened.group
        self._checkpoints.save_and_leave(
            self._state, Preemption(stop=group.stop, reasons=group.asked_to_stop)
        )

    def _make_memory(self) -> None:
        """Slots in memory, once the optimizer has its state. Collective."""
        opened = self._opened
        if self._has_memory or not memory_every(opened.config.checkpoint):
            return
        captured = (
            self._sharded.capture()
        )  # which may find that other tensors are there than before
        self._has_memory = True
        found = memory_for(opened.lease, opened.group, self._sharded)
        if found.memory is not None:
            opened.loads.in_memory = captured["tensors"]
            opened.ring.replace_memory(found)

    def layout_changes(self) -> None:
        """Other tensors than before are to be saved: slots in memory are made anew. Collective."""
        self._opened.ring.drain()
        self._opened.ring.replace_memory(NO_MEMORY)
        self._has_memory = False

    # -- the end --------------------------------------------------------------------------

    def commit(self) -> None:
        """The present state is on disk when it returns. Collective."""
        self._checkpoints.commit(self._state)

    def finish(self) -> str | None:
        """Commit and prove the end state; why it is not clean, or None. Collective."""
        return self._checkpoints.finish(self._state, lambda: None)


def _actors(
    story: Story, opened: Opened, carried: LoopCarried, measurer: Measurer
) -> tuple[StepGuard, Checkpoints]:
    """What judges and what saves, as in a run of our own."""
    config, group, journal = opened.config, opened.group, opened.written.journal
    rules = remedy_rules(config)
    recovery = Recovery(
        stepper=measurer,
        ring=opened.ring,
        journal=journal,
        reporter=opened.reporter,
        rules=rules,
        data_goes_on=lambda: carried.data_goes_on,
    )
    guard = StepGuard(
        rules=rules,
        recovery=recovery,
        steps=story,
        ring=opened.ring,
        journal=journal,
        reporter=opened.reporter,
        heart=group.heart,
        backlog=opened.backlog,
    )
    disk = parts.cadence(
        config,
        group.place,
        opened.resumed.step,
        journal.history,
        group.ranks,
        opened.reporter.spent,
        opened.written.report,
    )
    memory = parts.snapshot_times(config, journal.history, group.ranks, opened.written.report)
    checkpoints = Checkpoints(
        opened.ring,
        schedule=SaveSchedule(disk=disk, memory=memory),
        proofs=Proofs(
            last=LastProof(
                ring=opened.ring,
                sharded=opened.sharded,
                ranks=group.ranks,
                state=opened.state,
                last_batch=lambda: opened.state.last_loss,
                earlier=lambda: None,
                report=opened.written.report,
            )
        ),
        rules=rules,
        journal=journal,
        reporter=opened.reporter,
        heart=group.heart,
        backlog=opened.backlog,
    )
    return guard, checkpoints
