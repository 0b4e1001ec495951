"""The engine against a plain model and a plain optimizer: same numbers on any layout."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runner.checkpoint import state_digest as digests
from runner.checkpoint.state_digest import state_digest
from runner.checkpoint.tensor_sums import Summing
from runner.config.schema import (
    ComputeConfig,
    OptimConfig,
    ParallelConfig,
    ParallelKind,
    Precision,
    RunConfig,
)
from runner.data.cursor import shard_batch
from runner.data.feed import NOT_COUNTED, MicroBatch
from runner.distributed.agreement import Ranks
from runner.distributed.env import RankEnv, place_from
from runner.distributed.process_group import end_group, start_group
from runner.engine.fsdp import FsdpEngine
from runner.engine.protocol import LocalSums, MicroStep
from runner.fault.inject import Disturbance, FaultInjector
from runner.fault.wrap import FaultyEngine
from runner.model.decoder import Decoder, DecoderShape
from runner.model.loss import sequence_losses
from runner.session import parts
from runner.session.parts import layout
from runner.session.summary import collect_digest
from tests import warm
from tests.mechanism.weights import set_initial_weights

pytestmark = pytest.mark.usefixtures("alone")

CPU = torch.device("cpu")
ALONE = place_from({})
# No size is a multiple of another or of a number of ranks: with 4 ranks some hold nothing.
SHAPE = DecoderShape(
    vocab_size=13, dim=6, layers=2, heads=3, kv_heads=1, ffn_dim=7, seq_len=8, init_std=0.3
)
UNTIED = replace(SHAPE, tied_head=False, qk_norm=True)
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


def settings(
    kind: ParallelKind,
    *,
    bf16: bool = False,
    each_micro_batch: bool = True,
    shard: int | None = None,
) -> RunConfig:
    return RunConfig(
        seed=5,
        compute=ComputeConfig(precision=Precision.bf16 if bf16 else Precision.fp32),
        parallel=ParallelConfig(
            kind=kind, shard_size=shard, reduce_each_micro_batch=each_micro_batch
        ),
        optim=OptimConfig(weight_decay=0.1),
    )


def built(config: RunConfig, shape: DecoderShape, place: RankEnv, **more: Any) -> Any:
    """The engine of a decoder."""
    return parts.engine(config, parts.decoder_blueprint(config, shape), place, CPU, **more)


def build(
    kind: ParallelKind = ParallelKind.fsdp,
    shape: DecoderShape = SHAPE,
    *,
    place: RankEnv = ALONE,
    bf16: bool = False,
    each_micro_batch: bool = True,
    shard: int | None = None,
    faults: Disturbing | None = None,
) -> FsdpEngine:
    config = settings(kind, bf16=bf16, each_micro_batch=each_micro_batch, shard=shard)
    return built(config, shape, place, faults=faults)


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


def digest(engine: FsdpEngine) -> str:
    names = sorted(shard.name for shard in engine.shards())
    return state_digest(((name, engine.full(name)) for name in names), engine.update_counts())


@dataclass
class Plain:
    """The same model without any wrapping, and torch's own AdamW, one tensor at a time."""

    model: Decoder
    optimizer: torch.optim.AdamW

    @classmethod
    def build(cls, shape: DecoderShape = SHAPE) -> Plain:
        model = Decoder(shape)
        set_initial_weights(model, seed=5)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optim = OptimConfig()
        optimizer = torch.optim.AdamW(
            groups, lr=RATE, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=False
        )
        return cls(model=model, optimizer=optimizer)

    def backward(self, whole: MicroBatch) -> tuple[float, float]:
        """(summed loss, squared gradient norm); the gradients are left there."""
        self.optimizer.zero_grad()
        logits = self.model(whole.tokens, whole.segments)
        losses, _ = sequence_losses(logits, whole.targets, fp32=True, z_loss=0.0)
        losses.sum().backward()
        square = sum(
            p.grad.double().square().sum() for p in self.model.parameters() if p.grad is not None
        )
        return losses.double().sum().item(), float(square)

    def apply(self, scale: float) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        self.optimizer.step()

    def digest(self) -> str:
        """Of the initial state."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"param/{name}"] = parameter.detach()
            found[f"exp_avg/{name}"] = torch.zeros_like(parameter)
            found[f"exp_avg_sq/{name}"] = torch.zeros_like(parameter)
        counts = {name: 0 for name, _ in self.model.named_parameters()}
        return state_digest(sorted(found.items()), counts)


def check_weights(engine: FsdpEngine, plain: Plain) -> None:
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(
            engine.full(f"param/{name}"), parameter.detach(), rtol=1e-5, atol=2e-6
        )


def check_sums(sums: LocalSums, expected: tuple[float, float]) -> None:
    """This rank's numbers, summed over ranks, are the plain model's."""
    packed = torch.stack([sums.loss, sums.grad_square, sums.nonfinite])
    assert packed.dtype == torch.float64
    dist.all_reduce(packed)
    loss, square, nonfinite = packed.tolist()
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert square == pytest.approx(expected[1], rel=1e-4)
    assert nonfinite == 0


# One rank


@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ONE_RANK_KINDS)
def test_one_rank_trains_as_the_plain_model(kind: ParallelKind, shape: DecoderShape) -> None:
    engine, plain = build(kind, shape), Plain.build(shape)
    assert digest(engine) == plain.digest()
    for step in range(3):
        whole = batch(seed=step)
        check_sums(engine.accumulate(works(whole)), plain.backward(whole))
        apply(engine, scale=7.0)
        plain.apply(scale=7.0)
        check_weights(engine, plain)
    assert set(engine.update_counts().values()) == {3}


def test_the_gradient_is_divided_by_the_scale() -> None:
    """Adam itself hardly sees a scale, its moments do."""
    moments = []
    for scale in (1.0, 8.0):
        engine = build()
        engine.accumulate(works(batch()))
        apply(engine, scale=scale)
        moments.append({s.name: engine.full(s.name) for s in engine.shards()})
    for name, value in moments[0].items():
        factor = {"exp_avg": 8.0, "exp_avg_sq": 64.0}.get(name.split("/")[0])
        if factor is not None:
            assert value.abs().max() > 0
            torch.testing.assert_close(moments[1][name] * factor, value, rtol=1e-5, atol=0)


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


@pytest.mark.parametrize("each_micro_batch", [True, False])
@pytest.mark.parametrize("cuts", [(3,), (1, 4), (1, 2, 3, 4, 5)])
def test_micro_batches_add_up_to_the_whole(cuts: tuple[int, ...], each_micro_batch: bool) -> None:
    engine, plain, whole = build(each_micro_batch=each_micro_batch), Plain.build(), batch()
    for _ in range(2):
        parts = [rows_of(whole, range(low, high)) for low, high in pairwise((0, *cuts, 6))]
        check_sums(engine.accumulate(works(*parts)), plain.backward(whole))
        apply(engine)
        plain.apply(scale=1.0)
        check_weights(engine, plain)


def test_padding_adds_nothing() -> None:
    whole = batch()
    sums = [
        build().accumulate(works(rows_of(whole, rows)))
        for rows in ([0, 1, 2], [0, 1, 2, None], [0, None, 1, None, 2])
    ]
    for one in sums[1:]:
        assert one.loss.item() == pytest.approx(sums[0].loss.item(), rel=1e-6)
        assert one.grad_square.item() == pytest.approx(sums[0].grad_square.item(), rel=1e-5)


def test_bf16_is_near() -> None:
    engine, plain, whole = build(bf16=True), Plain.build(), batch()
    sums, (loss, square) = engine.accumulate(works(whole)), plain.backward(whole)
    assert sums.loss.item() != loss
    assert sums.loss.item() == pytest.approx(loss, rel=0.02)
    assert sums.grad_square.item() == pytest.approx(square, rel=0.1)
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
    assert told[0].total == told[1].total and told[0].num_tokens == sum(whole.counts())
    for one, two in zip(told[0].losses, told[1].losses, strict=True):
        assert torch.equal(one, two)
    dropped = [engine.accumulate(works(whole, seed=seed)).loss.item() for seed in (1, 2)]
    assert dropped[0] != dropped[1]  # training mode is back


def test_evaluation_is_the_training_loss_without_dropout() -> None:
    engine, whole = build(), batch()
    found, sums = engine.evaluate([whole]), engine.accumulate(works(whole))
    assert found.total.dtype == torch.float64 and found.num_tokens == sum(whole.counts())
    assert found.total.item() == pytest.approx(sums.loss.item(), rel=1e-6)
    # Of each sequence by itself, so that a bad one can be named.
    assert found.losses[0].tolist() == pytest.approx(sums.sequences.losses[0].tolist(), rel=1e-5)


def test_dropout_repeats_with_its_seed() -> None:
    engine = build(shape=replace(SHAPE, dropout=0.3))
    torch.manual_seed(99)
    told = []
    for seed in (1, 2, 1):
        sums = engine.accumulate(works(batch(), seed=seed))
        told.append((sums.loss.item(), sums.grad_square.item()))
        apply(engine, skip=True)
        torch.rand(3)
    assert told[0] == told[2] != told[1]


def test_what_is_loaded_needs_no_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    source = build()
    monkeypatch.setattr(FsdpEngine, "initialise", None)  # nobody asks for them
    target = built(settings(ParallelKind.fsdp), SHAPE, ALONE, has_weights=False)
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
def test_a_head_in_parts_trains_as_the_plain_model(kind: ParallelKind) -> None:
    """Also under FSDP2, which gathers the head's weight; and it evaluates alike."""
    config = settings(kind)
    config.model.loss_chunk_mib = 4 * SHAPE.vocab_size * 5 / (1 << 20)
    engine, plain = built(config, SHAPE, ALONE), Plain.build()
    for step in range(2):
        whole = batch(seed=step)
        check_sums(engine.accumulate(works(whole)), plain.backward(whole))
        apply(engine, scale=7.0)
        plain.apply(scale=7.0)
        check_weights(engine, plain)
    whole = batch(seed=9)
    assert engine.evaluate([whole]).total.item() == pytest.approx(plain.backward(whole)[0])


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


# Several ranks: what each of them runs under torchrun


def own_share(whole: MicroBatch, place: RankEnv, micro_size: int) -> list[MicroBatch]:
    rows = shard_batch(len(whole.positions), micro_size, place.world_size, place.rank)
    return [rows_of(whole, part) for part in rows]


def check_shards(engine: FsdpEngine) -> None:
    """The shards are the whole, cut in pieces; every element is held equally often."""
    for shard in engine.shards():
        whole = engine.full(shard.name)
        assert whole.shape == shard.shape
        held = torch.zeros(whole.numel())
        held[shard.start : shard.start + len(shard.local)] = 1
        stop = shard.start + len(shard.local)
        assert torch.equal(whole.reshape(-1)[shard.start : stop], shard.local)
        dist.all_reduce(held)
        assert torch.equal(held, torch.full_like(held, engine.replica[1]))


def check_sums_of_state(engine: FsdpEngine) -> None:
    """The digest of a large state, made from shards, is that of the whole."""
    digests.WHOLE_BYTES, was = 0, digests.WHOLE_BYTES
    told = collect_digest(engine, Ranks(CPU), lambda: False)
    digests.WHOLE_BYTES = was
    sums, summing = {}, Summing()  # whose pads take a while to be drawn
    for shard in engine.shards():
        whole = engine.full(shard.name)
        sums[shard.name] = (shard.shape, summing.of(shard.name, 0, whole.view(-1)))
    expected = digests.digest_of_sums(sums, engine.update_counts())
    assert told == (expected if dist.get_rank() == 0 else None)


def check_layout(
    engine: FsdpEngine, faults: Disturbing, place: RankEnv, shape: DecoderShape, micro_size: int
) -> None:
    plain = Plain.build(shape)
    assert digest(engine) == plain.digest()
    for step in range(2):
        whole = batch(10, seed=step)
        sums = engine.accumulate(works(*own_share(whole, place, micro_size)))
        check_sums(sums, plain.backward(whole))
        apply(engine, scale=3.0)
        plain.apply(scale=3.0)
    check_weights(engine, plain)
    check_shards(engine)
    check_sums_of_state(engine)
    before = state(engine)
    faults.now = Disturbance(nan_grad=True) if place.rank == 1 else None
    sums = engine.accumulate(works(*own_share(batch(10), place, micro_size)))
    assert sums.nonfinite.item() == float(place.rank == 1)  # whose it is, not whom it reached
    apply(engine, skip=True)
    assert same(state(engine), before)


def check_ranks() -> None:
    place = place_from(os.environ)
    start_group(place, CPU, timeout_seconds=60)
    fsdp, ddp, hsdp = ParallelKind.fsdp, ParallelKind.ddp, ParallelKind.hsdp
    cases = [(fsdp, SHAPE, True), (fsdp, UNTIED, False), (ddp, SHAPE, False)]
    if place.world_size == 4:
        cases = [(fsdp, UNTIED, True), (ddp, SHAPE, False)]
        cases += [(hsdp, UNTIED, each) for each in (True, False)]
    for kind, shape, each_micro_batch in cases:
        shard = 2 if kind is hsdp else None
        faults = Disturbing()
        engine = build(
            kind,
            shape,
            place=place,
            shard=shard,
            each_micro_batch=each_micro_batch,
            faults=faults,
        )
        check_layout(engine, faults, place, shape, micro_size=2)
    end_group()
    sys.stdout.write(f"rank {place.rank} ok\n")
    sys.stdout.flush()
    os._exit(0)  # as runner.__main__ does: gloo's threads do not always end well


@pytest.mark.parametrize(
    "world_size", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4))]
)
def test_every_layout_trains_as_the_plain_model(world_size: int) -> None:
    done = warm.torchrun(["-m", "tests.mechanism.test_engine"], ranks=world_size, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"rank {rank} ok" in done.stdout for rank in range(world_size))


if __name__ == "__main__":
    check_ranks()


def test_weights_that_are_loaded_after_an_evaluation_are_those_of_the_next_step() -> None:
    """FSDP2 keeps the root's parameters gathered after a forward pass without a backward."""
    engine, other = build(), build(shape=replace(SHAPE, init_std=0.1))
    engine.evaluate([batch()])
    for shard, loaded in zip(engine.shards(), other.shards(), strict=True):
        shard.local.copy_(loaded.local)
    engine.finish_load(other.update_counts())
    losses = [float(one.accumulate(works(batch())).loss) for one in (engine, other)]
    assert losses[0] == losses[1]
