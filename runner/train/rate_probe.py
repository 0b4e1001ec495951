"""Probe G: trains again from a clean checkpoint to a bad step at lower rates, without touching the
run's files, and restores the state bit for bit afterwards.

If a lower rate cures the step and different samples do not, the rate is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from runner.checkpoint.protocol import Restored
from runner.engine.protocol import Engine
from runner.policy.decision.history import History
from runner.policy.decision.judge import Kind
from runner.policy.decision.signals import StepSignals
from runner.policy.retention.records import Record
from runner.train.state import TrainState
from runner.train.step import Stepper
from runner.train.step_runner import StepPlanner

# Trials divide the rate by powers of this, so that the largest curing rate is known to a factor of
# three.
_DIVISOR, _MOST_POWERS = 3.0, 6
_MOST_RUNS = 4  # three bisections of the powers, and the control
_BEYOND = 2  # steps after the bad one that must be clean as well


class Ring(Protocol):
    """The part of :class:`runner.checkpoint.ring.Ring` used here."""

    def restore(self, candidates: Sequence[Record]) -> Restored: ...
    def before_update(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RateResult:
    """The result of a rate probe.

    Args:
        factor: the largest tried factor on the rate that cured the step; None if none did.
        control_cures: whether other samples at the full rate cure it as well.
        steps: number of computed steps.
        shortfall: why it was not done or not finished; empty if it was.
    """

    factor: float | None = None
    control_cures: bool = False
    steps: int = 0
    shortfall: str = ""


class RateProbe:
    """Computes steps again from a checkpoint.

    Args:
        fresh: makes an empty state to load into.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        stepper: Stepper,
        planner: StepPlanner,
        ring: Ring,
        history: History,
        fresh: Callable[[], TrainState],
    ) -> None:
        self._engine = engine
        self._stepper = stepper
        self._planner = planner
        self._ring = ring
        self._history = history
        self._fresh = fresh
        self._num_steps = 0

    def try_rates(self, record: Record, bad: StepSignals, *, most_steps: int) -> RateResult:
        """Test whether a lower rate passes the bad step. Collective; restores the state.

        Args:
            record: the checkpoint to start from.
            most_steps: limit on computed steps.
        """
        length = bad.step - record.step + _BEYOND
        if length * _MOST_RUNS > most_steps:
            return RateResult(
                shortfall=f"G: {length} steps at each of {_MOST_RUNS} rates, {most_steps} "
                "computations are left (explain=full)"
            )
        self._num_steps = 0
        with self._stepper.aside():
            copy = HostCopy(self._engine)
            try:
                return self._tried(record, bad.step)
            finally:
                self._ring.before_update()
                copy.put_back(self._engine)

    def _tried(self, record: Record, bad: int) -> RateResult:
        # Bisect the powers: 0 does not cure, and the last one is untested.
        bad_power, good_power = 0, _MOST_POWERS + 1
        while good_power - bad_power > 1:
            power = (bad_power + good_power) // 2
            if self._is_cured(record, bad, factor=_DIVISOR**-power):
                good_power = power
            else:
                bad_power = power
        if good_power > _MOST_POWERS:
            return RateResult(steps=self._num_steps, shortfall="G: no tested lower rate cures it")
        control = self._is_cured(record, bad, factor=1.0, leaves_out=True)
        factor = _DIVISOR**-good_power
        return RateResult(factor=factor, control_cures=control, steps=self._num_steps)

    def _is_cured(
        self, record: Record, bad: int, *, factor: float, leaves_out: bool = False
    ) -> bool:
        """Whether all steps through the bad one and a few more are clean.

        Args:
            leaves_out: the control: replace one sample of each batch.
        """
        restored, state = self._ring.restore([record]), self._fresh()
        state.load_json(restored.train_state)
        ledger = self._history.ledger.copy()
        while state.updates < bad + _BEYOND:
            batch = self._planner.stream.plan(state.cursor, ledger)
            if leaves_out:
                position = int(batch.positions[0])
                ledger.add(position, position + 1)
                batch = self._planner.stream.plan(state.cursor, ledger)
            plan = self._planner.plan(batch, state.updates, state.baseline.bounds)
            plan = replace(plan, learning_rate=plan.learning_rate * factor)
            info = self._stepper.read(self._stepper.launch(plan, ledger))
            self._num_steps += 1
            signals = info.signals
            if signals.gated or info.unreadable or not math.isfinite(signals.loss):
                return False
            if state.baseline.judge(signals).kind is not Kind.clean:
                return False
            state.advance(signals)
        return True


class HostCopy:
    """A copy of an engine's state in host memory."""

    def __init__(self, engine: Engine) -> None:
        self._shards = [shard.local.detach().to("cpu", copy=True) for shard in engine.shards()]
        self._counts = engine.update_counts()
        self._buffers = {n: b.detach().to("cpu", copy=True) for n, b in engine.buffers().items()}

    @torch.no_grad()
    def put_back(self, engine: Engine) -> None:
        for shard, kept in zip(engine.shards(), self._shards, strict=True):
            shard.local.copy_(kept)
        for name, buffer in engine.buffers().items():
            buffer.copy_(self._buffers[name])
        engine.finish_load(self._counts)
