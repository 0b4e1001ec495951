"""Probe G: trains again from a clean checkpoint to a bad step at lower rates, without touching the
run's files, and restores the state bit for bit afterwards.

If a lower rate cures the step and different samples do not, the rate is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from runner.config.schema import GuardConfig
from runner.explain.clean_weights import state_restored
from runner.explain.reading import Reading, outstanding, usual
from runner.policy.decision.judge import Kind
from runner.policy.decision.signals import StepSignals
from runner.policy.retention.records import Record
from runner.train.run import EngineRun
from runner.train.state import TrainState
from runner.train.step_runner import StepPlanner

# Trials divide the rate by powers of this, so that the largest curing rate is known to a factor of
# three.
_DIVISOR, _MOST_POWERS = 3.0, 6
_MOST_RATES = 3  # bisections of the powers
_BEYOND = 2  # steps after the bad one that must be clean as well
# If single samples stood out, a rate that is too high may spare the samples of a few steps.
_BEYOND_SUSPECTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RateResult:
    """The result of a rate probe.

    Args:
        factor: the largest tried factor on the rate that cured the step; None if none did.
        control_cures: whether other samples at the full rate cure it as well.
        older_cures: whether the same samples do at the full rate, from an older checkpoint.
        steps: number of computed steps.
        shortfall: what was not done or not finished, and why; empty if nothing.
    """

    factor: float | None = None
    control_cures: bool = False
    older_cures: bool = False
    steps: int = 0
    shortfall: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One way from the checkpoint past the bad step.

    Args:
        factor: on the learning rate.
        replaces: replace one sample of each batch.
        without: stream positions that are left out as well.
        cursor: where to begin; None for where the checkpoint does.
        beyond: steps after the bad one that must be clean as well.
        watches: no known sample may stand out from the bad step on. Single samples tell of bad
            weights before the gate does.
    """

    factor: float = 1.0
    replaces: bool = False
    without: tuple[int, ...] = ()
    cursor: int | None = None
    beyond: int = _BEYOND
    watches: bool = False


class RateProbe:
    """Computes steps again from a checkpoint.

    Args:
        known: reads known samples with the weights as they are; None without any. Collective.
    """

    def __init__(
        self,
        guard: GuardConfig,
        run: EngineRun,
        planner: StepPlanner,
        known: Callable[[], Reading | None],
    ) -> None:
        self._guard, self._run, self._planner, self._known = guard, run, planner, known
        self._stop = run.group.stop_look.through(run.observers.ranks)
        self._num_steps = 0

    def try_rates(
        self,
        record: Record,
        bad: StepSignals,
        *,
        without: Sequence[int] = (),
        most_steps: int,
        older: Record | None = None,
    ) -> RateResult:
        """Test whether a lower rate passes the bad step. Collective; restores the state.

        Args:
            record: the checkpoint to start from.
            without: stream positions of suspected samples, which the control leaves out.
            most_steps: limit on computed steps.
            older: an earlier clean checkpoint: the state of ``record`` may itself be spoilt.
        """
        way = bad.step - record.step
        needed = (_MOST_RATES + 1) * (way + _BEYOND) + _BEYOND + 2
        if without:
            watched = _BEYOND_SUSPECTS + 1 + 1  # each step from the bad one on, and before all
            needed = _MOST_RATES * (way + _BEYOND) + 2 * (way + _BEYOND_SUSPECTS)
            needed += (_MOST_RATES + 2) * watched
        if needed > most_steps:
            return RateResult(
                shortfall=f"G: takes up to {needed} computations, {most_steps} are left "
                "(explain=full)"
            )
        self._num_steps = 0
        run = self._run
        with run.stepper.aside(self._stop.over), state_restored(run.engine, run.ring):
            result = self._tried(record, bad, without)
            if result.factor is not None and not result.control_cures:
                result = self._from_older(result, older, bad.step, most_steps)
            return replace(result, steps=self._num_steps)

    def _from_older(
        self, result: RateResult, older: Record | None, bad: int, most_steps: int
    ) -> RateResult:
        """The result with what the full rate does from an older checkpoint."""
        if older is None:
            return replace(result, shortfall="G: there is no older checkpoint to compare with")
        way = bad - older.step + _BEYOND
        if self._num_steps + way > most_steps:
            left = most_steps - self._num_steps
            short = f"G: the older checkpoint takes {way} computations, {left} are left"
            return replace(result, shortfall=short)
        return replace(result, older_cures=self._is_cured(older, bad, Course()))

    def _tried(self, record: Record, bad: StepSignals, without: Sequence[int]) -> RateResult:
        # Bisect the powers: 0 does not cure, and the last one is untested.
        bad_power, good_power = 0, _MOST_POWERS + 1
        while good_power - bad_power > 1:
            power = (bad_power + good_power) // 2
            course = Course(factor=_DIVISOR**-power, watches=bool(without))
            if self._is_cured(record, bad.step, course):
                good_power = power
            else:
                bad_power = power
        if good_power > _MOST_POWERS:
            return RateResult(shortfall="G: no tested lower rate cures it")
        control = self._control_cures(record, bad, without)
        return RateResult(factor=_DIVISOR**-good_power, control_cures=control)

    def _control_cures(self, record: Record, bad: StepSignals, without: Sequence[int]) -> bool:
        """Whether other samples at the full rate pass the bad step.

        With suspects: the same samples without them, or samples so far away that they cannot belong
        to one bad range.
        """
        if not without:
            return self._is_cured(record, bad.step, Course(replaces=True, watches=True))
        alike = Course(replaces=True, beyond=_BEYOND_SUSPECTS, watches=True)
        others = (
            replace(alike, without=tuple(without)),
            replace(alike, cursor=2 * bad.stop - record.cursor),
        )
        return any(self._is_cured(record, bad.step, course) for course in others)

    def _is_cured(self, record: Record, bad: int, course: Course) -> bool:
        """Whether all steps through the bad one and a few more are clean."""
        self._stop.now()
        run, plan_step = self._run, self._planner.plan
        state = TrainState(self._guard)
        state.load_json(run.ring.restore([record]).train_state)
        state.baseline.hold(run.history.held)
        ledger = run.history.ledger.copy()
        for position in course.without:
            ledger.add(position, position + 1)
        state.cursor = state.cursor if course.cursor is None else course.cursor
        known = self._read_known() if course.watches else None
        level = None if known is None else usual(known)
        while state.updates < bad + course.beyond:
            batch = self._planner.stream.plan(state.cursor, ledger)
            if course.replaces:
                position = int(batch.positions[0])
                ledger.add(position, position + 1)
                batch = self._planner.stream.plan(state.cursor, ledger)
            plan = plan_step(batch, state.updates, state.baseline.bounds)
            plan = replace(plan, learning_rate=plan.learning_rate * course.factor)
            info = run.stepper.read(run.stepper.launch(plan, ledger))
            self._num_steps += 1
            signals = info.signals
            if signals.gated or info.unreadable or not math.isfinite(signals.loss):
                return False
            if state.baseline.judge(signals).kind is not Kind.clean:
                return False
            state.advance(signals)
            if level is not None and state.updates >= bad:
                known = self._read_known()
                if known is not None and outstanding(known, level):
                    return False
        return True

    def _read_known(self) -> Reading | None:
        """Known samples, with the weights as they are."""
        self._num_steps += 1
        return self._known()
