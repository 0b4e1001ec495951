"""Every private name of DeepSpeed that we use, by stage: an upgrade that moves one fails here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from runner.dist.group import end_group, start_group
from runner.dist.launcher import Place
from runner.engine.adamw import AdamWSettings
from runner.engine.zero import ZeroEngine, ZeroPlan, build_module
from runner.model.decoder import Decoder, DecoderShape
from runner.model.loss import sequence_losses

CPU = torch.device("cpu")
SHAPE = DecoderShape(vocab_size=16, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=32, seq_len=8)
# Attributes of DeepSpeed's optimizer, attributes of its parameters.
USED: dict[int, tuple[str, set[str], set[str]]] = {
    1: (
        "BF16_Optimizer",
        {
            "fp32_groups_flat_partition",
            "fp32_groups_gradient_flat_partition",
            "update_lp_params",
        },
        {"_hp_mapping"},
    ),
    2: (
        "DeepSpeedZeroOptimizer",
        {"single_partition_of_fp32_groups", "averaged_gradients", "update_lp_params"},
        {"_hp_mapping"},
    ),
    3: (
        "DeepSpeedZeroOptimizer_Stage3",
        {
            "fp32_partitioned_groups_flat",
            "averaged_gradients",
            "checkpoint_event_prologue",
            "checkpoint_event_epilogue",
            "_reassign_or_swap_out_partitioned_parameters",
        },
        {"ds_shape", "ds_numel"},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    place = Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    start_group(place, CPU, timeout_seconds=60)
    yield
    end_group()


@pytest.fixture(scope="module", params=[1, 2, 3])
def stage(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def engine(stage: int) -> ZeroEngine:
    plan = ZeroPlan(stage=stage, num_micro_batches=1, extra={})
    module = build_module(lambda: Decoder(SHAPE), plan, CPU)
    assert isinstance(module, Decoder)
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


def wrapped(engine: ZeroEngine) -> Any:
    return engine._engine.optimizer  # the one place where a test looks inside: it is the contract


def parameters(engine: ZeroEngine) -> list[nn.Parameter]:
    return list(engine._engine.module.parameters())


def test_the_optimizer_is_the_one_we_know(engine: ZeroEngine, stage: int) -> None:
    name, attributes, _ = USED[stage]
    assert type(wrapped(engine)).__name__ == name
    missing = {name for name in attributes if not hasattr(wrapped(engine), name)}
    assert not missing, f"deepspeed moved {missing} of {name}"


def test_the_parameters_carry_what_we_read(engine: ZeroEngine, stage: int) -> None:
    for parameter in parameters(engine):
        missing = {name for name in USED[stage][2] if not hasattr(parameter, name)}
        assert not missing, f"deepspeed moved {missing} of its parameters"


def test_shards_cover_every_parameter_as_live_views(engine: ZeroEngine) -> None:
    engine.initialise(lambda name, shape, start, count: torch.full((count,), 0.5))
    for shard in engine.shards():
        assert shard.start == 0 and shard.local.numel() == torch.Size(shard.shape).numel()
        expected = 0.5 if shard.name.startswith("param/") else 0.0
        assert (engine.full(shard.name) == expected).all(), shard.name
        shard.local.fill_(2.0)
        assert (engine.full(shard.name) == 2.0).all(), f"{shard.name} is a copy, not a view"


def test_refresh_remakes_every_bf16_parameter(engine: ZeroEngine, stage: int) -> None:
    """After a load the computed logits must follow, small persistent parameters included."""
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
