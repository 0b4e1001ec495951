"""A run on this rank in which one incident after the other is made.

The run is started as any other and trained for some steps. Before each trial its state is put back;
then the run's own loop is left to find out what was done.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runner.explain.clean_weights import HostCopy
from runner.explain.rate_probe import Course, RateProbe, RateResult
from runner.fault.spec import parse_faults
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import StepSignals
from runner.policy.retention.records import Record
from runner.session.phases import Run
from runner.system.error import RunnerError
from scripts.explain_trials.kinds import Scene
from scripts.explain_trials.layouts import START, Layout
from scripts.explain_trials.outcome import HEALTHY, NOTHING, Outcome, Trial, judge
from scripts.explain_trials.tamper import Tampering

_QUIET = "slow@step=1000000,seconds=0"
_MOST_STEPS = {"state corrupted": 30, "rate": 90, HEALTHY: 4}
_MOST_OTHERS = 2
_FINER = 3**0.5  # by which larger rates are tried, once a rate was named
_MOST_FINER = 6


class Bed:
    """One run.

    Args:
        name: of its layout.
    """

    def __init__(self, run: Run, layout: Layout, name: str) -> None:
        self.run = run
        self.layout = layout
        self._name = name
        self._place = run.opened.group.place
        self._history = run.opened.written.journal.history
        self._numbers = itertools.count()
        run.loop.begin()
        while run.state.updates < START:
            run.loop.step()
        run.ring.drain()
        self._keep_the_ring()
        self._usual_loss = statistics.median(loss for loss, _ in run.state.baseline.recent(5))
        self._engine = HostCopy(run.engine)
        self._state = run.state.to_json()
        self._past = copy.deepcopy(self._history.__dict__)
        plan = run.opened.corpus.stream.plan(run.state.cursor, self._history.ledger)
        self._batch = plan.positions.tolist()
        explaining: Any = run.loop._guard
        self._explaining = explaining
        self._rates = _FinerRates(explaining._repeated._rate_probe)
        self._tampering = Tampering(
            run, rank=self._place.rank, last=layout.last, indices=self._indices
        )
        self._watch_findings()

    def _keep_the_ring(self) -> None:
        """From here on nothing is saved, proven or tainted: the checkpoints stay those that every
        trial begins with."""
        checkpoints: Any = self.run.loop._checkpoints
        checkpoints.after_update = lambda state, seconds: None
        checkpoints.prove = lambda state: None
        ring: Any = self.run.ring
        ring.abandon_after = lambda serial, reach=None: None

    def _watch_findings(self) -> None:
        """Note the probes of each finding, which the journal does not have."""
        self._findings: list[Any] = []
        replay = self._explaining._replay
        explain = replay.explain

        def noted(case: Any) -> Any:
            self._findings.append(explain(case))
            return self._findings[-1]

        replay.explain = noted

    def _indices(self, positions: Sequence[int]) -> list[int]:
        """Of the data set, at these positions of the stream, but for those that are held out."""
        wanted, cursor, indices = set(positions), positions[0], []
        while cursor <= positions[-1]:
            plan = self.run.opened.corpus.stream.plan(cursor, self._history.ledger)
            pairs = zip(plan.positions.tolist(), plan.indices.tolist(), strict=True)
            indices += [index for position, index in pairs if position in wanted]
            cursor = plan.stop
        return indices

    @property
    def scene(self) -> Scene:
        """What trials are drawn from; equal on all ranks."""
        plan = self.run.opened.corpus.stream.plan(self.run.state.cursor, self._history.ledger)
        shares = []
        for rank in range(self._place.world_size):
            batches = self.run.feed.read_again(plan, rank)
            shares.append([p for batch in batches for p in batch.positions if p is not None])
        limits = self.run.state.baseline.limits
        return Scene(
            world_size=self._place.world_size,
            step=START + 1,
            batch=self._batch,
            shares=shares,
            modules=self.layout.modules,
            rise=limits.loss - self._usual_loss,
            loss=self._usual_loss,
            has_images=self.layout.has_images,
            is_learnt=self.layout.is_learnt,
            is_decoder=self.layout.is_decoder,
            is_bf16=self.layout.is_bf16,
        )

    def put_back(self) -> None:
        """Everything as before the first incident, but for the run's files."""
        self.run.ring.drain()
        self.run.ring.before_update()
        self._engine.put_back(self.run.engine)
        self.run.state.load_json(copy.deepcopy(self._state))
        self._history.__dict__.update(copy.deepcopy(self._past))
        repeated_steps = self._explaining._repeated
        repeated_steps.stop()
        repeated_steps._device_text = ""
        feed: Any = self.run.feed
        getattr(feed, "_part", feed)._newest = ([], ())

    def outcome(self, trial: Trial, key: str, said: str = NOTHING) -> Outcome:
        """The row of a trial, before anything came of it."""
        return Outcome(
            key=key,
            layout=self._name,
            kind=trial.kind,
            tuned=trial.tuned,
            group=trial.group,
            causes=trial.causes,
            said=said,
            noise=self.layout.noise,
            repeats_bits=self._explaining._repeated._is_exact,
        )

    def try_one(self, trial: Trial, key: str) -> Outcome:
        """Make one incident, and judge what the journal says of it. Collective."""
        began = time.monotonic()
        self.put_back()
        self._findings.clear()
        self._rates.ratio = None
        faults, known = self.run.machinery.faults, len(self._history.incidents)
        faults._faults = parse_faults(trial.faults or (_QUIET,))
        faults._markers = faults._markers.parent / f"trial{next(self._numbers)}"
        with self._tampering.of(trial), self._at_rate(trial):
            try:
                for _ in range(_MOST_STEPS.get(trial.causes[0], _MOST_OTHERS)):
                    self.run.loop.step()
                    if _is_over(_causes(self._history.incidents[known:]), trial):
                        break
            except RunnerError:
                pass  # the run would have ended here; the next trial has its state put back
        faults._faults = parse_faults((_QUIET,))
        outcome = self.outcome(trial, key)
        judge(outcome, trial, _causes(self._history.incidents[known:]))
        probes = [name for finding in self._findings for name in finding.numbers]
        outcome.tries = sum(name.startswith("E ") for name in probes)
        outcome.rate_ratio = self._rates.ratio if outcome.said == "rate" else None
        outcome.seconds = round(time.monotonic() - began, 2)
        if outcome.is_right and outcome.is_complete:
            outcome.detail = {}  # nothing that anybody would look up
        elif outcome.said != NOTHING:
            outcome.detail["probes"] = probes
            outcome.detail["meant"] = [trial.ranks, trial.positions, trial.modules, trial.step]
        return outcome

    @contextmanager
    def _at_rate(self, trial: Trial) -> Iterator[None]:
        """From the next update on the schedule has a mistake."""
        planner = self.run.loop._steps.planner
        schedule = planner.schedule
        object.__setattr__(planner, "schedule", _Mistaken(schedule, trial.rate, trial.growth))
        try:
            yield
        finally:
            object.__setattr__(planner, "schedule", schedule)


@dataclass(frozen=True)
class _Mistaken:
    """A schedule whose rate is too high from ``START`` on."""

    schedule: Any
    factor: float
    growth: float

    def rate(self, updates: int) -> float:
        rate: float = self.schedule.rate(updates)
        if updates < START:
            return rate
        return rate * self.factor * self.growth ** (updates - START + 1)


class _FinerRates:
    """Tries larger rates than the one that was named, to know how far it is from the largest that
    cures; ``ratio`` is that over the named one."""

    def __init__(self, rate_probe: RateProbe) -> None:
        self.ratio: float | None = None
        self._rate_probe: Any = rate_probe
        self._try_rates = rate_probe.try_rates
        self._rate_probe.try_rates = self._tried

    def _tried(
        self, record: Record, bad: StepSignals, *, without: Sequence[int], **more: Any
    ) -> RateResult:
        result = self._try_rates(record, bad, without=without, **more)
        if result.factor is None or result.control_cures or result.older_cures:
            return result
        rate_probe = self._rate_probe
        with rate_probe._stepper.aside():
            kept = HostCopy(rate_probe._engine)
            cured = [0]
            for power in range(1, _MOST_FINER + 1):
                factor = result.factor * _FINER**power
                course = Course(factor=factor, watches=bool(without))
                if factor < 1.0 and rate_probe._is_cured(record, bad.step, course):
                    cured.append(power)
            rate_probe._ring.before_update()
            kept.put_back(rate_probe._engine)
        self.ratio = _FINER ** max(cured)
        return result


def _causes(incidents: Sequence[Incident]) -> list[Mapping[str, Any]]:
    causes = [incident.detail.get("cause") for incident in incidents]
    return [cause for cause in causes if isinstance(cause, Mapping)]


def _is_over(causes: Sequence[Mapping[str, Any]], trial: Trial) -> bool:
    """Whether a cause is named."""
    return bool(causes) and trial.causes[0] != HEALTHY and causes[-1]["cause"] != "unclear"
