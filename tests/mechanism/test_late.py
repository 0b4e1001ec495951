"""Reading a step's numbers one step late is the same run as reading them at once.

The loop, the stepper, the judge, the ladder and the recovery are the real ones; the engine is
one number, and the losses are made up: any sequence of them must give the same end either way.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.checkpoint.jobs import JobProgress
from runner.checkpoint.protocol import CheckpointMetadata
from runner.config.schema import ScheduleConfig
from runner.data.cursor import BatchPlan, SampleStream
from runner.data.feed import MicroBatch, RankBatch
from runner.distributed.agreement import Ranks
from runner.engine.protocol import LocalSums, MicroStep, Sequences
from runner.fault.inject import Disturbance, FaultInjector
from runner.fault.spec import parse_faults
from runner.fault.wrap import wrap_engine, wrap_group, wrap_heart
from runner.health.heartbeat import Heartbeat
from runner.observe.journal import Journal
from runner.policy.decision import judge
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import Limits
from runner.policy.decision.skip_ledger import Ledger, Unreadable
from runner.policy.retention.records import (
    Reach,
    Record,
    State,
    Tier,
    abandoned_by_rollback,
    due_for_proof,
    with_state,
)
from runner.policy.schedule import Schedule
from runner.system.error import RunnerError
from runner.system.json_lines import Backlog
from runner.train.agreed_step import is_within
from runner.train.checkpoints import Checkpoints
from runner.train.evaluate import Inspection, Periodic, falls_due
from runner.train.loop import Loop
from runner.train.recovery import Recovery
from runner.train.run import RunJournal
from runner.train.save_schedule import FixedInterval, SaveSchedule
from runner.train.state import TrainState
from runner.train.step import Stepper, StepRules
from runner.train.step_guard import StepGuard
from runner.train.step_runner import StepPlanner, StepRunner
from tests.observed import observers
from tests.policy.steps import attempted, remedy_rules

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
BATCH = 4
STEPS = 48
KINDS = ("discard", "episode", "rollback", "rebaseline", "halt", "unreadable")


@dataclass(frozen=True)
class Story:
    """What happens: extra nats (or NaN) by position, in half-open stretches of positions."""

    stretches: tuple[tuple[int, int, float], ...] = ()
    unreadable: int | None = None
    unloadable: int | None = None
    stop_at: int | None = None
    faults: tuple[str, ...] = ()
    noise: float = 0.02
    checkpoint: int = 7
    evaluate: int = 0
    inspect: int = 0
    guarded: bool = True
    rules: dict[str, Any] = field(default_factory=dict)

    def extra(self, position: int) -> float:
        height = sum(h for first, stop, h in self.stretches if first <= position < stop)
        return height + random.Random(position).gauss(0, self.noise)


class OneNumber:
    """An engine whose state is one number and a count; its loss falls with the count."""

    device = CPU

    def __init__(self, story: Story) -> None:
        self.story = story
        self.weight = torch.ones((), dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.float64)
        self.num_computed = 0
        self._losses = torch.zeros(0)
        self._faults: list[Disturbance | None] = [None]

    def begin(self, faults: Iterator[Disturbance | None]) -> None:
        """What is done to the one micro-batch that comes next."""
        self._faults = list(faults)

    def accumulate(self, works: Sequence[MicroStep]) -> LocalSums:
        self.num_computed += 1
        [work] = works
        positions = [p for p in work.batch.positions if p is not None]  # type: ignore[attr-defined]
        level = 2.0 + torch.exp(-self.count / 10)
        losses = torch.stack([level + self.story.extra(p) for p in positions] or [level])
        [fault] = self._faults
        if fault is not None and (fault.nan_grad or fault.loss_scale is not None):
            losses = losses * math.nan
        self._losses = losses
        wild = (losses.sum() - 3.0 * len(losses)).abs()  # the norm feels a spike too
        return LocalSums(
            loss=losses.sum(),
            grad_square=(len(losses) + wild + self.weight.abs()).square(),
            nonfinite=(~torch.isfinite(losses)).any().double(),
            count=torch.tensor(float(sum(work.batch.counts())), dtype=torch.float64),  # type: ignore[attr-defined]
            sequences=Sequences(losses=(losses,), gradient_norms=()),
        )

    def apply(self, *, skip: torch.Tensor, grad_scale: torch.Tensor, learning_rate: float) -> None:
        moved = self.weight * 0.999 + learning_rate * self._losses.sum() / grad_scale.double()
        self.weight = torch.where(skip > 0, self.weight, moved)
        self.count = torch.where(skip > 0, self.count, self.count + 1)

    def replicated(self) -> tuple[int, list[torch.Tensor]]:
        return 0, []


class Batches:
    """In the feed's place."""

    def __init__(self, story: Story) -> None:
        self._unreadable = story.unreadable
        self._unloadable = story.unloadable

    def fetch(self, plan: BatchPlan, ledger: Ledger) -> RankBatch:
        failed = self._unloadable is not None and plan.start <= self._unloadable < plan.stop
        positions = tuple(None if failed else int(p) for p in plan.positions)
        nothing = torch.full((BATCH, 1), -100 if failed else 0)
        batch = MicroBatch(
            tokens=nothing,
            targets=nothing,
            segments=None,
            positions=positions,
            unreadable=tuple(
                Unreadable(rank=0, position=p, index=p, name="x", error="torn", refused=False)
                for p in positions
                if p is not None and p == self._unreadable
            ),
        )
        return RankBatch(
            micro_batches=(batch,), wait_seconds=0.0, failure="dead" if failed else None
        )

    def own_positions(self, plan: BatchPlan) -> list[int | None]:
        return [int(p) for p in plan.positions]


class Names:
    """In the data set's place."""

    def describe(self, index: int) -> str:
        return f"sample {index}"


@dataclass(frozen=True, kw_only=True)
class Saved:
    serial: int
    step: int
    cursor: int
    train_state: dict[str, Any]
    tier: Tier = Tier.disk
    weight: torch.Tensor
    count: torch.Tensor


class MemoryRing:
    """The ring's rules without a disk: a save is committed at once, and proven when it is due."""

    def __init__(self, engine: OneNumber) -> None:
        self.num_finished = 0
        self.records: list[Record] = []
        self.next_serial = 1
        self._engine = engine
        self._saved: dict[int, Saved] = {}

    @property
    def saved_step(self) -> int:
        return self.records[-1].step if self.records else -1

    uploads = None

    def is_on_its_way(self, step: int) -> bool:
        return step == self.saved_step

    def finish_save(self, is_late: Any) -> bool:
        return True

    def save(
        self, metadata: CheckpointMetadata, *, disk: bool = True, is_last: bool = False
    ) -> bool:
        serial, self.next_serial = self.next_serial, self.next_serial + 1
        self.records.append(
            Record(serial=serial, step=metadata.step, cursor=metadata.cursor, state=State.committed)
        )
        self._saved[serial] = Saved(
            serial=serial,
            step=metadata.step,
            cursor=metadata.cursor,
            train_state=dict(metadata.train_state),
            weight=self._engine.weight,
            count=self._engine.count,
        )
        return True

    def after_step(self, step: int, clean_streak: int, *, reach: Reach, may_prove: bool) -> None:
        for record in due_for_proof(
            self.records, step=step, clean_streak=clean_streak, clean_after=4
        ):
            self.records = with_state(self.records, record.serial, State.clean)

    def restore(self, candidates: Sequence[Record]) -> Saved:
        saved = self._saved[candidates[0].serial]
        self._engine.weight, self._engine.count = saved.weight, saved.count
        return saved

    def finish_proofs(self) -> None:
        """Nothing takes its time here."""

    def abandon_after(self, serial: int, *, reach: Reach) -> None:
        for record in abandoned_by_rollback(self.records, serial):
            self.records = with_state(self.records, record.serial, State.tainted)

    is_busy = False
    num_finished = 0

    def progress(self) -> JobProgress:
        """Which job this is about; one is over at every settlement."""
        return JobProgress((float(self.num_finished), 0.0), (self.num_finished,))

    def apply_progress(self, sums: Sequence[float], jobs: Sequence[int]) -> None:
        if jobs == (self.num_finished,):  # else of a job that is over
            assert sums[0] == self.num_finished, "told of a job that was over, taken for the next"
            self.num_finished += 1

    def drain(self, is_late: Any = None) -> bool:
        return True


class Proven:
    """The last checkpoint is clean, at no cost."""

    def fault(self, held_out: Any) -> None:
        return None


class Lines:
    """In the reporter's place: everything it was told, and how far the engine was by then."""

    def __init__(self, engine: OneNumber) -> None:
        self.lines: list[Any] = []
        self.computed: list[int] = []
        self._engine = engine

    def step(self, info: Any, verdict: Any, action: str, **more: Any) -> None:
        more["state"] = more["state"].to_json() if more["state"] else None
        self.lines.append(plain((asdict(info.signals), asdict(verdict), action, more)))
        self.computed.append(self._engine.num_computed)

    def line(self, info: Any, verdict: Any, action: str, **more: Any) -> Any:
        return lambda **rest: self.step(info, verdict, action, **more, **rest)

    def applied(self, state: Any, eval_loss: float | None) -> None:
        line, state.unreported = state.unreported, None
        line(state=state, eval_loss=eval_loss)

    def incident(self, incident: Incident) -> None:
        self.lines.append(told_by(incident))

    def stall(self, kind: str) -> Any:
        return contextlib.nullcontext()

    def stalled(self, kind: str, seconds: float) -> None:
        self.lines.append(("stalled", kind))

    def undo(self, to_step: int) -> None:
        self.lines.append(("undo", to_step))

    def metrics_bytes(self, *, durably: bool = True) -> int:
        return len(self.lines)


class Stop:
    """A request that comes while a certain batch is the newest one planned."""

    is_late = False

    def __init__(self, story: Story, stream: SampleStream) -> None:
        self._stop_at = story.stop_at
        self.newest_start = 0
        plan = stream.plan

        def watched(cursor: int, ledger: Ledger) -> BatchPlan:
            made = plan(cursor, ledger)
            self.newest_start = made.start
            return made

        stream.plan = watched  # type: ignore[method-assign]

    def is_short_for(self, seconds: float) -> bool:
        return False

    def is_advised(self) -> bool:
        return False

    @property
    def is_set(self) -> bool:
        return self._stop_at is not None and self.newest_start >= self._stop_at


@dataclass
class End:
    """All that must not depend on when the numbers are read."""

    how: str
    weights: str
    state: Any
    journal: list[Any]
    lines: list[Any]
    looked_at: str
    ring: list[Record]


def live(story: Story, folder: Path, *, late: bool) -> tuple[End, Lines]:
    """One whole run."""
    engine, ranks = OneNumber(story), Ranks(CPU)
    stream = SampleStream.of_one(
        num_samples=100_000, seed=1, held_out_share=0.01, global_size=BATCH
    )
    stop = Stop(story, stream)
    fast = {"window": 12, "min_history": 6, "level_steps": 4}
    changes = fast | {"cooldown_steps": 9, "drift_nats": 0.5} | story.rules
    rules = remedy_rules(**changes, enabled=story.guarded, batch=BATCH)
    state = TrainState(rules.guard)
    lines, ring = Lines(engine), MemoryRing(engine)
    journal = Journal([], told_to_skip=[], file=None, clock=lambda: 0.0)
    faults = FaultInjector(parse_faults(story.faults), rank=0, markers=folder)
    evaluated: list[Any] = []
    inspected: list[Any] = []
    backlog = Backlog(patience_seconds=1.0, ask_to_stop=str, from_first=ranks.from_first, say=str)
    parts: Any = SimpleNamespace(engine=engine, feed=Batches(story), dataset=Names())
    told: Any = lines
    run: Any = SimpleNamespace(
        group=SimpleNamespace(
            heart=Heartbeat(),
            stop=stop,
            stop_look=SimpleNamespace(note=bool, is_in_steps=False),
            monitor=SimpleNamespace(hears_notices=False),
            asked_to_stop=lambda: ["asked"],
        ),
        corpus=SimpleNamespace(stream=stream),
        ring=ring,
        journal=journal,
        history=journal.history,
        written=RunJournal(journal=journal, console=told),
        reporter=lines,
        backlog=backlog,
        observers=observers(),
    )
    stepper = Stepper(
        engine=wrap_engine(parts.engine, faults, parts.engine),
        feed=parts.feed,
        dataset=parts.dataset,
        ranks=wrap_group(ranks, faults),
        rules=StepRules(seed=0, clip=1.0, guarded=story.guarded, config_digest="", code=""),
        heart=wrap_heart(Heartbeat(), faults, run.ring),
    )
    recovery = Recovery(run, suspects=stepper.suspects, max_unreadable=3, rules=rules)
    saves = SaveSchedule(disk=FixedInterval(story.checkpoint), memory=None)
    periodic = Periodic(
        run,
        evaluate=lambda: evaluated.append(engine.weight.item()) or float(len(evaluated)),
        evaluate_every=story.evaluate,
        inspections=[
            Inspection(
                observer="",
                is_due=partial(falls_due, story.inspect),
                look=lambda updates: inspected.append((updates, engine.weight.item())),
            )
        ],
    )
    rates = Schedule(schedule=ScheduleConfig(warmup=5), peak=0.1, total=STEPS)
    planner = StepPlanner(run, rates.rate)
    steps = StepRunner(
        stepper,
        planner,
        known_discards=[],
        late=late,
        is_boundary=lambda updates: (
            updates >= STEPS or periodic.is_due(updates) or saves.is_due(updates)
        ),
    )
    proven: Any = Proven()
    loop = Loop(
        state=state,
        until=STEPS,
        steps=steps,
        guard=StepGuard(run, recovery=recovery, steps=steps, rules=rules),
        checkpoints=Checkpoints(run, schedule=saves, last=proven, rules=rules),
        periodic=periodic,
        reporter=run.reporter,
    )
    try:
        loop.run()
        how = "done"
    except RunnerError as error:
        how = f"{type(error).__name__}: {error}"
    end = End(
        how=how,
        weights=plain([engine.weight.item(), engine.count.item()]),
        state=plain(state.to_json()),
        journal=[told_by(incident) for incident in journal.history.incidents],
        lines=lines.lines,
        looked_at=plain([evaluated, inspected]),
        ring=ring.records,
    )
    return end, lines


def told_by(incident: Incident) -> Any:
    return plain(asdict(replace(incident, cost_seconds=0.0)))


def plain(value: Any) -> Any:
    """Compared as text, where NaN equals itself and every bit of a float shows."""
    return repr(value)


def same_either_way(story: Story, tmp_path: Path) -> tuple[End, Lines]:
    """Both ways; the late one's end."""
    made = [tmp_path / name for name in ("late", "at-once")]
    for folder in made:
        for marker in folder.glob("*"):
            marker.unlink()
    (late, told), (at_once, _) = (
        live(story, folder, late=is_late)
        for folder, is_late in zip(made, (True, False), strict=True)
    )
    assert late == at_once
    return late, told


HEIGHTS = st.sampled_from([math.nan, math.inf, 0.3, 0.35, 0.6, 5.0, 60.0, -0.5])
STRETCH = st.tuples(st.integers(0, STEPS * BATCH), st.integers(1, 40), HEIGHTS).map(
    lambda t: (t[0], t[0] + t[1], t[2])
)
FAULT = st.builds(
    "{}@step={},rank=0".format, st.sampled_from(["nan_grad", "nan_loss"]), st.integers(1, STEPS)
)
STORIES = st.builds(
    Story,
    stretches=st.lists(STRETCH, max_size=4).map(tuple),
    unreadable=st.none() | st.integers(0, STEPS * BATCH),
    unloadable=st.none() | st.none() | st.none() | st.integers(0, STEPS * BATCH),
    stop_at=st.none() | st.none() | st.integers(0, STEPS * BATCH),
    faults=st.lists(FAULT, max_size=2).map(tuple),
    noise=st.sampled_from([0.0, 0.02, 0.1]),
    checkpoint=st.sampled_from([5, 7, 10]),
    evaluate=st.sampled_from([0, 9]),
    inspect=st.sampled_from([0, 6]),
    guarded=st.sampled_from([True, True, True, False]),
    rules=st.fixed_dictionaries(
        {},
        optional={
            "persist": st.sampled_from([1, 2, 3]),
            "max_rollbacks": st.sampled_from([0, 1, 5]),
            "loss_floor": st.sampled_from([0.1, 0.4]),
            "margin": st.sampled_from([0, 2]),
        },
    ),
)
LEVEL = ((100, 10_000, 0.6),)
TOLD = {
    "clean": (Story(), set()),
    "evaluations": (Story(evaluate=5, inspect=3), set()),
    "one NaN": (Story(stretches=((100, 101, math.nan),)), {"discard", "episode"}),
    "a NaN at step 1": (Story(stretches=((0, 1, math.nan),)), {"discard", "episode"}),
    "a NaN before a boundary": (Story(faults=("nan_grad@step=7,rank=0",)), {"discard"}),
    "NaN after NaN": (
        Story(faults=("nan_grad@step=20,rank=0", "nan_loss@step=21,rank=0")),
        {"discard"},
    ),
    "poison": (Story(stretches=((100, 112, math.nan),)), {"discard", "rollback"}),
    "spike": (Story(stretches=((100, 104, 9.0),)), {"discard"}),
    # Under the limit of a single one.
    "two high in a row": (
        Story(stretches=((104, 113, 0.35),), noise=0.005, checkpoint=10),
        {"discard"},
    ),
    "level shift": (
        Story(stretches=LEVEL, rules={"drift_nats": 50.0}),
        {"discard", "rollback", "rebaseline"},
    ),
    "drift": (Story(stretches=LEVEL, rules={"loss_floor": 9.0}), {"rollback"}),
    "drift that settles": (
        Story(stretches=LEVEL, rules={"loss_floor": 9.0, "margin": 0}),
        {"rollback", "rebaseline"},
    ),
    "rate cut": (
        Story(stretches=((100, 170, math.nan),), rules={"max_rollbacks": 3}),
        {"discard", "rollback"},
    ),
    "halt at once": (
        Story(stretches=((100, 104, math.nan),), rules={"persist": 1, "max_rollbacks": 0}),
        {"halt"},
    ),
    "halt at a drift": (
        Story(stretches=LEVEL, rules={"loss_floor": 9.0, "max_rollbacks": 0}),
        {"halt"},
    ),
    "asked to stop": (Story(stop_at=90), set()),
    "asked to stop at a bad step": (
        Story(stop_at=100, stretches=((100, 108, math.nan),)),
        {"discard"},
    ),
    "unreadable": (Story(unreadable=90), {"unreadable"}),
    "unloadable": (Story(unloadable=90), set()),
    "guard off": (Story(guarded=False, stretches=((100, 104, 9.0),)), set()),
}


ENDS = {
    "halt": "Halted",
    "asked to stop": "Preempted",
    "unloadable": "RankError: loading samples failed: rank 0: dead",
}


@pytest.mark.parametrize("name", TOLD)
def test_a_story_ends_alike(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story, kinds = TOLD[name]
    if "drift" in name:  # and no spike, by the floor
        monkeypatch.setattr(judge, "_DRIFT_SLACK", 0.013)
        monkeypatch.setattr(judge, "_DRIFT_RISE", 0.022)
    end, _ = same_either_way(story, tmp_path)
    found = {kind for kind in KINDS if any(f"'kind': '{kind}'" in line for line in end.journal)}
    assert found >= kinds, end.journal
    assert name != "rate cut" or "'cut_factor': 0.5" in str(end.journal)
    assert end.how.startswith(ENDS.get(name.split(" at ")[0], "done")), end.how


def test_a_late_step_is_launched_before_the_one_before_is_read(tmp_path: Path) -> None:
    _, told = live(Story(checkpoint=10), tmp_path, late=True)
    ahead = [computed - number for number, computed in enumerate(told.computed, start=1)]
    # Read at once only where a checkpoint wants the state of just that step.
    assert ahead == [0 if step % 10 == 0 or step == STEPS else 1 for step in range(1, STEPS + 1)]
    _, told = live(Story(checkpoint=10), tmp_path, late=False)
    assert told.computed == list(range(1, STEPS + 1))


def test_a_step_in_vain_is_computed_once_more(tmp_path: Path) -> None:
    bad = Story(stretches=((100, 101, math.nan),), checkpoint=100)
    _, late = live(bad, tmp_path / "late", late=True)
    _, at_once = live(bad, tmp_path / "at-once", late=False)
    assert late.computed[-1] == at_once.computed[-1] + 1


NUMBERS = [0.0, -0.0, 1.5, 1e300, sys.float_info.max, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("limit", [0.0, 1.5, 1e300, math.inf])
@pytest.mark.parametrize("norm", [number for number in NUMBERS if not number < 0])
@pytest.mark.parametrize("loss", NUMBERS)
def test_the_device_and_the_host_agree_on_a_limit(loss: float, norm: float, limit: float) -> None:
    for limits in (Limits(loss=limit), Limits(grad_norm=limit), Limits(loss=1.5, grad_norm=limit)):
        numbers = (torch.tensor(number, dtype=torch.float64) for number in (loss, norm))
        told = is_within(limits, *numbers).item()
        assert told is not limits.exceeded(attempted(1, loss, norm))


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.full)])
def test_any_story_ends_alike(examples: int, tmp_path: Path) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(story=STORIES)
    def check(story: Story) -> None:
        same_either_way(story, tmp_path)

    check()
