"""What an engine's step leaves alone and tells of its samples; its numbers: test_reference."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.config.schema import (
    ComputeConfig,
    OptimConfig,
    ParallelConfig,
    ParallelKind,
    Precision,
    RunConfig,
)
from runner.data.feed import NOT_COUNTED, MicroBatch
from runner.distributed.env import RankEnv, place_from
from runner.engine.fsdp import FsdpEngine
from runner.engine.protocol import MicroStep
from runner.fault.inject import Disturbance, FaultInjector
from runner.fault.wrap import FaultyEngine
from runner.model.decoder import DecoderShape
from runner.session import parts
from runner.session.parts import layout

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
ALONE = place_from({})
SHAPE = DecoderShape(
    vocab_size=13, dim=6, layers=2, heads=3, kv_heads=1, ffn_dim=7, seq_len=8, init_std=0.3
)
ONE_RANK_KINDS = [ParallelKind.single, ParallelKind.fsdp, ParallelKind.ddp, ParallelKind.hsdp]
RATE = 0.01


class Disturbing(FaultInjector):
    """Does ``now`` to every micro-batch, if anything."""

    has_any = True

    def __init__(self, now: Disturbance | None = None) -> None:
        super().__init__([], rank=0, markers=Path(os.devnull))
        self.now = now

    def disturbance(self, positions: Sequence[int | None]) -> Disturbance | None:
        return self.now


def settings(kind: ParallelKind, *, bf16: bool = False, shard: int | None = None) -> RunConfig:
    return RunConfig(
        seed=5,
        compute=ComputeConfig(precision=Precision.bf16 if bf16 else Precision.fp32),
        parallel=ParallelConfig(kind=kind, shard_size=shard),
        optim=OptimConfig(weight_decay=0.1),
    )


def build(
    kind: ParallelKind = ParallelKind.fsdp,
    shape: DecoderShape = SHAPE,
    *,
    bf16: bool = False,
    **more: Any,
) -> Any:
    """The engine of a decoder."""
    config = settings(kind, bf16=bf16)
    return parts.engine(config, parts.decoder_blueprint(config, shape), ALONE, CPU, **more)


def batch(rows: int = 6, *, seed: int = 0) -> MicroBatch:
    """Random tokens; some targets are not counted, the last sequence has only few."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SHAPE.vocab_size, (rows, SHAPE.seq_len + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = NOT_COUNTED
    targets[-1, 2:] = NOT_COUNTED
    return MicroBatch(
        tokens=ids[:, :-1].contiguous(),
        targets=targets,
        segments=None,
        positions=tuple(range(rows)),
    )


def rows_of(whole: MicroBatch, rows: Sequence[int | None]) -> MicroBatch:
    """Some sequences of a batch; None is padding."""
    at = [0 if row is None else row for row in rows]
    targets = whole.targets[at].clone()
    targets[[row is None for row in rows]] = NOT_COUNTED
    return MicroBatch(
        tokens=whole.tokens[at], targets=targets, segments=None, positions=tuple(rows)
    )


def works(*batches: MicroBatch, seed: int = 0) -> list[MicroStep]:
    return [MicroStep(batch=one, seed=seed) for one in batches]


def apply(
    engine: FsdpEngine, *, skip: bool = False, scale: float = 1.0, rate: float = RATE
) -> None:
    engine.apply(skip=torch.tensor(float(skip)), grad_scale=torch.tensor(scale), learning_rate=rate)


def state(engine: FsdpEngine) -> dict[str, Tensor]:
    """The bits of the whole state."""
    tensors = {shard.name: engine.full(shard.name).view(torch.int32) for shard in engine.shards()}
    counts = engine.update_counts()
    return tensors | {f"count/{name}": torch.tensor(count) for name, count in counts.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# One rank


@pytest.mark.parametrize(
    "disturbance",
    [
        None,
        Disturbance(nan_grad=True),
        Disturbance(loss_scale=(1.0, float("nan"), 1.0, 1.0, 1.0, 1.0)),
        Disturbance(loss_scale=(1e38,) * 6),
        Disturbance(activation_scale=(1.0,) * 5 + (float("nan"),)),
    ],
    ids=["healthy", "nan gradient", "nan loss", "overflow", "nan activation"],
)
@pytest.mark.parametrize("kind", ONE_RANK_KINDS)
def test_a_skipped_update_leaves_every_bit(
    kind: ParallelKind, disturbance: Disturbance | None
) -> None:
    faults = Disturbing()
    engine, other = build(kind, faults=faults), build(kind)
    assert isinstance(engine, FaultyEngine) and not isinstance(other, FaultyEngine)
    for one in (engine, other):
        one.accumulate(works(batch()))
        apply(one)
    before = state(engine)
    faults.now = disturbance
    sums = engine.accumulate(works(batch(seed=1)))
    faults.now = None
    if disturbance is not None:
        assert sums.nonfinite.item() == 1.0
    apply(engine, skip=True)
    assert same(state(engine), before)
    for one in (engine, other):  # and nothing of it lingers
        one.accumulate(works(batch(seed=2)))
        apply(one)
    assert same(state(engine), state(other))
    assert not same(state(engine), before)


def test_bf16_is_near() -> None:
    engine = build(bf16=True)
    sums, exact = (one.accumulate(works(batch())) for one in (engine, build()))
    assert sums.loss.item() != exact.loss.item()
    assert sums.loss.item() == pytest.approx(exact.loss.item(), rel=0.02)
    assert sums.grad_square.item() == pytest.approx(exact.grad_square.item(), rel=0.1)
    assert all(shard.local.dtype == torch.float32 for shard in engine.shards())


@pytest.mark.parametrize(
    ("disturbance", "bad"),
    [
        (None, []),
        (Disturbance(loss_scale=(1.0, float("nan"), 1.0, 1.0, 1.0, 1.0)), [1]),
        (Disturbance(activation_scale=(1.0,) * 4 + (float("nan"), 1.0)), [4]),
    ],
)
def test_suspects_name_the_sequence(disturbance: Disturbance | None, bad: list[int]) -> None:
    engine = build(faults=Disturbing(disturbance))
    found = engine.accumulate(works(batch())).sequences.to_host()
    assert len(found.losses) == len(found.gradient_norms) == 6
    seen = zip(found.losses, found.gradient_norms, strict=True)
    assert [row for row, pair in enumerate(seen) if not all(map(math.isfinite, pair))] == bad


def test_suspects_of_two_micro_batches_stand_in_order() -> None:
    engine, whole = build(), batch()
    first = engine.accumulate(works(whole)).sequences
    cut = [rows_of(whole, [0, 1]), rows_of(whole, [2, 3, 4, 5])]
    in_two = engine.accumulate(works(*cut)).sequences.to_host()
    at_once = first.to_host()  # the next step has left them alone
    assert in_two.losses == pytest.approx(at_once.losses, rel=1e-5)
    assert in_two.gradient_norms == pytest.approx(at_once.gradient_norms, rel=1e-4)


def test_a_spike_weighs_as_asked() -> None:
    plain = build().accumulate(works(batch()))
    engine = build(faults=Disturbing(Disturbance(loss_scale=(10.0,) * 6)))
    spiked = engine.accumulate(works(batch()))
    assert spiked.loss.item() == pytest.approx(10 * plain.loss.item(), rel=1e-5)
    assert spiked.grad_square.item() == pytest.approx(100 * plain.grad_square.item(), rel=1e-4)
    assert spiked.nonfinite.item() == 0.0


def test_evaluation_changes_nothing_and_drops_nothing() -> None:
    engine = build(shape=replace(SHAPE, dropout=0.5))
    whole = batch()
    engine.accumulate(works(whole))
    apply(engine)
    before = state(engine)
    parts = [rows_of(whole, range(4)), rows_of(whole, [4, 5, None])]
    told = [engine.evaluate(parts) for _ in range(2)]
    assert same(state(engine), before)
    assert told[0].total == told[1].total and told[0].count == sum(whole.counts())
    for one, two in zip(told[0].losses, told[1].losses, strict=True):
        assert torch.equal(one, two)
    dropped = [engine.accumulate(works(whole, seed=seed)).loss.item() for seed in (1, 2)]
    assert dropped[0] != dropped[1]  # training mode is back


def test_evaluation_is_the_training_loss_without_dropout() -> None:
    engine, whole = build(), batch()
    found, sums = engine.evaluate([whole]), engine.accumulate(works(whole))
    assert found.total.dtype == torch.float64 and found.count == sum(whole.counts())
    assert found.total.item() == pytest.approx(sums.loss.item(), rel=1e-6)
    # Of each sequence by itself, so that a bad one can be named.
    assert found.losses[0].tolist() == pytest.approx(sums.sequences.losses[0].tolist(), rel=1e-5)


def test_what_is_loaded_needs_no_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    source = build()
    monkeypatch.setattr(FsdpEngine, "initialise", None)  # nobody asks for them
    target = build(has_weights=False)
    for mine, theirs in zip(target.shards(), source.shards(), strict=True):
        mine.local.copy_(theirs.local)
    target.finish_load(source.update_counts())
    assert isinstance(target, FsdpEngine) and same(state(target), state(source))


def test_a_loaded_state_goes_on_bit_by_bit() -> None:
    source, target = build(), build()
    source.accumulate(works(batch()))
    apply(source)
    for mine, theirs in zip(target.shards(), source.shards(), strict=True):
        assert (mine.name, mine.start, mine.shape) == (theirs.name, theirs.start, theirs.shape)
        mine.local.copy_(theirs.local)
    target.accumulate(works(batch(seed=9)))  # gradients that must not survive the load
    target.finish_load(source.update_counts())
    assert same(state(target), state(source))
    for engine in (source, target):
        engine.accumulate(works(batch(seed=1)))
        apply(engine)
    assert same(state(target), state(source))


@pytest.mark.parametrize("kind", [ParallelKind.fsdp, ParallelKind.ddp])
def test_a_head_in_parts_trains_and_evaluates_as_at_once(kind: ParallelKind) -> None:
    """Also under FSDP2, which gathers the head's weight."""
    config, told = settings(kind), []
    config.model.loss_chunk_mib = 4 * SHAPE.vocab_size * 5 / (1 << 20)
    in_parts = parts.engine(config, parts.decoder_blueprint(config, SHAPE), ALONE, CPU)
    for engine in (in_parts, build(kind)):
        for seed in range(2):
            sums = engine.accumulate(works(batch(seed=seed)))
            apply(engine, scale=7.0)
        evaluated = engine.evaluate([batch(seed=9)]).total.item()
        told.append([sums.loss.item(), sums.grad_square.item(), evaluated])
    assert told[0] == pytest.approx(told[1], rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "shard", "world", "expected"),
    [
        (ParallelKind.single, None, 1, (1, 1)),
        (ParallelKind.fsdp, None, 6, (1, 6)),
        (ParallelKind.ddp, None, 6, (6, 1)),
        (ParallelKind.hsdp, 2, 6, (3, 2)),
        (ParallelKind.hsdp, None, 6, (2, 3)),
    ],
)
def test_layouts(
    kind: ParallelKind, shard: int | None, world: int, expected: tuple[int, int]
) -> None:
    place = RankEnv(rank=0, world_size=world, local_rank=0, local_world_size=max(1, world // 2))
    made = layout(settings(kind, shard=shard), place)
    assert (made.replicas, made.shard_size) == expected


def test_weights_that_are_loaded_after_an_evaluation_are_those_of_the_next_step() -> None:
    """FSDP2 keeps the root's parameters gathered after a forward pass without a backward."""
    engine, other = build(), build(shape=replace(SHAPE, init_std=0.1))
    engine.evaluate([batch()])
    for shard, loaded in zip(engine.shards(), other.shards(), strict=True):
        shard.local.copy_(loaded.local)
    engine.finish_load(other.update_counts())
    losses = [float(one.accumulate(works(batch())).loss) for one in (engine, other)]
    assert losses[0] == losses[1]
