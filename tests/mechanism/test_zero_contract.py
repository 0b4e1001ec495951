"""Every private name of DeepSpeed that we use, by stage: an upgrade that moves one fails here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from runner.data.feed import MicroBatch
from runner.dist.group import end_group, start_group
from runner.dist.launcher import Place
from runner.engine.adamw import AdamWSettings
from runner.engine.protocol import Work
from runner.engine.zero import ZeroEngine, ZeroPlan, build_module
from runner.fault.inject import Disturbance
from runner.model.decoder import Decoder, DecoderShape
from runner.model.frozen import freeze
from runner.model.loss import sequence_losses

CPU = torch.device("cpu")
SHAPE = DecoderShape(vocab_size=16, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=32, seq_len=8)
OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
# Attributes of DeepSpeed's optimizer, its methods that we replace, attributes of its parameters.
USED: dict[str, tuple[set[str], str, set[str]]] = {
    "BF16_Optimizer": (
        {
            "fp32_groups_flat_partition",
            "fp32_groups_gradient_flat_partition",
            "update_lp_params",
        },
        "get_grads_for_norm",
        {"_hp_mapping"},
    ),
    "DeepSpeedZeroOptimizer": (
        {"single_partition_of_fp32_groups", "averaged_gradients", "update_lp_params"},
        "scaled_global_norm",
        {"_hp_mapping"},
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        {
            "fp32_partitioned_groups_flat",
            "grad_partitions_flat_buffer",
            "grad_position",
            "get_param_id",
            "checkpoint_event_prologue",
            "checkpoint_event_epilogue",
            "_reassign_or_swap_out_partitioned_parameters",
        },
        "_get_norm_groups",
        {"ds_shape", "ds_numel", "ds_tensor"},
    ),
}
OPTIMIZERS = {
    (1, False): "BF16_Optimizer",
    (2, False): "DeepSpeedZeroOptimizer",
    (3, False): "DeepSpeedZeroOptimizer_Stage3",
    (1, True): "DeepSpeedZeroOptimizer",
    (2, True): "DeepSpeedZeroOptimizer",
    (3, True): "DeepSpeedZeroOptimizer_Stage3",
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    start_group(place, CPU, timeout_seconds=60)
    yield
    end_group()


@pytest.fixture(scope="module", params=OPTIMIZERS, ids=lambda key: f"{key[0]}-{key[1]}")
def stage(request: pytest.FixtureRequest) -> tuple[int, bool]:
    """(stage, with offload)."""
    key: tuple[int, bool] = request.param
    return key


def build(stage: tuple[int, bool], frozen: str = "") -> ZeroEngine:
    """One engine on one rank; parameters whose name has ``frozen`` in it are not trained."""
    plan = ZeroPlan(stage=stage[0], num_micro_batches=1, extra=OFFLOAD if stage[1] else {})
    module = build_module(lambda: Decoder(SHAPE), plan, CPU)
    assert isinstance(module, Decoder)
    if frozen:
        freeze(module, [frozen])
    module.reset_buffers(CPU)
    return ZeroEngine(
        module,
        embedding=module.embedding,
        sequence_losses=lambda logits, targets: sequence_losses(
            logits, targets, fp32=True, z_loss=0.0
        ),
        settings=AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1),
        plan=plan,
        device=CPU,
        probe=True,
    )


@pytest.fixture(scope="module")
def engine(stage: tuple[int, bool]) -> ZeroEngine:
    return build(stage)


def wrapped(engine: ZeroEngine) -> Any:
    return engine._engine.optimizer  # the one place where a test looks inside: it is the contract


def parameters(engine: ZeroEngine) -> list[nn.Parameter]:
    return list(engine._engine.module.parameters())


def compute(engine: ZeroEngine, *, nan: bool = False) -> float:
    """One micro-batch's gradients; returns their norm."""
    ids = torch.arange(9).view(1, 9)
    batch = MicroBatch(tokens=ids[:, :-1], targets=ids[:, 1:], segments=None, positions=(0,))
    fault = Disturbance(activation_scale=None, loss_scale=None, nan_grad=True) if nan else None
    sums = engine.accumulate([Work(batch=batch, seed=0, disturbance=fault)])
    return sums.grad_square.sqrt().item()


def apply(engine: ZeroEngine, *, skip: bool = False) -> str | None:
    return engine.apply(
        skip=torch.tensor(float(skip)), grad_scale=torch.tensor(1.0), learning_rate=0.01
    )


def state(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    return {shard.name: engine.full(shard.name) for shard in engine.shards()}


def begin(engine: ZeroEngine) -> None:
    """Small weights, all different."""
    engine.initialise(
        lambda name, shape, start, count: torch.linspace(-0.3, 0.3 + len(name) / 99, count)
    )


def test_the_optimizer_is_the_one_we_know(engine: ZeroEngine, stage: tuple[int, bool]) -> None:
    name = OPTIMIZERS[stage]
    attributes, replaced, _ = USED[name]
    assert type(wrapped(engine)).__name__ == name
    missing = {name for name in attributes if not hasattr(wrapped(engine), name)}
    assert not missing, f"deepspeed moved {missing} of {name}"
    assert hasattr(type(wrapped(engine)), replaced), f"deepspeed moved {replaced} of {name}"


def test_the_parameters_carry_what_we_read(engine: ZeroEngine, stage: tuple[int, bool]) -> None:
    for parameter in parameters(engine):
        names = USED[OPTIMIZERS[stage]][2]
        missing = {name for name in names if not hasattr(parameter, name)}
        assert not missing, f"deepspeed moved {missing} of its parameters"


def test_shards_cover_every_parameter_as_live_views(engine: ZeroEngine) -> None:
    engine.initialise(lambda name, shape, start, count: torch.full((count,), 0.5))
    for shard in engine.shards():
        assert shard.start == 0 and shard.local.numel() == torch.Size(shard.shape).numel()
        expected = 0.5 if shard.name.startswith("param/") else 0.0
        assert (engine.full(shard.name) == expected).all(), shard.name
        shard.local.fill_(2.0)
        assert (engine.full(shard.name) == 2.0).all(), f"{shard.name} is a copy, not a view"


@pytest.mark.parametrize("frozen", ["", "norm"])
def test_refresh_remakes_every_bf16_parameter(stage: tuple[int, bool], frozen: str) -> None:
    """After a load the computed logits must follow, small persistent parameters included."""
    engine = build(stage, frozen)
    tokens = torch.arange(8).view(1, 8)
    engine.initialise(lambda name, shape, start, count: torch.full((count,), 0.25))
    before = engine._engine(tokens).detach().clone()
    counts = dict.fromkeys(engine.update_counts(), 7)
    for shard in engine.shards():
        if shard.name.startswith("param/") and "norm" in shard.name:
            shard.local.fill_(1.5)
    engine.finish_load(counts)
    assert engine.update_counts() == counts
    after = engine._engine(tokens).detach()
    assert not torch.equal(before, after), f"stage {stage}: norms stayed as they were"


def test_the_norm_is_of_the_whole_gradient(engine: ZeroEngine, stage: tuple[int, bool]) -> None:
    """One rank's gradient, as plain autograd has it for the same BF16 weights."""
    begin(engine)
    plain = Decoder(SHAPE)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(engine.full(f"param/{name}"))
    plain.bfloat16()
    ids = torch.arange(9).view(1, 9)
    losses, _ = sequence_losses(plain(ids[:, :-1]), ids[:, 1:], fp32=True, z_loss=0.0)
    losses.sum().backward()
    square = sum(p.grad.float().square().sum() for p in plain.parameters() if p.grad is not None)
    assert compute(engine) == pytest.approx(float(square) ** 0.5, rel=0.02)
    assert apply(engine, skip=True) is None


def test_a_closed_gate_changes_nothing_whatever_the_gradient(engine: ZeroEngine) -> None:
    begin(engine)
    compute(engine)
    assert apply(engine) is None
    before, counts = state(engine), engine.update_counts()
    for nan in (True, False):
        assert torch.tensor(compute(engine, nan=nan)).isfinite() == (not nan)
        assert apply(engine, skip=True) is None
        after = state(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.update_counts() == counts
    compute(engine)
    assert apply(engine) is None
    after = state(engine)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_nothing_but_the_gate_decides(engine: ZeroEngine) -> None:
    """DeepSpeed's own look at the norm is off: NaN with an open gate is applied, as told."""
    begin(engine)
    compute(engine, nan=True)
    assert apply(engine) is None
    assert not state(engine)["param/embedding.weight"].isfinite().all()


def test_a_skip_of_its_own_is_told(engine: ZeroEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(engine)
    compute(engine)
    monkeypatch.setattr(wrapped(engine), "step", lambda: setattr(wrapped(engine), "overflow", True))
    assert "DeepSpeed" in str(apply(engine))
    assert apply(engine, skip=True) is None, "the gate was closed anyway"
    monkeypatch.undo()
    compute(engine)
    assert apply(engine) is None


def test_frozen_parameters_keep_their_bits_and_have_no_moments(stage: tuple[int, bool]) -> None:
    engine = build(stage, "embedding|query")
    begin(engine)
    before = state(engine)
    frozen = {name for name in before if "embedding" in name or "query" in name}
    assert frozen == {"param/embedding.weight", "param/blocks.0.attention.query.weight"}
    compute(engine)
    assert apply(engine) is None
    after = state(engine)
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    assert not any(name.removeprefix("param/") in engine.update_counts() for name in frozen)
