"""After a rollback for bad weights, finds the step that corrupted them, or blames the rate.

The run computes the undone steps again from the clean checkpoint anyway; they are compared with the
recorded ones (:mod:`runner.policy.decision.finding`). If all repeat, the next verdict tries
lower rates (probe G).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from runner.config.schema import GuardConfig
from runner.explain.bundle import Bundles
from runner.explain.case import shown
from runner.explain.probe import CleanWeights, state_restored
from runner.explain.reading import Reading, outstanding, usual
from runner.explain.replay import Replay
from runner.policy.decision.finding import (
    Cause,
    Finding,
    Outcome,
    Recorded,
    StepComparison,
    from_rows,
    recorded_in,
)
from runner.policy.decision.history import Incident
from runner.policy.decision.judge import Kind
from runner.policy.decision.signals import Limits, StepSignals
from runner.policy.retention.records import Record, rollback_targets
from runner.system.json_lines import iter_lines
from runner.train.agreed_step import StepInfo
from runner.train.run import EngineRun
from runner.train.state import TrainState
from runner.train.step_runner import StepPlanner


class RepeatedSteps:
    """Follows the recomputed steps after each rollback.

    Args:
        bundles: writer of evidence; on rank 0 only.
    """

    def __init__(
        self,
        guard: GuardConfig,
        run: EngineRun,
        planner: StepPlanner,
        replay: Replay,
        bundles: Bundles | None,
    ) -> None:
        self._guard, self._run, self._replay, self._bundles = guard, run, replay, bundles
        self._rate_probe = RateProbe(guard, run, planner, replay.known_now)
        self._clean_weights = CleanWeights(run)
        self._comparison: StepComparison | None = None
        self._finding: Finding | None = None
        self._from = 0
        self._known: Reading | None = None
        self._limits = Limits()
        self._device_text = ""

    def _recorded(self, first: int, stop: int) -> dict[int, Recorded]:
        """The recorded numbers of the steps in a half-open range. Collective."""
        run = self._run
        metrics = run.group.run_dir.metrics
        run.reporter.metrics_bytes(durably=False)  # flush, so that they can be read
        rows = run.observers.ranks.of_first(
            "reading the metrics", lambda: recorded_in(iter_lines(metrics), first, stop)
        )
        return from_rows(rows)

    def _targets(self, bad: StepSignals, state: TrainState) -> list[Record]:
        """Rollback targets, as in :func:`runner.policy.decision.ladder.decide`."""
        run, guard = self._run, self._guard
        onset = state.trouble.bad[0] if state.trouble.bad else None
        step, start = (onset.step, onset.start) if onset else (bad.step, bad.start)
        margin = guard.margin * run.corpus.stream.global_size
        cursor = run.history.ledger.before(start, margin)
        return rollback_targets(run.ring.records, cursor=cursor, step=max(0, step - guard.back))

    @property
    def is_following(self) -> bool:
        """Whether undone steps are being compared. Equal on all ranks."""
        return self._comparison is not None

    def stop(self) -> None:
        """Compare no further."""
        self._comparison = None

    def begin(self, info: StepInfo, finding: Finding, state: TrainState, *, to_step: int) -> None:
        """Start following after a rollback to ``to_step`` because of ``finding``. Collective.

        Args:
            state: that of the checkpoint.
        """
        bad = info.signals
        recorded = dict(self._recorded(to_step + 1, bad.step))
        # The rate is from the plan: it is not recorded for a step that was not applied.
        recorded[bad.step] = Recorded.of(bad, info.learning_rate)
        self._comparison = StepComparison(recorded, bad=bad.step, is_exact=self._run.repeats_bits)
        self._finding, self._from, self._limits = finding, to_step, state.baseline.limits
        state.came_again = None
        self._device_text = ""
        self._known = self._replay.known_now()

    def blames_device(self, finding: Finding) -> Finding:
        """The finding about a step; a device is to blame if it changed between two computations
        from the same checkpoint, and nothing better is known."""
        if not self._device_text or finding.cause not in (Cause.unclear, Cause.not_reproducible):
            return finding
        return shown(
            Cause.sticky,
            self._device_text,
            of=finding,
            refutation="the step repeats its recorded numbers",
            not_tried=finding.not_tried,
        )

    def follow(self, info: StepInfo, state: TrainState) -> Callable[[], None] | None:
        """Compare the next attempted step; returns what is left to compute for a conclusion."""
        if self._comparison is None or info.unreadable or info.batch is None:
            return None
        now = Recorded.of(info.signals, info.learning_rate)
        self._test_device(now)
        outcome = self._comparison.compare(now, gated=info.signals.gated)
        if outcome is None:
            return None
        comparison, self._comparison = self._comparison, None
        if outcome is Outcome.repeated:
            state.came_again = comparison.bad
        elif outcome is Outcome.differs:
            return partial(self._conclude, comparison.recorded[now.step], now)
        return None

    def _test_device(self, now: Recorded) -> None:
        """Blame a device, though none can be named, if neither weights nor samples can be at fault.

        The first step after the checkpoint starts from weights whose digest was verified. If it
        differs from its record, and known samples are bad as well, this machine computes otherwise.
        """
        comparison, known = self._comparison, self._known
        assert comparison is not None
        if now.step != self._from + 1 or known is None or known.is_good(self._limits):
            return
        if comparison.differs(now):
            before = comparison.recorded[now.step]
            self._device_text = (
                f"step {now.step} from the clean checkpoint of step {self._from} has other numbers "
                f"than the first time (loss {before.loss:.6g} then, {now.loss:.6g} now; gradient "
                f"norm {before.grad_norm:.4g} then, {now.grad_norm:.4g} now), and samples that are "
                "known to be good are bad with its weights too: a device, or the sum over ranks; "
                "no rank can be named"
            )

    def _conclude(self, before: Recorded, now: Recorded) -> None:
        """Report the first step that starts from a different state than recorded."""
        first, known = self._finding, self._known
        assert first is not None
        if known is None or self._limits == Limits() or not known.is_good(self._limits):
            return  # the checkpoint is no better, so nothing is proven
        if not self._replay.repeats_known():
            return  # a device differs from the record as well
        if now.step == self._from + 1 and now.loss > before.loss:
            return  # worse from weights whose digest was verified: what computes is in doubt
        finding = shown(
            Cause.state,
            "samples that are known to be good are bad with these weights and good with those "
            f"of the clean checkpoint of step {self._from}; computed again from there on the same "
            f"samples, step {now.step} is the first with different numbers (loss "
            f"{before.loss:.6g} then, {now.loss:.6g} now)",
            of=first,
            refutation="every step repeats its recorded numbers",
            step=now.step,
            steps=1,
            numbers={**first.numbers, f"known, step {self._from}": known.to_json()},
        )
        if self._bundles is not None and finding.bundle is not None:
            self._bundles.conclude(finding.bundle, finding)
        self._run.written.report(
            Incident(
                kind="explained",
                step=now.step,
                decision="go on",
                reason=finding.describe(),
                detail={"cause": finding.to_json()},
            )
        )

    def compute_earlier(
        self, info: StepInfo, state: TrainState, compute: Callable[[], Sequence[Reading]]
    ) -> Sequence[Reading] | None:
        """Call ``compute`` with the weights that a rollback would load. Collective."""
        targets = self._targets(info.signals, state)
        return self._clean_weights.compute(targets[0], compute) if targets else None

    def rate(
        self, info: StepInfo, state: TrainState, finding: Finding, *, most_steps: int
    ) -> Finding:
        """Return the finding, or the rate as the cause of a repeated bad step. Collective."""
        targets = self._targets(info.signals, state)
        fallback = finding.fallback or finding
        if not targets:
            state.came_again = None
            return fallback
        record, older = targets[0], targets[1] if len(targets) > 1 else None
        tried = self._rate_probe.try_rates(
            record, info.signals, without=fallback.positions, most_steps=most_steps, older=older
        )
        state.came_again = None  # once is enough; but a stop meanwhile has the next start try anew
        steps = finding.steps + tried.steps
        if tried.factor is None or tried.control_cures:
            why_not = tried.shortfall or "G: other samples at the same rate are good as well"
            return replace(without_rate(finding, why_not), steps=steps)
        if older is not None and tried.older_cures:
            return shown(
                Cause.state,
                f"from the checkpoint of step {older.step} the same samples are good at the "
                f"full rate, and from that of step {record.step} only at {tried.factor:.3g} times "
                "it: what was saved there is spoilt",
                of=finding,
                refutation="they are bad from the older checkpoint as well",
                step=record.step,
                steps=steps,
            )
        return shown(
            Cause.rate,
            f"from the clean checkpoint of step {record.step} the same steps are good at "
            f"{tried.factor:.3g} times the learning rate, and bad at the full one whichever "
            "samples come",
            of=finding,
            rate_factor=tried.factor,
            not_tried=(*finding.not_tried, *filter(None, [tried.shortfall])),
            steps=steps,
        )


def without_rate(finding: Finding, why_not: str) -> Finding:
    """The finding that holds if probe G shows nothing."""
    return replace(
        finding.fallback or finding,
        steps=finding.steps,
        hosts=finding.hosts,
        not_tried=(*finding.not_tried, why_not),
        numbers=finding.numbers,
        layers=finding.layers,
    )


# Probe G: trains again from a clean checkpoint to a bad step at lower rates, without touching the
# run's files, and restores the state bit for bit afterwards.
#
# If a lower rate cures the step and different samples do not, the rate is the cause.


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
