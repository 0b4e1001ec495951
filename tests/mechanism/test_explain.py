"""Replays leave the state as it was, and the order of probes comes to the right name or to none."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.command.replay import _number, repeated_lines, replay_command
from runner.command.replay_again import NanWatch, _checkpoint_before
from runner.config.compose import compose
from runner.data.cursor import BatchPlan
from runner.distributed.agreement import Ranks
from runner.distributed.env import place_from
from runner.distributed.observers import Failure, ObservedRanks
from runner.engine.protocol import Engine, MicroStep
from runner.explain.case import Case
from runner.explain.explaining_guard import ExplainingGuard, ExplainRules
from runner.explain.probe import Bench, without_samples
from runner.explain.reading import Reading, SampleRow, Share, differing_ranks, noise_floor, usual
from runner.explain.replay import Replay
from runner.fault.inject import FaultInjector
from runner.fault.spec import parse_faults
from runner.health.heartbeat import Heartbeat
from runner.health.preemption import StopLook
from runner.observe.journal import Journal, read_journal
from runner.policy.decision.finding import Cause, Finding, Remedy, relative_difference
from runner.policy.decision.history import Incident
from runner.policy.decision.judge import Kind, Verdict
from runner.policy.decision.signals import Limits
from runner.policy.decision.skip_ledger import Ledger
from runner.run_dir.paths import RunDir
from runner.session import parts
from runner.session.corpus import open_dataset, open_feed, sample_stream
from runner.session.summary import collect_digest
from runner.system.error import ConfigError, RankError
from runner.system.json_lines import LineFile, read_lines
from runner.train.agreed_step import StepInfo
from runner.train.state import TrainState
from tests.observed import observers
from tests.policy.steps import attempted, guard_settings

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
SIZE = 8
LIMITS = Limits(loss=4.0, grad_norm=5.0)
PLAN = BatchPlan(positions=np.arange(SIZE), indices=np.arange(SIZE))


# -- on an engine of ours -------------------------------------------------------------------


@dataclass
class Real:
    """A bench on a real engine, and one step that it has computed."""

    engine: Engine
    bench: Bench
    stream: Any
    plan: BatchPlan
    batches: Any
    first: Reading

    @classmethod
    def of(cls, *overrides: str, faults: Any = None, updates: int = 3) -> Real:
        config = compose(
            [
                *("model=tiny", "compute.precision=fp32", "data=synthetic", "parallel=single"),
                *("data.workers=0", "batch.global_size=8"),
                *("batch.micro_size=4", *overrides),
            ]
        )
        place = place_from({})
        dataset = open_dataset(config)
        stream = sample_stream(config, dataset)
        feed = open_feed(config, dataset, stream, place, CPU)
        network = parts.blueprint(config, dataset)
        engine = parts.engine(config, network, place, CPU, faults)
        parts.give_twin(engine, config, network, place, faults)
        plan = stream.plan(0, Ledger())
        batches = feed.fetch(plan, Ledger()).micro_batches
        seeds = (1, 2)
        works = [MicroStep(batch=b, seed=s) for b, s in zip(batches, seeds, strict=True)]
        one = torch.ones(())
        for _ in range(updates):  # moments that are not zero
            engine.accumulate(works)
            engine.apply(skip=torch.zeros(()), grad_scale=one * 1000, learning_rate=1e-2)
        if faults is not None:
            faults.before_step(5)
        sums = engine.accumulate(works)
        engine.apply(skip=one, grad_scale=one, learning_rate=0.0)
        ranks = ObservedRanks(Ranks(CPU))
        group = SimpleNamespace(heart=Heartbeat(), stop_look=StopLook(lambda: False, ranks))
        run: Any = SimpleNamespace(
            engine=engine,
            feed=feed,
            corpus=SimpleNamespace(stream=stream),
            group=group,
            observers=SimpleNamespace(ranks=ranks),
        )
        bench = Bench(run, loss_floor=config.guard.loss_floor, is_compiled=False)
        first = bench.begin(batches, seeds, sums)
        return cls(engine, bench, stream, plan, batches, first)


def test_probes_leave_state_and_randomness_as_they_were() -> None:
    real = Real.of("model.dropout=0.1")
    bench, plan, batches, first = real.bench, real.plan, real.batches, real.first
    before = digest(real.engine), drawn()
    again = bench.compute(batches)
    assert again == first, "the same bits, dropout and all"
    assert bench.compute(batches, watched=True) == first, "whoever looks"
    assert bench.compute(bench.read(plan)) == first
    assert not any(bench.differs(batches, bench.read(plan)))
    known = bench.known(real.stream.held_out_indices(8))
    assert len(known.rows) == 8 and all(position < 0 for position in known.rows)
    gone = int(plan.positions[2])
    rest = bench.compute(without_samples(batches, {gone}))
    assert set(rest.rows) == set(first.rows) - {gone}
    assert {p: r.loss for p, r in rest.rows.items()}.items() <= {
        p: r.loss for p, r in first.rows.items()
    }.items(), "a sample's loss does not depend on its neighbours"
    assert rest.shares[0].count < first.shares[0].count
    wide = bench.compute_wider(batches)
    assert isinstance(wide, Reading) and wide != first, "in FP64 other bits"
    assert (
        relative_difference(wide.loss, first.loss) < 1e-5
        and relative_difference(wide.grad_norm, first.grad_norm) < 1e-4
    )
    assert bench.first_bad_module()[0] == "" and not bench.strayed_weights()
    assert (digest(real.engine), drawn()) == before
    assert bench.num_steps == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "module", ["blocks.0.attention", "blocks.1.ffn.up", "embedding", "norm", "blocks.1"]
)
def test_the_module_that_overflows_is_named(precision: str, module: str, tmp_path: Path) -> None:
    spec = parse_faults([f"overflow@step=5-9,module={module}"])
    faults = FaultInjector(spec, rank=0, markers=tmp_path)
    real = Real.of(f"compute.precision={precision}", faults=faults)
    assert real.first.nonfinite_ranks == (0,)
    assert real.bench.compute(real.batches, watched=True).nonfinite_ranks == (0,)
    wide = real.bench.compute_wider(real.batches)
    assert isinstance(wide, Reading) and not wide.nonfinite_ranks
    name, layers = real.bench.first_bad_module()
    assert name == module
    assert not math.isfinite(layers[module][0]) and math.isfinite(layers[module][1])


class InHalf(torch.nn.Module):
    """Does one operation in FP16 by itself, whatever it is given, and overflows there."""

    def __init__(self, vocab_size: int, scale: float = 1e6) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 8)
        self.inner = HalfScale(scale)
        self.head = torch.nn.Linear(8, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        result: torch.Tensor = self.head(self.inner(x))
        return result


class HalfScale(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(8, 8)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.mix(x).half() * self.scale
        result: torch.Tensor = scaled.to(x.dtype) / self.scale
        return result


def test_an_operation_that_the_model_does_in_fp16_itself() -> None:
    real = Real.of("model._target_=tests.mechanism.test_explain.InHalf", updates=0)
    assert real.bench.compute(real.batches, watched=True).nonfinite_ranks == (0,)
    wide = real.bench.compute_wider(real.batches)
    assert isinstance(wide, Reading) and not wide.nonfinite_ranks
    assert real.bench.first_bad_module()[0] == "inner", "between two modules: the one around them"


def test_an_update_can_be_made_in_the_wider_precision() -> None:
    """What the wider computation leaves is what the optimizer takes; to rounding the same."""
    ends = []
    for widens in (False, True):
        real = Real.of()
        works = [MicroStep(batch=b, seed=1) for b in real.batches]
        compute = real.engine.accumulate_wider if widens else real.engine.accumulate
        compute(works)
        one = torch.ones(())
        real.engine.apply(skip=one * 0, grad_scale=one * 1000, learning_rate=1e-2)
        ends.append({s.name: s.local.clone() for s in real.engine.shards()})
    apart_by = [(ends[0][name] - ends[1][name]).abs().max().item() for name in ends[0]]
    assert 0 < max(apart_by) < 1e-4


def digest(engine: Engine) -> str | None:
    return collect_digest(engine, Ranks(CPU), lambda: False)


def drawn() -> tuple[bytes, Any, Any]:
    """The random states of this process."""
    numbers = np.random.get_state()[1]  # type: ignore[index]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), tuple(numbers)


# -- made up ----------------------------------------------------------------------------------


@dataclass
class World:
    """What a computation of samples on ranks comes to; stands in for a :class:`Bench`.

    ``bad`` are positions whose loss is what it says; ``sick`` ranks all of whose samples are NaN;
    ``worse`` what a rank adds to each of its samples, which no sample shows by itself;
    ``skewed`` a rank that makes every fifth position worse and all others better;
    ``hidden`` groups that together give a gradient of weights that no sample's number tells of;
    ``pattern`` are positions that ``pattern_rank`` makes NaN, or the gradient of weights only;
    ``dice_of_rank`` a rank whose gradients of weights are bad in three of ten computations;
    ``groups`` are micro-batches, all of whose samples are bad where one of ``statistic`` is in it,
    or where most of it is padding;
    ``weights_only`` a rank whose weights' gradients are; ``passing`` is used up by the first
    computation; ``state`` is added to each loss;
    ``overflows`` as well, but not in the wider precision.
    """

    world_size: int = 2
    bad: Mapping[int, float] = field(default_factory=dict)
    size: int = SIZE
    known_level: float = 2.0
    hidden: list[set[int]] = field(default_factory=list)
    pattern: set[int] = field(default_factory=set)
    pattern_rank: int = 1
    groups: list[list[int]] = field(default_factory=list)
    statistic: set[int] = field(default_factory=set)
    is_pattern_hidden: bool = False
    dice_of_rank: int | None = None
    sick: int | tuple[int, ...] | None = None
    skewed: int | None = None
    worse: Mapping[int, float] = field(default_factory=dict)
    weights_only: int | None = None
    passing: list[int] = field(default_factory=list)
    state: float = 0.0
    noise: float = 0.0
    misread: set[int] = field(default_factory=set)
    one_host: bool = False
    overflows: float | None = None
    strayed: bool = False
    other_copy: bool = False
    applies_wider: bool = True
    num_steps: int = 0
    replaced: list[BatchPlan] = field(default_factory=list)  # the loader's samples of these plans
    is_filled: bool = False  # known samples are where others are left out
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def begin(self, *attempt: Any) -> Reading:
        batch = dict.fromkeys(range(self.size), 0)
        first = self._read(batch, shift=0)
        while self.dice_of_rank is not None and first.is_good(LIMITS):
            first = self._read(batch, shift=0)
        return first

    def compute(self, batches: Any, names: Any = None, *, watched: bool = False) -> Reading:
        self.num_steps += 1
        return self._read(batches, shift=0)

    @property
    def wider(self) -> str:
        return "FP64" if self.overflows is not None else ""

    def compute_wider(self, batches: Any) -> Reading | Failure:
        self.num_steps += 1
        kept, self.overflows = self.overflows, None
        reading = self._read(batches, shift=0)
        self.overflows = kept
        return reading

    def copies_differ(self) -> bool:
        return self.other_copy

    def strayed_weights(self) -> list[str]:
        return ["embedding.weight"] if self.strayed else []

    def first_bad_module(self) -> tuple[str, dict[str, list[float]]]:
        return "blocks.1.ffn", {"blocks.1.ffn": [math.inf, 3.0]}

    def rotated(self, plan: BatchPlan, *, without: Any = ()) -> Reading:
        self.num_steps += 1
        kept = [p for p in plan.positions.tolist() if p not in without]
        return self._read(dict.fromkeys(kept, 0), shift=1)

    def known(self, indices: Any, *, rank: int | None = None) -> Reading:
        self.num_steps += 1
        if rank is None:
            return self._read({-1 - int(i): 0 for i in indices}, shift=0)
        shift = int(indices[0] > indices[-1])  # in another order, ranks have other samples
        mine = {p: 0 for p in (-1 - indices).tolist() if (p + shift) % self.world_size == rank}
        return self._read(mine, shift=shift)

    def micro_batches(self, batches: Any) -> list[list[int]]:
        return self.groups or [[p] for p in batches]

    def among_known(self, batches: Any, positions: Any, indices: Any) -> Reading:
        self.num_steps, self.is_filled = self.num_steps + 1, True
        reading = self._read({p: fresh for p, fresh in batches.items() if p in positions}, shift=0)
        self.is_filled = False
        return reading

    def compute_of(self, batches: Any, rank: int, *, tokens: float) -> Reading:
        self.num_steps += 1
        mine = {p: fresh for p, fresh in batches.items() if p % self.world_size == rank}
        return replace(self._read(mine, shift=0), usual_loss=2.0)

    def read(self, plan: BatchPlan, *, shift: int = 0) -> Any:
        return Positions(dict.fromkeys(plan.positions.tolist(), 1))

    def differs(self, one: Any, other: Any) -> list[list[int]]:
        fresh = sum(one.values()) != sum(other.values())
        wrong = sorted(self.misread) if fresh else []
        return [[p for p in wrong if p % self.world_size == r] for r in range(self.world_size)]

    def all_readable(self, batches: Any) -> bool:
        return True

    def known_indices(self) -> Any:
        return np.arange(self.size)

    def replace_read(self, plan: BatchPlan, batches: Any) -> None:
        self.replaced.append(plan)

    def hosts(self) -> list[str]:
        return [f"node{0 if self.one_host else rank}" for rank in range(self.world_size)]

    def _is_nan(self, position: int, rank: int) -> bool:
        is_pattern = position in self.pattern and rank == self.pattern_rank
        sick = self.sick if isinstance(self.sick, tuple) else (self.sick,)
        return (is_pattern and not self.is_pattern_hidden) or rank in sick

    def _is_with_the_guilty(self, position: int, batch: Mapping[int, int]) -> bool:
        group = set(next((group for group in self.groups if position in group), ()))
        is_padded = (
            bool(group) and not self.is_filled and 2 * len(group & batch.keys()) < len(group)
        )
        return is_padded or bool(self.statistic & group & batch.keys())

    def _read(self, batch: Mapping[int, int], shift: int) -> Reading:
        ranks, rows = self.world_size, {}
        passing = self.passing.pop(0) if self.passing else None
        for position, fresh in batch.items():
            rank = (position + shift) % ranks
            usual = 2.0 if position >= 0 else self.known_level
            level = self.bad.get(position, usual + 0.01 * (position % 7)) + self.state
            level += self.overflows or 0.0
            if position in self.misread and not fresh:
                level = 9.0
            level += self.worse.get(rank, 0.0)
            if rank == self.skewed:
                level = 0.0 if position < 0 or position % 5 else 90.0
            if self._is_with_the_guilty(position, batch):
                level = 60.0
            if rank == passing or self._is_nan(position, rank):
                level = math.nan
            level *= 1 + self.noise * self.dice.uniform(-1, 1)
            rows[position] = SampleRow(rank, level * 10, level, 10)
        shares = []
        for rank in range(ranks):
            own = [row for row in rows.values() if row.rank == rank]
            loss = sum(row.loss for row in own)
            square = sum(row.norm**2 for row in own) * 100
            square += 1e12 * sum(not rank and group <= rows.keys() for group in self.hidden)
            of_pattern = self.pattern & rows.keys() if rank == self.pattern_rank else set()
            if self.is_pattern_hidden and any(rows[p].rank == rank for p in of_pattern):
                square = 1e12
            if rank == self.dice_of_rank and own and self.dice.random() < 0.3:
                square *= self.dice.choice((1e6, 1e8, 1e10))
            if rank == self.weights_only and own:
                square = math.nan
            is_bad = not math.isfinite(loss)
            shares.append(Share(loss=loss, square=square, nonfinite=is_bad, count=10.0 * len(own)))
        return Reading(rows=rows, shares=shares, tokens=10.0 * self.size)


class Positions(dict[int, int]):
    """Of a batch; what is read again has ones. Stands in for micro-batches."""


@pytest.fixture(autouse=True)
def positions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runner.explain.culprits.without_samples",
        lambda batches, gone: Positions({p: f for p, f in batches.items() if p not in gone}),
    )


def explained(
    world: World, most_steps: int = 10, checkpoint: World | None = None, limits: Limits = LIMITS
) -> Finding:
    """
    Args:
        checkpoint: the same computations with the weights of the clean checkpoint.
    """
    bench: Any = world
    replay = Replay(bench)
    nothing: Any = None
    batches: Any = Positions(dict.fromkeys(range(world.size), 0))
    everybody = np.arange(world.size)
    plan = BatchPlan(positions=everybody, indices=everybody)
    later = BatchPlan(positions=everybody + world.size, indices=everybody + world.size)

    def earlier(compute: Callable[[], Sequence[Reading]]) -> Sequence[Reading] | None:
        assert checkpoint is not None
        now = world.state, world.bad
        world.state, world.bad = checkpoint.state, checkpoint.bad
        readings = compute()
        world.state, world.bad = now
        return readings

    case = Case(
        plan=plan,
        batches=batches,
        seeds=(),
        sums=nothing,
        limits=limits,
        later=later,
        most_steps=most_steps,
        earlier=None if checkpoint is None else earlier,
    )
    found = replay.explain(case)
    assert found.steps == world.num_steps <= most_steps
    assert bool(world.replaced) is (found.cause is Cause.misread)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_what_is_not_there_again_is_transient(ranks: int, noise: float) -> None:
    found = explained(World(world_size=ranks, passing=[ranks - 1], noise=noise))
    assert (found.cause, found.remedy) == (Cause.transient, Remedy.redo)
    assert found.ranks == (ranks - 1,) and found.hosts == (f"node{ranks - 1}",)
    assert found.is_tried and found.steps == 3


def test_what_comes_and_goes_is_not_called_transient() -> None:
    """A rank is named where it was that one each time, and no other."""
    found = explained(World(passing=[1, 9, 1, 9]))
    assert (found.cause, found.ranks) == (Cause.sticky, (1,))
    assert explained(World(passing=[1, 9, 1, 9], one_host=True)).remedy is Remedy.redo
    both = explained(World(passing=[1, 9, 0, 9]))
    assert both.cause is Cause.not_reproducible and both.remedy is Remedy.redo and not both.ranks
    late = explained(World(world_size=4, passing=[2, 2, 9, 9, 9, 2, 9]))
    assert (late.cause, late.ranks) == (Cause.sticky, (2,))


def of(*positions: int, at: float = 9.0) -> dict[int, float]:
    return dict.fromkeys(positions, at)


LEAVE, BACK = (Cause.sticky, Remedy.leave), (Cause.unclear, Remedy.go_back)
SKIP, AT_ONCE = (Cause.data, Remedy.skip), (Cause.sticky, Remedy.redo)
BAD: list[dict[int, float]] = [
    {3: math.nan}, {3: 60.0}, {0: 60.0, 5: math.nan}, {2: math.inf},
]  # fmt: skip
# The world; cause and remedy; the ranks and positions that are named.
NAMED: list[tuple[World, tuple[Cause, Remedy], tuple[int, ...], tuple[int, ...]]] = [
    # A rank that stays bad; where all are on one host nobody can leave.
    *(
        (
            World(world_size=ranks, sick=sick, noise=noise, one_host=bool(alone)),
            verdict,
            (sick,),
            (),
        )
        for ranks, sick in ((2, 0), (2, 1), (3, 2), (4, 1))
        for noise, alone, verdict in (
            (0.0, False, LEAVE),
            (1e-6, False, LEAVE),
            (0.0, True, AT_ONCE),
        )
    ),
    # Samples that are bad wherever they are computed; also by a network that knows the others by
    # heart.
    *(
        (World(world_size=ranks, bad=bad, noise=noise, known_level=level), SKIP, (), tuple(bad))
        for ranks in (1, 2, 4)
        for bad in BAD
        for noise, level in ((0.0, 2.0), (1e-6, 2.0), (0.0, 6.0))
    ),
    *((World(world_size=4, sick=sick), LEAVE, sick, ()) for sick in ((0, 1), (1, 2), (0, 3))),
    *((World(world_size=2 * sick, weights_only=sick), LEAVE, (sick,), ()) for sick in (1, 2)),
    # A sound rank has an odd sample.
    *((World(world_size=ranks, sick=1, bad={4: 2.9}), LEAVE, (1,), ()) for ranks in (2, 4)),
    # One rank alone has the known sample whose gradient is bad; with others it is good.
    *((World(world_size=ranks, hidden=[{0}, {-3}]), BACK, (), ()) for ranks in (2, 4)),
    *((World(state=state), BACK, (), ()) for state in (3.0, math.nan)),
    # As a spoilt row of an embedding does; samples behind, which lack its token, prove nothing.
    (World(bad={3: 60.0} | of(-2, -1, at=60.0)), BACK, (), ()),
    (World(sick=1, other_copy=True), (Cause.state, Remedy.go_back), (1,), ()),
    (World(passing=[1], noise=0.1), (Cause.not_reproducible, Remedy.ladder), (), ()),
    (World(misread={1, 3, 5}), (Cause.misread, Remedy.redo), (1,), (1, 3, 5)),
    # All are mildly bad: leaving out any makes the step good, and proves nothing.
    (
        World(size=32, bad=of(*range(32), at=4.05), known_level=3.9),
        (Cause.unclear, Remedy.ladder),
        (),
        (),
    ),
    # All that exceed the largest known sample by half a nat, and no other.
    (World(size=32, bad={p: 5.0 + 0.1 * p for p in range(20)}), SKIP, (), tuple(range(20))),
    # Half of the batch, the whole, and those behind it too.
    (World(bad=of(*range(4))), SKIP, (), tuple(range(4))),
    (World(bad=of(*range(8))), (Cause.data, Remedy.ladder), (), tuple(range(8))),
    (World(bad=of(*range(24))), (Cause.data_mix, Remedy.ladder), (), ()),
]


@pytest.mark.parametrize("row", NAMED, ids=map(str, range(len(NAMED))))
def test_what_is_named(row: tuple[World, Any, Any, Any]) -> None:
    world, verdict, ranks, positions = deepcopy(row)
    found = explained(world, most_steps=10 if world.size < 32 else 40)
    assert ((found.cause, found.remedy), found.ranks, found.positions) == (
        verdict,
        ranks,
        positions,
    ), found.why
    if verdict in (LEAVE, SKIP):
        assert found.hosts == tuple(f"node{rank}" for rank in ranks)
        assert found.is_tried or verdict is LEAVE


# 32 samples, of which some are bad in the gradient of weights alone: no sample stands out.
HIDDEN = [
    *[[{at}] for at in (0, 1, 7, 15, 16, 30, 31)],
    *[[{1, 2}], [{0, 31}], [{14, 17}]],
    *[[{3}, {20}], [{0}, {9}]],
]


@pytest.mark.parametrize("groups", HIDDEN, ids=str)
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_halving_finds_what_does_not_stand_out(
    groups: list[set[int]], ranks: int, noise: float
) -> None:
    world = World(world_size=ranks, size=32, hidden=groups, noise=noise)
    found = explained(world, most_steps=40)
    assert (found.cause, found.remedy) == (Cause.data, Remedy.skip), found
    assert found.positions == tuple(sorted(set().union(*groups))) and found.is_tried
    tries = sum(name.startswith("E") for name in found.numbers)
    assert tries <= 8 * len(groups) or len(groups[0]) == 2


def test_halving_needs_its_computations() -> None:
    found = explained(World(size=32, hidden=[{5}]), most_steps=8)
    assert found.cause is Cause.unclear and not found.positions
    assert any("halving" in words for words in found.not_tried)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("pattern", [{1}, {1, 4}])
def test_a_rank_that_fails_on_some_samples(ranks: int, hidden: bool, pattern: set[int]) -> None:
    """In other ranks' hands the samples are good: they are not at fault, also where no number of
    theirs tells and halving finds them."""
    world = World(world_size=ranks, pattern=pattern, is_pattern_hidden=hidden)
    found = explained(world, most_steps=40)
    assert (found.cause, found.ranks) == (Cause.sticky, (1,)), found.why
    assert not found.positions and "sometimes" not in found.why


def test_a_device_that_fails_at_times_is_no_numerics() -> None:
    """C is good by chance; of the same step in its own precision nothing can be concluded."""
    causes = []
    for seed in range(60):
        world = World(dice_of_rank=1, overflows=0.0, dice=random.Random(seed))
        found = explained(world)
        assert found.remedy in (Remedy.redo, Remedy.leave, Remedy.go_back), found.why
        assert not found.positions and not found.module and found.ranks in ((), (1,))
        causes.append(found.cause)
    assert Cause.numerics not in causes and Cause.data not in causes
    assert len(causes) > 10 and Cause.sticky in causes


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_makes_some_samples_better(ranks: int) -> None:
    """It follows the rank: no sample that stands out there does so on the next one."""
    found = explained(World(world_size=ranks, size=12, skewed=1))
    assert (found.cause, found.ranks) == (Cause.sticky, (1,))
    both = explained(World(world_size=ranks, size=12, skewed=1, bad={4: 90.0}))
    assert both.ranks in ((), (1,)), "never another one"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("most_steps", [10, 60])
def test_a_rank_on_which_each_sample_is_a_little_worse_is_named(
    ranks: int, most_steps: int
) -> None:
    """None stands out by half a nat, but each is worse there than on any other rank."""
    world = World(world_size=ranks, size=12 * ranks, worse={1: 0.45})
    limits = replace(LIMITS, loss=2.1)
    found = explained(world, most_steps=most_steps, limits=limits)
    assert (found.cause, found.ranks) == (Cause.sticky, (1,)), found.why
    weights = World(world_size=ranks, size=12 * ranks, state=0.45)
    found = explained(weights, most_steps=most_steps, limits=limits)
    assert found.cause is Cause.unclear and not found.ranks, found.why


@pytest.mark.parametrize("bad", [60.0, 900.0, math.nan])
@pytest.mark.parametrize("unusual", [2.9, 5.0])
def test_a_sample_that_is_only_unusual_is_not_named_with_the_bad_one(
    bad: float, unusual: float
) -> None:
    """It stands out against few known samples, and the step is good with it."""
    found = explained(World(bad={3: bad, 9: unusual}))
    is_far = not bad < 20 * (unusual - 2.06)
    assert found.positions == ((3,) if is_far else (3, 9)), found.why
    assert found.is_tried and found.remedy is Remedy.skip


@pytest.mark.parametrize("guilty", [{2}, {2, 5}, {4, 6}])
@pytest.mark.parametrize("most_steps", [10, 60])
def test_of_samples_that_depend_on_each_other_only_the_guilty_are_named(
    guilty: set[int], most_steps: int
) -> None:
    """A statistic of their micro-batch makes all of it stand out."""
    groups = [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15], [*range(16, 40)]]
    world = World(size=40, groups=groups, statistic=guilty)
    found = explained(world, most_steps=most_steps)
    assert set(found.positions) <= guilty, found.why
    assert found.positions or most_steps == 10, found.not_tried


@pytest.mark.parametrize("overflow", [math.inf, math.nan, 30.0])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("applies", [True, False])
def test_what_is_good_in_a_wider_precision_is_numerics(
    overflow: float, ranks: int, applies: bool
) -> None:
    world = World(world_size=ranks, overflows=overflow, applies_wider=applies)
    found = explained(world)
    assert (found.cause, found.module) == (Cause.numerics, "blocks.1.ffn")
    assert found.remedy is (Remedy.widen if applies else Remedy.ladder)
    assert found.is_tried and not found.ranks and not found.positions
    assert "layers" not in found.to_json() and found.layers


def test_a_step_near_its_limit_is_no_numerics() -> None:
    """A hair's breadth between two precisions proves nothing, nor does a weight that is none."""
    hard = World(bad={p: 4.05 for p in range(SIZE)}, overflows=0.0)
    assert explained(hard).cause is not Cause.numerics
    near = World(bad=dict.fromkeys(range(SIZE), 3.98), overflows=0.05)
    assert explained(near).cause is not Cause.numerics
    flipped = explained(World(overflows=math.inf, strayed=True))
    assert flipped.cause is not Cause.numerics and not flipped.module


@pytest.mark.parametrize("bad", [{3: 60.0}, {3: math.nan}, {3: 60.0, 5: 70.0}])
def test_samples_that_are_bad_with_these_weights_only_are_no_culprits_yet(
    bad: dict[int, float],
) -> None:
    """Known samples may still be good while weights become bad."""
    found = explained(World(bad=bad), checkpoint=World(state=0.3))
    assert (found.cause, found.remedy) == (Cause.unclear, Remedy.go_back)
    assert not found.positions and "fallback" not in found.to_json()
    assert found.fallback is not None and found.fallback.positions == tuple(sorted(bad))
    known = explained(World(bad=bad), checkpoint=World(state=0.3, bad=bad))
    assert (known.cause, known.remedy, known.fallback) == (Cause.data, Remedy.skip, None)
    few = explained(World(bad=bad), 5, checkpoint=World(bad=bad))
    assert few.cause is Cause.data and "no computation is left" in few.not_tried[-1]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", '{"version": 1}', '{"version": 2, "finding": {}, "probes": {}}',
        '{"version": 1, "finding": [], "probes": {}, "step": 1}', "[" * 100_000,
        '{"version": 1, "finding": {}, "probes": {}, "step": -1}', '{"version": NaN}',
    ],
)  # fmt: skip
def test_evidence_that_nobody_wrote_is_refused_in_words(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_evidence(tmp_path, text)
    assert replay_fails(tmp_path).startswith("incident 3 cannot be read: ")


def test_evidence_is_shown_without_what_a_terminal_acts_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "has no evidence" in replay_fails(tmp_path)
    finding = {"cause": "\x1b[2J", "ranks": ["\x1b"], "steps": "\n\n", "positions": 3}
    told = {"version": 1, "step": 3, "finding": finding, "probes": {"A\x1b": {}, "B": 7}}
    write_evidence(tmp_path, json.dumps(told))
    assert replay_command([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "incident 3, step 3" in shown
    assert "there are 3" in replay_fails(tmp_path, "--incident", "4")


def test_a_checkpoint_that_was_saved_again_is_later_than_the_incident(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a rollback steps 20 and 30 were saved once more, when the journal had more lines."""
    one: Any = SimpleNamespace
    entries = [
        one(
            record=one(step=step, cursor=step * 8, state=None, serial=serial),
            manifest=one(journal_lines=lines),
        )
        for serial, step, lines in ((1, 10, 1), (2, 20, 1), (5, 20, 4), (6, 30, 4))
    ]
    monkeypatch.setattr(CheckpointDirectory, "entries", lambda self: (entries, []))
    assert _checkpoint_before(RunDir(tmp_path), 2, 38, 300) is entries[1]
    assert _checkpoint_before(RunDir(tmp_path), 4, 38, 300) is entries[3]
    with pytest.raises(ConfigError, match="no checkpoint from before step 38 is left"):
        _checkpoint_before(RunDir(tmp_path), 0, 38, 300)


@pytest.mark.parametrize("told", [{}, {"samples": []}, {"samples": ["x"]}, {"samples": None}])
def test_evidence_without_its_samples_is_not_computed_again(
    tmp_path: Path, told: dict[str, Any]
) -> None:
    tree = {"version": 1, "step": 3, "finding": {"cause": "data"}, "probes": {}, **told}
    write_evidence(tmp_path, json.dumps(tree))
    why = replay_fails(tmp_path, "--incident", "3", "--", "steps=3")
    assert why.startswith("incident 3: its evidence has no step and samples ("), why


def test_numbers_that_no_double_holds_are_shown() -> None:
    assert _number(10**400) == "NaN or Inf" and _number(2.5) == "2.5"


def write_evidence(out: Path, text: str) -> None:
    folder = out / "explanations" / "000003"
    folder.mkdir(parents=True)
    (folder / "incident.json").write_text(text)


def replay_fails(out: Path, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        replay_command([str(out), *more])
    return str(caught.value)


LADDER = Verdict(kind=Kind.non_finite, reason="of the ladder", onset_step=0, onset=0)


@dataclass
class Explaining:
    """A guard that explains, whose replays find ``finding`` each time."""

    finding: Finding
    file: Path
    in_all: int = 1000
    persist: int = 3
    printed: list[str] = field(default_factory=list)
    causes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts: Any = SimpleNamespace(
            explain=lambda case: self.finding,
            handle=self.decides,
            stall=lambda kind: nullcontext(),
            step=lambda *args, **more: None,
            incident=lambda line: self.printed.append(line.kind),
            is_following=False,
            blames_device=lambda finding: finding,
            newest=SimpleNamespace(fetched=SimpleNamespace(micro_batches=()), seeds=(), sums=None),
        )
        lines = LineFile(self.file, length=0, check=lambda: None)
        journal = Journal([], told_to_skip=[], file=lines)

        def report(line: Incident) -> None:
            journal.add(line)
            parts.incident(line)

        run: Any = SimpleNamespace(
            journal=journal,
            history=journal.history,
            written=SimpleNamespace(report=report),
            reporter=parts,
            stepper=parts,
            observers=observers(),
            corpus=SimpleNamespace(dataset=None),
            group=SimpleNamespace(is_first=False),
            lease=SimpleNamespace(number=4, check=lambda: None),
        )
        planner: Any = SimpleNamespace(batch=lambda cursor: PLAN)
        guard = guard_settings(persist=self.persist)
        rules = ExplainRules(guard=guard, an_incident=10, in_all=self.in_all)
        self.guard = ExplainingGuard(rules, run, parts, planner, replay=parts, repeated_steps=parts)

    def decides(self, info: StepInfo, state: TrainState) -> Verdict:
        self.causes.append(info.cause)
        return LADDER

    def meets(self, step: int, **more: Any) -> Verdict | None:
        """A bad step; the ladder's verdict where it decides."""
        signals = attempted(step, loss=math.nan, gated=True, **more)
        state = TrainState(guard_settings())
        return self.guard.handle(StepInfo(signals=signals, batch=PLAN), state)


def test_a_start_ends_for_a_device_that_stays_bad(tmp_path: Path) -> None:
    """As a crash of its host, which the supervisor then leaves out."""
    finding = Finding(
        cause=Cause.sticky, remedy=Remedy.leave, why="it is", ranks=(1,), hosts=("node1",), steps=3
    )
    path = tmp_path / "journal.jsonl"
    explaining = Explaining(finding, path)
    with pytest.raises(RankError, match="hardware, sticky: it is"):
        explaining.meets(20)
    (line,) = read_lines(path)[0]
    assert explaining.printed == ["crash"] and (line["kind"], line["ranks"]) == ("crash", [1])
    detail = line["detail"]
    assert (detail["cause"], detail["host"], detail["incarnation"]) == ("hardware", "node1", 4)
    assert read_journal(path)[0] == [line]


PASSING = Finding(cause=Cause.transient, remedy=Remedy.redo, why="it was", steps=7)


def test_one_step_is_redone_four_times_at_most(tmp_path: Path) -> None:
    """Then the ladder decides: a fault that comes each time is not transient."""
    explaining = Explaining(PASSING, tmp_path / "journal.jsonl")
    assert [explaining.meets(20) for _ in range(6)] == [None] * 4 + [LADDER] * 2
    assert explaining.meets(21) is None


def test_the_ladder_decides_once_the_budget_of_replays_is_spent(tmp_path: Path) -> None:
    explaining = Explaining(PASSING, tmp_path / "journal.jsonl", in_all=30)
    verdicts = [explaining.meets(step) for step in range(20, 25)]
    assert verdicts == [None, None, None, LADDER, LADDER], "3 x 7 of 30, and one may take 10"


STAYS = Finding(
    cause=Cause.sticky, remedy=Remedy.redo, why="it is", ranks=(1,), hosts=("node1",), steps=7
)


@pytest.mark.parametrize("persist", [1, 3, 8, 50])
def test_the_ladder_is_told_of_a_device_that_stays_bad(persist: int, tmp_path: Path) -> None:
    """Also where ``guard.persist`` is more than how often a step is redone."""
    explaining = Explaining(STAYS, tmp_path / "journal.jsonl", persist=persist)
    redone = min(persist, 4) - 1
    assert [explaining.meets(20) for _ in range(redone + 1)] == [None] * redone + [LADDER]
    (cause,) = explaining.causes
    assert (cause["cause"], cause["ranks"]) == ("hardware, sticky", [1])


def test_a_device_proven_bad_is_still_bad_when_the_budget_is_spent(tmp_path: Path) -> None:
    explaining = Explaining(STAYS, tmp_path / "journal.jsonl", in_all=23, persist=3)
    assert [explaining.meets(step) for step in (20, 20, 21, 21)] == [None, None, LADDER, LADDER]
    assert [cause["hosts"] for cause in explaining.causes] == [["node1"]] * 2, "step by step"
    assert explaining.meets(40) is LADDER and explaining.causes[-1] is None, "not for ever"


def test_a_batch_without_a_counted_label_is_named_without_a_probe(tmp_path: Path) -> None:
    explaining = Explaining(PASSING, tmp_path / "journal.jsonl")
    assert explaining.meets(20, tokens=0) is LADDER, "no probe: it would find PASSING"
    (cause,) = explaining.causes
    assert cause["cause"] == "data" and "no label of these samples counts" in cause["why"]
    assert explaining.meets(21, tokens=0, nonfinite_ranks=1) is None, "a fault all the same"


@pytest.mark.parametrize("unit", [0.01, 1.0, 100.0])
def test_samples_stand_out_in_the_units_of_the_guard(unit: float) -> None:
    rows = {-1 - n: SampleRow(0, unit * (2.0 + 0.01 * n), 1.0, 1) for n in range(4)}
    level = usual(Reading(rows=rows, shares=(), tokens=4.0, unit=unit))
    assert not level.stands_out(SampleRow(0, unit * 2.4, 1.0, 1))
    assert level.stands_out(SampleRow(0, unit * 2.7, 1.0, 1))
    wide = {-1 - n: SampleRow(0, unit * (2.0 + 4 * n), 1.0, 1) for n in range(4)}
    level = usual(Reading(rows=wide, shares=(), tokens=4.0, unit=unit))
    assert level is not None and not level.stands_out(SampleRow(0, unit * 15.0, 1.0, 1)), (
        "as known ones"
    )


def test_two_that_are_both_not_finite_are_the_same() -> None:
    assert (
        relative_difference(math.nan, math.inf) == 0.0
        and relative_difference(1.0, math.nan) == math.inf
    )
    assert relative_difference(2.0, 1.0) == 0.5 and relative_difference(0.0, 0.0) == 0.0


def test_a_rank_is_named_by_its_own_numbers_only() -> None:
    world = World(world_size=2)
    good = [world.begin() for _ in range(2)]
    assert noise_floor(good) == 0.0
    summed = replace(good[0], shares=[replace(s, square=s.square * 9) for s in good[0].shares])
    assert differing_ranks(summed, good, 0.0) == set()


def test_a_replay_does_not_clear_weights_that_were_spoilt_after_its_checkpoint() -> None:
    for cause, words in (("state corrupted", "spoilt later"), ("hardware, sticky", "weights nor")):
        evidence = {"finding": {"cause": cause, "why": ""}, "step": 33}
        assert words in repeated_lines(1, evidence, 20, None)[-1]


def test_the_operation_that_made_a_nan_is_named() -> None:
    with NanWatch() as forward:
        made = torch.log(torch.tensor([-1.0])) + 1
    assert made.isnan() and forward.operation.startswith("aten.log.default in test_the_operation")
    at_zero = torch.zeros(3, requires_grad=True)
    with NanWatch() as backward:
        at_zero.square().sum().sqrt().backward()
    assert at_zero.grad is not None and at_zero.grad.isnan().all()
    assert "(PowBackward0), of an infinite argument" in backward.operation
    assert "(SqrtBackward0)" in backward.operation


def test_what_is_meant_to_be_infinite_or_nan_is_not_named() -> None:
    with NanWatch() as watch:
        logits = torch.randn(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf)
        logits.softmax(-1).sum()
        torch.full((2,), torch.nan)
        torch.empty(8).resize_(16)
    assert watch.operation == ""
