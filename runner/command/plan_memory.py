"""``python -m runner plan --ranks N key=value ...``: what a run would take of a rank's memory.

Nothing of it is started: shapes on the meta device are counted, state laid out as the engines do,
and what autograd would keep of one micro-batch of the first samples, with attention that keeps no
scores (flash attention).
"""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.overrides import TorchFunctionMode

from runner.command.arguments import at_least
from runner.config.compose import compose
from runner.config.schema import Precision, Recompute, RunConfig
from runner.config.validate import check
from runner.data.dataset import Dataset
from runner.data.feed import few
from runner.distributed.env import RankEnv
from runner.engine.fsdp import MeshLayout
from runner.engine.optimizer import OptimizerSettings, ShardOptimizer
from runner.engine.partitions import never_whole, require_elementwise
from runner.engine.protocol import Shard
from runner.model.blueprint import AnswersYes, Blueprint
from runner.model.quantised import quantised_layers
from runner.policy.retention.records import memory_every
from runner.session import parts
from runner.session.corpus import open_dataset
from runner.startup.memory_need import (
    EngineFacts,
    MemoryNeed,
    SavedActivations,
    engine_facts,
    memory_need,
)
from runner.startup.shared_memory import wanted_slots
from runner.system.error import ConfigError
from runner.system.parsing import json_text
from runner.system.units import format_bytes


def plan_memory(options: Namespace) -> int:
    """Count and print; returns the exit code.

    Raises:
        ConfigError: a setting or option is out of bounds.
        DataError: the data cannot be opened.
    """
    ranks, room_gib = options.ranks, options.room_gib
    at_least(1, ranks=ranks, ranks_per_node=options.ranks_per_node)
    if room_gib is not None and not room_gib > 0:
        raise ConfigError(f"--room-gib {room_gib}: must be more than 0")
    overrides = list(options.overrides)
    no_data = not any(re.match(r"data(\.path|\._target_|\.sources)?=", text) for text in overrides)
    if no_data:  # their shapes, and a vocabulary, are all that is needed of them
        overrides.insert(0, "data=synthetic")
    config = compose(overrides, config_dir=options.config_dir)
    check(config, world_size=ranks)
    if config.compute.precision is Precision.auto:
        config.compute.precision = Precision.bf16
    here = min(ranks, options.ranks_per_node)
    place = RankEnv(rank=0, world_size=ranks, local_rank=0, local_world_size=here)
    dataset = open_dataset(config)
    planned = planned_memory(config, parts.blueprint(config, dataset), dataset, place)
    room = None if room_gib is None else round(room_gib * (1 << 30))
    precision = config.compute.precision.value
    if options.json:
        need = planned.need
        memory = asdict(need) | {
            "total": _total(need),
            "precision": precision,
            "room": room,
            "fitting_micro_size": None if room is None else need.fitting(room),
            "activations_unknown": planned.unknown or None,
        }
        sys.stdout.write(json_text(memory, indent=1) + "\n")
    else:
        title = f"Memory of a rank of {ranks:,}, parallel={config.parallel.kind.value}, {precision}"
        _print(title, planned, room)
        if no_data and config.model.vocab_size is None and config.model._target_ is None:
            sys.stdout.write(
                "Without data= the vocabulary is that of synthetic tokens, "
                f"{dataset.vocab_size:,}: give data.path=..., or model.vocab_size=N\n"
            )
    return 0


def _total(need: MemoryNeed) -> int:
    return need.fixed + (need.activations or 0)


def _print(title: str, planned: PlannedMemory, room: int | None) -> None:
    need = planned.need
    table = Table("what", "bytes", "how it is counted", title=title, title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("parameters", format_bytes(need.weights), "FP32, this rank's part")
    if need.base:
        table.add_row("quantised base", format_bytes(need.base), "whole on every rank")
    table.add_row("gradients", format_bytes(need.gradients), "FP32, reduced")
    table.add_row("moments", format_bytes(need.optimizer), "all that the optimizer keeps")
    table.add_row("gathered weights", format_bytes(need.gathered), "to compute with, at most")
    activations, how = "not known", planned.unknown
    if need.activations is not None:
        activations = format_bytes(need.activations)
        how = f"kept for the backward pass of {need.samples} samples (batch.micro_size)"
    table.add_row("activations", activations, how)
    table.add_section()
    table.add_row("together", format_bytes(_total(need)), "without what libraries keep")
    table.add_row("snapshots", format_bytes(need.snapshots), "in the host's memory")
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if room is not None:
        console.print(_fits(need, room))


def _fits(need: MemoryNeed, room: int) -> str:
    most = need.fitting(room)
    if most is None:
        left = room - need.fixed
        return (
            f"{format_bytes(room)} would leave {format_bytes(left)} for activations"
            if left > 0
            else f"{format_bytes(room)} would not hold weights, gradients and moments"
        )
    if most == 0:
        return (
            f"{format_bytes(room)} would not hold a micro-batch of one sample: use more ranks, "
            "parallel=fsdp or zero3, compute.recompute=blocks or parallel.offload=cpu"
        )
    return f"{format_bytes(room)} would hold micro-batches of up to {most:,} samples"


# -- counting ------------------------------------------------------------------------------

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
    facts = engine_facts(config.parallel, config.compute, place)
    shards = _state(config, network, place, facts)
    activations, unknown = _activations(config, network, dataset)
    state_bytes = sum(shard.local.numel() * shard.local.itemsize for shard in shards)
    slots = wanted_slots(config.checkpoint) if memory_every(config.checkpoint) else 0
    need = memory_need(
        shards,
        network.parameters(),
        facts,
        quantised=quantised_layers(network.twin_network),
        activations=activations,
        samples=config.batch.micro_size,
        snapshots=slots * state_bytes,
    )
    return PlannedMemory(need=need, unknown=unknown)


def _state(
    config: RunConfig, network: Blueprint, place: RankEnv, facts: EngineFacts
) -> list[Shard]:
    """The state of the first rank, without memory."""
    parameters = network.parameters()
    ranks = place.world_size
    if not facts.zero_stage:
        layout = MeshLayout.of(config.parallel, config.compute, ranks, place.local_world_size)
        ranks = layout.shard_size

    def held_part(shape: tuple[int, ...]) -> Tensor:
        whole = (math.prod(shape),) if facts.zero_stage else shape
        part = [size if at else -(-size // ranks) for at, size in enumerate(whole)]
        return torch.empty(part, device=_META)

    held = {name: held_part(parameter.shape) for name, parameter in parameters.items()}
    trained = {name: local for name, local in held.items() if parameters[name].requires_grad}
    shapes = {name: parameters[name].shape for name in trained}
    settings = OptimizerSettings.of(config.optim)
    if facts.zero_stage:
        require_elementwise(settings, frozenset(map(len, shapes.values())))
    optimizer = ShardOptimizer(
        trained, shapes, settings, _META, never_whole, is_cut=facts.is_sharded
    )
    state = optimizer.tensors() | optimizer.uncut()
    everything = {f"param/{name}": local for name, local in held.items()} | state
    return [
        Shard(name=name, shape=tuple(local.shape), start=0, local=local.view(-1))
        for name, local in everything.items()
    ]


def _activations(config: RunConfig, network: Blueprint, dataset: Dataset) -> tuple[int | None, str]:
    """Bytes, or why they are not known."""
    if config.compute.recompute is Recompute.selective:
        return None, "selective recomputation keeps results where they are not seen"
    dtype = torch.bfloat16 if config.compute.precision is Precision.bf16 else torch.float32
    batch = few(dataset, config.data.seq_len, config.batch.micro_size).inputs()
    try:
        model = network.on_meta().to(dtype)
        objective = network.objective(model, bf16=False).to(_META)
        inputs = {
            name: tensor.to(_META, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in batch.items()
        }
        with SavedActivations() as saved, AnswersYes(), _KeepsNoScores():
            objective(inputs)
    except ConfigError:
        raise
    except Exception as error:  # of the user's code: it reads values
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return saved.num_bytes, ""


class _KeepsNoScores(TorchFunctionMode):
    """Attention as on a device; the meta device's implementation keeps the scores."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = _flash if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


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
