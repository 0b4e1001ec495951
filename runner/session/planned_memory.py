"""What a run would take of a rank's memory, counted without one: shapes on the meta device.

State is laid out as the engines do; activations are what autograd would keep of one micro-batch
of the first samples, with attention that keeps no scores (flash attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.config.schema import Precision, Recompute, RunConfig
from runner.config.validate import is_zero
from runner.data.dataset import Dataset
from runner.data.feed import few
from runner.distributed.env import RankEnv
from runner.engine.optimizer import ShardOptimizer
from runner.engine.partitions import require_elementwise
from runner.engine.protocol import Shard
from runner.model.blueprint import Blueprint
from runner.model.meta_shapes import AnswersYes
from runner.session.memory_line import engine_facts
from runner.session.optim import optimizer_settings
from runner.startup.memory_need import EngineFacts, MemoryNeed, SavedActivations, memory_need
from runner.startup.shared_memory import memory_every, wanted_slots
from runner.system.error import ConfigError

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """
    Args:
        need: of the first rank, whose parts are the largest.
        unknown: why activations are not known; empty where they are.
    """

    need: MemoryNeed
    unknown: str


def planned_memory(
    config: RunConfig, network: Blueprint, dataset: Dataset, place: RankEnv
) -> PlannedMemory:
    """Of the first of ``place.world_size`` ranks.

    Args:
        config: its precision settled.

    Raises:
        ConfigError: the optimizer does not go with the engine.
    """
    facts = engine_facts(config, place)
    shards = _state(config, network, place, facts)
    samples = config.batch.micro_size
    activations, unknown = None, ""
    if config.compute.recompute is Recompute.selective:
        unknown = "selective recomputation keeps results where they are not seen"
    else:
        activations, unknown = _activations(config, network, dataset)
    state_bytes = sum(shard.local.numel() * shard.local.itemsize for shard in shards)
    slots = wanted_slots(config.checkpoint) if memory_every(config.checkpoint) else 0
    need = memory_need(
        shards,
        network.parameters(),
        facts,
        activations=activations,
        samples=samples,
        snapshots=slots * state_bytes,
    )
    return PlannedMemory(need=need, unknown=unknown)


def _state(
    config: RunConfig, network: Blueprint, place: RankEnv, facts: EngineFacts
) -> list[Shard]:
    """The state of the first rank, without memory."""
    parameters = network.parameters()
    cut = _cutter(config, place, facts)
    held = {name: torch.empty(cut(one.shape), device=_META) for name, one in parameters.items()}
    trained = {n: held[n].view(-1) if facts.zero_stage else held[n] for n in held}
    trained = {n: local for n, local in trained.items() if parameters[n].is_trained}
    shapes = {name: parameters[name].shape for name in trained}
    settings = optimizer_settings(config)
    if facts.zero_stage:
        require_elementwise(settings, frozenset(map(len, shapes.values())))
    optimizer = ShardOptimizer(trained, shapes, settings, _META, _unneeded, is_cut=facts.is_sharded)
    state = optimizer.tensors() | optimizer.uncut()
    everything = {f"param/{name}": local for name, local in held.items()} | state
    return [
        Shard(name=name, shape=tuple(local.shape), start=0, local=local.view(-1))
        for name, local in everything.items()
    ]


def _cutter(
    config: RunConfig, place: RankEnv, facts: EngineFacts
) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """From a parameter's shape to that of the first rank's part."""
    from runner.session.parts import layout

    if is_zero(config.parallel.kind):
        return lambda shape: (-(-math.prod(shape) // place.world_size),)
    ranks = layout(config, place).shard_size
    return lambda shape: (-(-shape[0] // ranks), *shape[1:]) if shape else shape


def _unneeded(name: str, part: Tensor) -> tuple[Tensor, int]:
    raise AssertionError(f"{name}: nothing is gathered, as no step is made")


def _activations(config: RunConfig, network: Blueprint, dataset: Dataset) -> tuple[int | None, str]:
    """Bytes, or why they are not known."""
    dtype = torch.bfloat16 if config.compute.precision is Precision.bf16 else torch.float32
    batch = few(dataset, config.data.seq_len, config.batch.micro_size).inputs()
    try:
        model = network.on_meta().to(dtype)
        objective = network.objective(model, bf16=False).to(_META)
        inputs = {name: _meta(tensor, dtype) for name, tensor in batch.items()}
        with SavedActivations() as saved, AnswersYes(), _KeepsNoScores():
            objective(inputs)
    except ConfigError:
        raise
    except Exception as error:  # of the user's code: it reads values
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return saved.num_bytes, ""


def _meta(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(_META, dtype if tensor.is_floating_point() else tensor.dtype)


class _KeepsNoScores(TorchFunctionMode):
    """Attention as on a device; the meta device's implementation keeps the scores."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _flash(*args, **(kwargs or {}))


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask
    )[0]
    return output
