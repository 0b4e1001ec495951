"""Every engine, through the real feed, stepper and schedule, against the formulas; and dropout.

A fault that Adam forgives (a gradient divided by too much) shows in the norm, in clipping and in
the moments. All rows of a number of ranks run in one process group.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from dataclasses import dataclass, replace

import pytest
import torch

from runner.checkpoint.jobs import JobProgress
from runner.config.schema import (
    BatchConfig,
    ComputeConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    OptimKind,
    ParallelConfig,
    ParallelKind,
    Precision,
    RunConfig,
    ScheduleConfig,
)
from runner.data.cursor import BatchPlan
from runner.data.dataset import Dataset, Sample
from runner.data.feed import Feed
from runner.distributed.agreement import Ranks
from runner.distributed.env import RankEnv, place_from
from runner.distributed.rendezvous import end_group, start_group
from runner.engine.protocol import Engine
from runner.health.heartbeat import Heartbeat
from runner.model.decoder import DecoderShape
from runner.policy.decision.signals import Bounds, Limits
from runner.policy.decision.skip_ledger import Ledger
from runner.session import parts
from runner.session.corpus import open_feed, sample_stream
from runner.session.parts import schedule
from runner.system.process import die_with_parent
from runner.train.step import InFlightStep, Stepper, StepPlan, StepRules
from tests import warm
from tests.reference import Documents, Reference, Trained, is_bf16_only
from tests.rows import full_but

CPU = torch.device("cpu")
STEPS = 10
NEAR = 1e-5
# In BF16 the last bit of one activation may turn with the order of a sum, and all gradients before
# it change by a rounding. One step of a row may differ so; the next goes on from the run's state.
ONE_ROUNDING = 2**-8
OPEN = Bounds(usual=Limits(), after_high=Limits())
# Seven sequences in micro-batches of two: no number of ranks divides them but one.
GLOBAL, MICRO = 7, 2
ENGINES = {
    1: ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"),
    2: ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"),
    3: ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"),
    4: ("hsdp",),
}
OPTIMIZERS = ("adamw", "muon", "lion", "sgd", "Adafactor", "NAdam")
# AdamW, element by element as most are; Muon, of matrices as Adafactor is.
ALWAYS_ALIKE = ("adamw", "muon")
AMONG_RANKS = 1.5e-6  # ten times the largest deviation on two and three ranks from one (Muon)
VARIANTS = ("free", "clipped", "sometimes", "penalised", "at once", "frozen", "dropout")


@dataclass(frozen=True)
class Row:
    """One engine under one set of settings; ``name`` is how a launched rank is told of it."""

    engine: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.engine}:{self.variant}"

    def config(self) -> RunConfig:
        kind = ParallelKind(self.engine)
        config = RunConfig(
            seed=5,
            steps=STEPS,
            model=ModelConfig(
                dim=12,
                layers=2,
                heads=3,
                kv_heads=1,
                ffn_dim=10,
                init_std=0.2,
                tied_head=False,
                qk_norm=True,
            ),
            compute=ComputeConfig(
                precision=Precision.bf16 if is_bf16_only(kind) else Precision.fp32
            ),
            data=DataConfig(seq_len=8, workers=0, held_out=0.0),
            batch=BatchConfig(global_size=GLOBAL, micro_size=MICRO),
            # Of the parameters' norm a part each: decay, rate, and epsilon, all to be seen.
            optim=OptimConfig(lr=0.01, weight_decay=0.3, eps=1e-3, clip=0.0),
            parallel=ParallelConfig(kind=kind),
            schedule=ScheduleConfig(warmup=3, floor=0.2),
        )
        if kind is ParallelKind.zero3:
            # By DeepSpeed's own threshold all of this small model would stay whole.
            small = {"zero_optimization": {"stage3_param_persistence_threshold": 20}}
            config.parallel.deepspeed = small
        if kind is ParallelKind.hsdp:
            config.parallel.shard_size = 2 if int(os.environ.get("WORLD_SIZE", "1")) == 4 else 1
        return self._varied(config)

    def _varied(self, config: RunConfig) -> RunConfig:
        if self.variant == "clipped":
            config.optim.clip = 0.1  # below every norm
        elif self.variant == "sometimes":
            config.optim.clip = 1.8
        elif self.variant == "penalised":
            config.model.z_loss = 0.05
            config.model.tied_head = True
        elif self.variant == "at once":
            config.parallel.reduce_each_micro_batch = False
            config.batch.micro_size = 1
            config.optim.clip = 0.1
        elif self.variant == "frozen":
            config.compute.frozen = ["embedding", "query.weight"]
            config.optim.clip = 0.1
        elif self.variant == "dropout":
            config.model.dropout = 0.5
        elif self.variant in OptimKind.__members__:
            config.optim.kind = OptimKind[self.variant]
        elif self.variant in OPTIMIZERS:
            config.optim = OptimConfig(_target_=f"torch.optim.{self.variant}", lr=0.01)
        return config


def rows(ranks: int) -> list[tuple[Row, bool]]:
    """All rows on so many ranks, and whether they are always run."""
    always = {
        1: {"single:clipped", "single:dropout"},
        2: {
            *("fsdp:clipped", "fsdp:dropout", "ddp:sometimes"),
            *("zero1:clipped", "zero2:dropout", "zero3:sometimes"),
        },
        3: {"fsdp:sometimes", "fsdp:at once", "ddp:dropout", "hsdp:penalised"},
        4: set[str](),
    }[ranks]
    made = [Row(engine, variant) for engine in ENGINES[ranks] for variant in VARIANTS]
    of_optimizers = [(Row("fsdp", n), n in ALWAYS_ALIKE) for n in OPTIMIZERS if ranks < 4]
    return [(row, row.name in always) for row in made if is_possible(row)] + of_optimizers


def is_possible(row: Row) -> bool:
    """DeepSpeed always reduces each micro-batch."""
    return not (row.engine.startswith("zero") and row.variant == "at once")


CASES = [
    pytest.param(
        ranks, row.name, marks=() if always else pytest.mark.full, id=f"{ranks}-{row.name}"
    )
    for ranks in ENGINES
    for row, always in rows(ranks)
    if row.variant not in OPTIMIZERS
]


# What each rank runs


@dataclass
class Parts:
    """A run without its ring, judge and files."""

    config: RunConfig
    shape: DecoderShape
    dataset: Dataset
    engine: Engine
    feed: Feed
    stepper: Stepper

    @classmethod
    def build(cls, config: RunConfig, dataset: Dataset, place: RankEnv) -> Parts:
        stream = sample_stream(config, dataset)
        shape = parts.model_shape(config, dataset)
        engine = parts.engine(config, parts.decoder_blueprint(config, shape), place, CPU)
        feed = open_feed(config, dataset, stream, place, CPU)
        stepper = Stepper(
            engine=engine,
            feed=feed,
            dataset=dataset,
            ranks=Ranks(CPU),
            rules=StepRules(
                seed=config.seed, clip=config.optim.clip, guarded=True, config_digest="", code=""
            ),
            heart=Heartbeat(),
        )
        return cls(config, shape, dataset, engine, feed, stepper)

    def plans(self, number: int) -> list[BatchPlan]:
        """The first batches of the run."""
        stream, cursor, found = sample_stream(self.config, self.dataset), 0, []
        for _ in range(number):
            found.append(stream.plan(cursor, Ledger()))
            cursor = found[-1].stop
        return found

    def launch(self, plan: BatchPlan, *, step: int, rate: float) -> InFlightStep:
        step_plan = StepPlan(
            batch=plan,
            step=step,
            bounds=OPEN,
            learning_rate=rate,
            stop=False,
            keeps_lines=False,
            progress=JobProgress((), ()),
            decisions="",
        )
        return self.stepper.launch(step_plan, Ledger())


def difference(row: Row, place: RankEnv) -> str:
    """How the engine's ten steps differ from the reference's; empty where they do not."""
    config = row.config()
    data = Documents(vocab_size=13, seq_len=config.data.seq_len)
    own = Parts.build(config, data, place)
    reference = Reference(config, own.shape, data, place.world_size)
    rates = schedule(config.schedule, peak=config.optim.lr, steps=config.steps)
    told, expected, found, uneven, turned = [], [], [], False, 0
    is_bf16 = is_bf16_only(config.parallel.kind)
    for updates, plan in enumerate(own.plans(STEPS)):
        pending = own.launch(plan, step=updates + 1, rate=rates(updates))
        signals = own.stepper.read(pending).signals
        told.append(
            Trained(
                loss=signals.loss,
                grad_norm=signals.grad_norm,
                rate=rates(updates),
                tokens=signals.tokens,
            )
        )
        expected.append(reference.step(plan.indices.tolist()))
        counts = [sum(batch.counts()) for batch in pending.fetched.micro_batches]
        uneven = uneven or len({n for of in Ranks(CPU).gather(counts) for n in of}) > 1
        if is_bf16 or updates == STEPS - 1:
            differing = state_differs(own, reference)
            is_rounded = is_bf16 and not turned and not state_differs(own, reference, ONE_ROUNDING)
            if differing and is_rounded:
                differing, turned = [], updates + 1
            found += differing
            reference.take(
                {shard.name: own.engine.full(shard.name) for shard in own.engine.shards()}
            )
    assert uneven, "the micro-batches have equally many tokens: nothing is seen of their weights"
    found += [
        f"step {step} {key} {getattr(mine, key)!r}, not {getattr(theirs, key)!r}"
        for step, (mine, theirs) in enumerate(zip(told, expected, strict=True), start=1)
        for key in ("tokens", "loss", "grad_norm", "rate")
        if not is_near(
            getattr(mine, key), getattr(theirs, key), ONE_ROUNDING if step == turned else NEAR
        )
    ]
    return "; ".join([*found, *clipping(config, expected)][:6])


def is_near(mine: float, theirs: float, near: float) -> bool:
    return abs(mine - theirs) <= near * abs(theirs)


def clipping(config: RunConfig, told: list[Trained]) -> list[str]:
    """Complaints where the row is not what it is for."""
    clip = config.optim.clip
    clipped = sum(one.grad_norm > clip for one in told)
    if clip == 1.8 and not 0 < clipped < STEPS:
        return [f"{clipped} of {STEPS} steps were clipped, not some"]
    if clip == 0.1 and clipped < STEPS:
        return [f"{clipped} of {STEPS} steps were clipped, not all"]
    return []


def state_differs(own: Parts, reference: Reference, near: float = NEAR) -> list[str]:
    """Of each tensor, by the norm of the difference. Collective."""
    expected = reference.state()
    mine = {shard.name: own.engine.full(shard.name) for shard in own.engine.shards()}
    if mine.keys() != expected.keys():
        return [f"other names: {sorted(mine.keys() ^ expected.keys())}"]
    found = []
    for name, tensor in mine.items():
        gap = float((tensor.double() - expected[name]).norm() / expected[name].norm())
        if not gap <= near:
            found.append(f"{name} differs by {gap:.2e} of its norm")
    counts = set(own.engine.update_counts().values())
    return found if counts == {reference.updates} else [*found, f"update counts {counts}"]


def weights_of(own: Parts) -> dict[str, torch.Tensor]:
    names = [shard.name for shard in own.engine.shards()]
    return {
        name.removeprefix("param/"): own.engine.full(name)
        for name in names
        if name.startswith("param/")
    }


def trained_weights(row: Row, place: RankEnv) -> str:
    """The weights after ten steps, in JSON; of the first rank alone. Collective."""
    config = row.config()
    data = Documents(vocab_size=13, seq_len=config.data.seq_len)
    own = Parts.build(config, data, place)
    rates = schedule(config.schedule, peak=config.optim.lr, steps=config.steps)
    for updates, plan in enumerate(own.plans(STEPS)):
        own.stepper.read(own.launch(plan, step=updates + 1, rate=rates(updates)))
    weights = {name: tensor.flatten().tolist() for name, tensor in weights_of(own).items()}
    return "" if place.rank else json.dumps(weights)


class Alike(Documents):
    """Every window is the same one."""

    def __getitem__(self, index: int) -> Sample:
        return Sample(tokens=super().__getitem__(0).tokens, segments=None)


def dropout_differs(row: Row, place: RankEnv) -> str:
    """Windows and weights are the same at every position: only what is dropped can differ."""
    config = row.config()
    data = Alike(vocab_size=13, seq_len=config.data.seq_len)
    first, again = Parts.build(config, data, place), Parts.build(config, data, place)
    other = Parts.build(config, data, place)
    rules = other.stepper._rules
    other.stepper._rules = replace(rules, seed=rules.seed + 1)
    plans = first.plans(4)
    told = {}
    for plan in plans:
        told |= losses(first, plan)
    found = []
    if len(told) != 4 * GLOBAL:
        found.append(f"{len(told)} positions")
    if len(set(told.values())) < len(told):
        found.append(f"the same was dropped at several positions: {told}")
    torch.manual_seed(99)
    if losses(again, plans[2]) | losses(again, plans[0]) != {
        position: loss
        for position, loss in told.items()
        if position in [*plans[0].positions, *plans[2].positions]
    }:
        found.append("a replay drops something else")
    if set(losses(other, plans[0]).values()) & set(told.values()):
        found.append("another seed drops the same")
    return "; ".join(found)


def losses(own: Parts, plan: BatchPlan) -> dict[int, float]:
    """Position to loss over all ranks, at a rate of 0. Collective."""
    pending = own.launch(plan, step=1, rate=0.0)
    own.stepper.read(pending)
    positions = own.feed.own_positions(plan)
    own = list(zip(positions, pending.sums.sequences.to_host().losses, strict=True))
    everyone = Ranks(CPU).gather(own)
    return {int(p): float(loss) for rows in everyone for p, loss in rows if p is not None}


def run_rows(names: list[str]) -> None:
    """One rank, from its environment on to its end; a line a row."""
    die_with_parent()
    place = place_from(os.environ)
    start_group(place, CPU, timeout_seconds=120)
    for name in names:
        row = Row(*name.split(":"))
        checks = {"dropout": dropout_differs, **dict.fromkeys(OPTIMIZERS, trained_weights)}
        check = checks.get(row.variant, difference)
        line = json.dumps([place.world_size, place.rank, name, check(row, place)])
        sys.stdout.write(f"\n{line}\n")
        sys.stdout.flush()
    end_group()


def run_ranks(told: list[str]) -> None:
    """``ROW`` after ``RANKS``, one after the other; what is imported, is so once for all ranks."""
    wanted: dict[int, list[str]] = {}
    for ranks, name in zip(told[::2], told[1::2], strict=True):
        wanted.setdefault(int(ranks), []).append(name)
    for ranks, names in wanted.items():
        with socket.create_server(("127.0.0.1", 0)) as server:
            os.environ["MASTER_PORT"] = str(server.getsockname()[1])
        pids = [fork_rank(rank, ranks, names) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit(f"{ranks} ranks ended with {codes}")


def fork_rank(rank: int, ranks: int, names: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    code = 1
    try:
        run_rows(names)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # as runner.__main__ does: gloo's threads do not always end well


# The tests


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> dict[tuple[int, str], dict[int, str]]:
    """By ranks and row, then by rank: what differed."""
    full = request.config.getoption("--full")
    selected = {item.name for item in request.session.items if item.module is request.module}  # type: ignore[attr-defined]
    wanted = [
        (ranks, row.name)
        for ranks in ENGINES
        for row, on in rows(ranks)
        if (on or full) and name_of_row(ranks, row) in selected
    ]
    command = [sys.executable, "-m", __name__, *(str(word) for pair in wanted for word in pair)]
    zero = any("zero" in name for _, name in wanted)
    done = warm.finished(command, timeout=1200, zero=zero)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[tuple[int, str], dict[int, str]] = {pair: {} for pair in wanted}
    for line in done.stdout.splitlines():
        if line.startswith("[") and not line.startswith("[Gloo]"):  # as torch 2.10 prints
            ranks, rank, name, words = json.loads(line)
            found[ranks, name][rank] = words
    return found


def name_of_row(ranks: int, row: Row) -> str:
    """The name of the test that needs a row."""
    if row.variant in OPTIMIZERS:
        return f"test_weights_do_not_depend_on_the_number_of_ranks[{row.variant}]"
    return f"test_it_trains_as_the_formulas_say[{ranks}-{row.name}]"


@pytest.mark.timeout(1300)
@pytest.mark.parametrize("optimizer", full_but(ALWAYS_ALIKE, OPTIMIZERS))
def test_weights_do_not_depend_on_the_number_of_ranks(
    told: dict[tuple[int, str], dict[int, str]], optimizer: str
) -> None:
    """Beyond the last bits, in which the sum over ranks and micro-batches differs."""
    alone, *others = (
        json.loads(told[ranks, Row("fsdp", optimizer).name][0]) for ranks in (1, 2, 3)
    )
    for other in others:
        for name, values in other.items():
            mine, theirs = (torch.tensor(w, dtype=torch.float64) for w in (values, alone[name]))
            gap = float((mine - theirs).norm() / theirs.norm())
            assert gap <= AMONG_RANKS, f"{name} differs by {gap:.2e} of its norm"


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("ranks", "row"), CASES)
def test_it_trains_as_the_formulas_say(
    told: dict[tuple[int, str], dict[int, str]], ranks: int, row: str
) -> None:
    assert told[ranks, row] == dict.fromkeys(range(ranks), "")


if __name__ == "__main__":
    run_ranks(sys.argv[1:])
