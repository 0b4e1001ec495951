"""After a rollback for bad weights, finds the step that corrupted them, or blames the rate.

The run computes the undone steps again from the clean checkpoint anyway; they are compared with the
recorded ones (:mod:`runner.policy.decision.repeated_steps`). If all repeat, the next verdict tries
lower rates (:mod:`runner.explain.rate_probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from runner.explain.bundle import Bundles
from runner.explain.clean_weights import CleanWeights
from runner.explain.rate_probe import RateProbe
from runner.explain.reading import Reading
from runner.explain.replay import Replay
from runner.policy.decision.finding import Cause, Finding, Remedy
from runner.policy.decision.history import Incident
from runner.policy.decision.repeated_steps import Outcome, Recorded, StepComparison
from runner.policy.decision.signals import Limits, StepSignals
from runner.policy.retention.records import Record
from runner.train.agreed_step import StepInfo
from runner.train.state import TrainState

_NOT_RATE = "a lower rate does not pass the bad step, or other samples at the same rate pass it too"


class RepeatedSteps:
    """Follows the recomputed steps after each rollback.

    Args:
        recorded: returns the recorded numbers of the steps in a half-open range; collective.
        is_exact: whether the machine repeats bits.
        targets: returns the rollback targets for a step, newest first.
        report: receives a journal line.
        bundles: writer of evidence; on rank 0 only.
    """

    def __init__(
        self,
        *,
        replay: Replay,
        recorded: Callable[[int, int], Mapping[int, Recorded]],
        is_exact: bool,
        targets: Callable[[StepSignals, TrainState], Sequence[Record]],
        rate_probe: RateProbe,
        clean_weights: CleanWeights,
        report: Callable[[Incident], None],
        bundles: Bundles | None,
    ) -> None:
        self._replay = replay
        self._recorded = recorded
        self._is_exact = is_exact
        self._targets = targets
        self._rate_probe = rate_probe
        self._clean_weights = clean_weights
        self._report = report
        self._bundles = bundles
        self._comparison: StepComparison | None = None
        self._finding: Finding | None = None
        self._from = 0
        self._known: Reading | None = None
        self._limits = Limits()
        self._device_text = ""

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
        self._comparison = StepComparison(recorded, bad=bad.step, is_exact=self._is_exact)
        self._finding, self._from, self._limits = finding, to_step, state.baseline.limits
        state.came_again = None
        self._device_text = ""
        self._known = self._replay.known_now()

    def blames_device(self, finding: Finding) -> Finding:
        """The finding about a step; a device is to blame if it changed between two computations
        from the same checkpoint, and nothing better is known."""
        if not self._device_text or finding.cause not in (Cause.unclear, Cause.not_reproducible):
            return finding
        return replace(
            finding,
            cause=Cause.sticky,
            remedy=Remedy.redo,
            why=self._device_text,
            refutation="the step repeats its recorded numbers",
            is_tried=True,
            fallback=None,
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
        targets = self._targets(info.signals, state)
        return self._clean_weights.compute(targets[0], compute) if targets else None

    def rate(
        self, info: StepInfo, state: TrainState, finding: Finding, *, most_steps: int
    ) -> Finding:
        """Return the finding, or the rate as the cause of a repeated bad step. Collective."""
        targets = self._targets(info.signals, state)
        if not targets:
            state.came_again = None
            return finding.fallback or finding
        record, older = targets[0], targets[1] if len(targets) > 1 else None
        fallback = finding.fallback or finding
        tried = self._rate_probe.try_rates(
            record,
            info.signals,
            without=fallback.positions,
            most_steps=most_steps,
            older=older,
        )
        state.came_again = None  # once is enough; but a stop meanwhile has the next start try anew
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
        if older is not None and tried.older_cures:
            return replace(
                finding,
                cause=Cause.state,
                remedy=Remedy.go_back,
                why=f"from the checkpoint of step {older.step} the same samples are good at the "
                f"full rate, and from that of step {record.step} only at {tried.factor:.3g} times "
                "it: what was saved there is spoilt",
                refutation="they are bad from the older checkpoint as well",
                is_tried=True,
                step=record.step,
                steps=steps,
                not_tried=(),
                fallback=None,
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
