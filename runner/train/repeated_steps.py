"""After a rollback for bad weights, finds the step that corrupted them, or blames the rate.

The run computes the undone steps again from the clean checkpoint anyway; they are compared with the
recorded ones (:mod:`runner.policy.decision.repeated_steps`). If all repeat, the next verdict tries
lower rates (:mod:`runner.train.rate_probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from runner.explain.bundle import Bundles
from runner.explain.finding import Cause, Finding, Remedy
from runner.explain.reading import Reading
from runner.explain.replay import Replay
from runner.policy.decision.history import Incident
from runner.policy.decision.repeated_steps import Outcome, Recorded, StepComparison
from runner.policy.decision.signals import Limits, StepSignals
from runner.policy.retention.records import Record
from runner.train.clean_weights import CleanWeights
from runner.train.rate_probe import RateProbe
from runner.train.state import TrainState
from runner.train.step import StepInfo

_NOT_RATE = "a lower rate does not pass the bad step, or other samples at the same rate pass it too"


class RepeatedSteps:
    """Follows the recomputed steps after each rollback.

    Args:
        recorded: returns the recorded numbers of the steps in a half-open range; collective.
        is_exact: whether the machine repeats bits.
        target: returns the rollback target for a step; None if there is none.
        report: receives a journal line.
        bundles: writer of evidence; on rank 0 only.
    """

    def __init__(
        self,
        *,
        replay: Replay,
        recorded: Callable[[int, int], Mapping[int, Recorded]],
        is_exact: bool,
        target: Callable[[StepSignals, TrainState], Record | None],
        rate_probe: RateProbe,
        clean_weights: CleanWeights,
        report: Callable[[Incident], None],
        bundles: Bundles | None,
    ) -> None:
        self._replay = replay
        self._recorded = recorded
        self._is_exact = is_exact
        self._target = target
        self._rate_probe = rate_probe
        self._clean_weights = clean_weights
        self._report = report
        self._bundles = bundles
        self._comparison: StepComparison | None = None
        self._finding: Finding | None = None
        self._from = 0
        self._known: Reading | None = None
        self._limits = Limits()
        self._came_again: int | None = None

    def has_come_again(self, step: int) -> bool:
        """Whether this bad step follows from its weights and samples: it was bad before, and every
        step since the checkpoint repeated its numbers."""
        return self._came_again == step

    def begin(self, info: StepInfo, finding: Finding, *, to_step: int, limits: Limits) -> None:
        """Start following after a rollback to ``to_step`` because of ``finding``. Collective.

        Args:
            limits: the checkpoint's limits.
        """
        bad = info.signals
        recorded = dict(self._recorded(to_step + 1, bad.step))
        # The rate is from the plan: it is not recorded for a step that was not applied.
        recorded[bad.step] = Recorded.of(bad, info.learning_rate)
        self._comparison = StepComparison(recorded, bad=bad.step, is_exact=self._is_exact)
        self._finding, self._from, self._limits = finding, to_step, limits
        self._came_again = None
        self._known = self._replay.known_now()

    def follow(self, info: StepInfo) -> None:
        """Compare the next attempted step."""
        if self._comparison is None or info.unreadable or info.batch is None:
            return
        now = Recorded.of(info.signals, info.learning_rate)
        outcome = self._comparison.compare(now, gated=info.signals.gated)
        if outcome is None:
            return
        comparison, self._comparison = self._comparison, None
        if outcome is Outcome.repeated:
            self._came_again = comparison.bad
        elif outcome is Outcome.differs:
            self._conclude(comparison.recorded[now.step], now)

    def _conclude(self, before: Recorded, now: Recorded) -> None:
        """Report the first step that starts from a different state than recorded."""
        first, known = self._finding, self._known
        assert first is not None
        if known is None or not known.is_good(self._limits):
            return  # the checkpoint is no better, so nothing is proven
        finding = replace(
            first,
            cause=Cause.state,
            why="samples that are known to be good are bad with these weights and good with those "
            f"of the clean checkpoint of step {self._from}; computed again from there on the same "
            f"samples, step {now.step} is the first with different numbers (loss "
            f"{before.loss:.6g} then, {now.loss:.6g} now)",
            refutation="every step repeats its recorded numbers",
            is_tried=True,
            step=now.step,
            steps=1,
            not_tried=(),
            numbers={**first.numbers, f"known, step {self._from}": known.to_json()},
        )
        self._write(finding, now.step)

    def _write(self, finding: Finding, step: int) -> None:
        if self._bundles is not None and finding.bundle is not None:
            self._bundles.conclude(finding.bundle, finding)
        self._report(
            Incident(
                kind="explained",
                step=step,
                decision="go on",
                reason=finding.describe(),
                detail={"cause": finding.to_json()},
            )
        )

    def compute_earlier(
        self,
        info: StepInfo,
        state: TrainState,
        compute: Callable[[], Sequence[Reading]],
    ) -> Sequence[Reading] | None:
        """Call ``compute`` with the weights that a rollback would load. Collective."""
        record = self._target(info.signals, state)
        return None if record is None else self._clean_weights.compute(record, compute)

    def rate(
        self, info: StepInfo, state: TrainState, finding: Finding, *, most_steps: int
    ) -> Finding:
        """Return the finding, or the rate as the cause of a repeated bad step. Collective."""
        record = self._target(info.signals, state)
        self._came_again = None  # once is enough
        if record is None:
            return finding.fallback or finding
        fallback = finding.fallback or finding
        tried = self._rate_probe.try_rates(
            record, info.signals, without=fallback.positions, most_steps=most_steps
        )
        steps = finding.steps + tried.steps
        if tried.factor is None or tried.control_cures:
            why_not = tried.shortfall or "G: other samples at the same rate are good as well"
            return replace(
                fallback,
                steps=steps,
                hosts=finding.hosts,
                not_tried=(*finding.not_tried, why_not),
                numbers=finding.numbers,
                layers=finding.layers,
            )
        return replace(
            finding,
            cause=Cause.rate,
            remedy=Remedy.go_back,
            why=f"from the clean checkpoint of step {record.step} the same steps are good at "
            f"{tried.factor:.3g} times the learning rate, and bad at the full one whichever "
            "samples come",
            refutation=_NOT_RATE,
            is_tried=True,
            rate_factor=tried.factor,
            steps=steps,
            not_tried=(),
            fallback=None,
        )
