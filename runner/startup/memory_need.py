"""Computes a rank's need of memory, and the largest micro-batch that would fit.

Weights, gradients and optimizer state are counted from the real shards. Activations are those that
one micro-batch kept for its backward pass. Gathered weights follow from the engine
(docs/engines.md). Buffers of libraries are not counted.

Without a rank (``plan``) shapes on the meta device are counted: state laid out as the engines do;
activations that autograd would keep of one micro-batch of the first samples, with attention that
keeps no scores (flash attention).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runner.config.schema import Precision, Recompute, RunConfig
from runner.config.validate import is_zero
from runner.data.dataset import Dataset
from runner.data.feed import few
from runner.distributed.env import RankEnv
from runner.engine.fsdp import Layout
from runner.engine.optimizer import OptimizerSettings, ShardOptimizer
from runner.engine.partitions import require_elementwise
from runner.engine.protocol import Shard
from runner.model.blueprint import AnswersYes, Blueprint, Parameter
from runner.policy.retention.retire import memory_every
from runner.startup.shared_memory import wanted_slots
from runner.system.error import ConfigError
from runner.system.units import format_bytes
from runner.train.run import EngineRun

_GRADIENT_BYTES = 4  # FP32 on every engine
_LAYER = re.compile(r"(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """How an engine lays a model over ranks.

    Args:
        zero_stage: 0 for those on FSDP2.
        item_bytes: bytes of a weight in the computation.
        is_sharded: each rank has a part of the weights only.
        reshards: gathered weights are freed between uses.
        keeps_whole_gradients: until the last micro-batch of a step.
    """

    zero_stage: int
    item_bytes: int
    is_sharded: bool
    reshards: bool
    keeps_whole_gradients: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of one rank.

    Args:
        gathered: largest amount of gathered weights at a time.
        activations: those of a micro-batch of ``samples``; None if unknown.
        snapshots: in the memory of the host.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None
    samples: int
    snapshots: int

    @property
    def fixed(self) -> int:
        """The part that does not depend on the micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.gathered

    def fitting(self, room: int) -> int | None:
        """Samples of the largest micro-batch that ``room`` bytes would hold; None: not known."""
        if not self.activations or not self.samples:
            return None
        return max(0, (room - self.fixed) * self.samples // self.activations)

    def line(self, room: int) -> str:
        """One line for the console; ``room`` is the rank's memory in bytes."""
        amounts = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("gathered weights", self.gathered),
        ]
        if self.activations is not None:
            amounts.append((f"activations of {self.samples} samples", self.activations))
        listed = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in amounts)
        total = self.fixed + (self.activations or 0)
        fitting = self.fitting(room)
        fits = "" if fitting is None else f", which would hold micro-batches of {fitting:,}"
        snapshots = f"; snapshots {format_bytes(self.snapshots)}" if self.snapshots else ""
        return (
            f"memory of a rank: {listed}: {format_bytes(total)} of {format_bytes(room)}"
            f"{fits}{snapshots}"
        )


def memory_need(
    shards: Iterable[Shard],
    parameters: Mapping[str, Parameter],
    facts: EngineFacts,
    *,
    activations: int | None,
    samples: int,
    snapshots: int,
) -> MemoryNeed:
    """The need of this rank, which holds ``shards`` of the state."""
    listed = list(shards)
    num_bytes = {shard.name: shard.local.numel() * shard.local.itemsize for shard in listed}
    own = {s.name.partition("/")[2]: s.local.numel() for s in listed if _is_parameter(s.name)}
    whole = {name: math.prod(one.shape) for name, one in parameters.items()}
    trained = [name for name, one in parameters.items() if one.is_trained]
    weights = sum(size for name, size in num_bytes.items() if _is_parameter(name))
    return MemoryNeed(
        weights=weights,
        gradients=_gradients(own, whole, trained, facts),
        optimizer=sum(num_bytes.values()) - weights,
        gathered=_gathered(own, whole, facts),
        activations=activations,
        samples=samples,
        snapshots=snapshots,
    )


def _is_parameter(name: str) -> bool:
    return name.startswith("param/")


def _gradients(
    own: Mapping[str, int], whole: Mapping[str, int], trained: Iterable[str], facts: EngineFacts
) -> int:
    names = list(trained)
    if facts.zero_stage == 1:
        return _GRADIENT_BYTES * sum(whole[name] for name in names)
    elements = sum(own.get(name, 0) for name in names)
    if facts.keeps_whole_gradients:
        elements += sum(whole[name] for name in names)
    return _GRADIENT_BYTES * elements


def _gathered(own: Mapping[str, int], whole: Mapping[str, int], facts: EngineFacts) -> int:
    """Bytes of gathered weights: two layers at a time, and always those outside all layers."""
    layers: dict[str, int] = {}
    for name, size in whole.items():
        layer = _LAYER.match(name)
        layers[layer[1] if layer else ""] = layers.get(layer[1] if layer else "", 0) + size
    rest = layers.pop("", 0)
    passing = rest + 2 * max(layers.values(), default=0)
    if facts.zero_stage == 3:
        return facts.item_bytes * (sum(own.values()) + passing)
    frees = facts.is_sharded and facts.reshards and not facts.zero_stage
    return facts.item_bytes * (min(passing, sum(whole.values())) if frees else sum(whole.values()))


class SavedActivations(torch.autograd.graph.saved_tensors_hooks):
    """While it is entered: the bytes that autograd keeps for backward, each storage once.

    Parameters are not counted, nor what a recomputed block keeps besides its input. The caller
    sets ``samples``, the number of samples of the micro-batch.
    """

    def __init__(self) -> None:
        super().__init__(self._note, lambda tensor: tensor)
        self.samples = 0
        self._storages: dict[int, int] = {}

    def __enter__(self) -> Self:  # type: ignore[override]  # torch's returns nothing
        super().__enter__()
        return self

    @property
    def num_bytes(self) -> int:
        return sum(self._storages.values())

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, nn.Parameter):
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage.nbytes()  # 0 for storages without memory
        return tensor


def room_bytes(device: torch.device, num_local_ranks: int) -> int:
    """Bytes that a rank has: its device's memory, or its share of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_ranks


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
    activations, unknown = _activations(config, network, dataset)
    state_bytes = sum(shard.local.numel() * shard.local.itemsize for shard in shards)
    slots = wanted_slots(config.checkpoint) if memory_every(config.checkpoint) else 0
    need = memory_need(
        shards,
        network.parameters(),
        facts,
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
        layout = Layout.of(config.parallel, config.compute, ranks, place.local_world_size)
        ranks = layout.shard_size

    def held_part(shape: tuple[int, ...]) -> Tensor:
        whole = (math.prod(shape),) if facts.zero_stage else shape
        part = [size if at else -(-size // ranks) for at, size in enumerate(whole)]
        return torch.empty(part, device=_META)

    held = {name: held_part(parameter.shape) for name, parameter in parameters.items()}
    trained = {name: local for name, local in held.items() if parameters[name].is_trained}
    shapes = {name: parameters[name].shape for name in trained}
    settings = OptimizerSettings.of(config.optim)
    if facts.zero_stage:
        require_elementwise(settings, frozenset(map(len, shapes.values())))
    optimizer = ShardOptimizer(trained, shapes, settings, _META, _unneeded, is_cut=facts.is_sharded)
    state = optimizer.tensors() | optimizer.uncut()
    everything = {f"param/{name}": local for name, local in held.items()} | state
    return [
        Shard(name=name, shape=tuple(local.shape), start=0, local=local.view(-1))
        for name, local in everything.items()
    ]


def _unneeded(name: str, part: Tensor) -> tuple[Tensor, int]:
    raise AssertionError(f"{name}: nothing is gathered, as no step is made")


def _activations(config: RunConfig, network: Blueprint, dataset: Dataset) -> tuple[int | None, str]:
    """Bytes, or why they are not known."""
    if config.compute.recompute is Recompute.selective:
        return None, "selective recomputation keeps results where they are not seen"
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


_BF16_BYTES, _FP32_BYTES = 2, 4


def engine_facts(config: RunConfig, place: RankEnv) -> EngineFacts:
    """Describe the memory use of the configured engine."""
    kind = config.parallel.kind
    if is_zero(kind):
        return EngineFacts(
            zero_stage=int(kind.value.removeprefix("zero")),
            item_bytes=_BF16_BYTES,
            is_sharded=True,
            reshards=True,
            keeps_whole_gradients=False,
        )
    sizes = place.world_size, place.local_world_size
    plan = Layout.of(config.parallel, config.compute, *sizes)
    return EngineFacts(
        zero_stage=0,
        item_bytes=_BF16_BYTES if config.compute.precision is Precision.bf16 else _FP32_BYTES,
        is_sharded=plan.shard_size > 1,
        reshards=plan.reshard_after_forward,
        keeps_whole_gradients=not plan.reduce_each_micro_batch,
    )


def memory_line(run: EngineRun, saved: SavedActivations) -> str:
    """Format the line; see :meth:`MemoryNeed.line`.

    Args:
        saved: has recorded a micro-batch.
    """
    group, config, memory = run.group, run.config, run.memory.memory
    # No hook sees the results that selective recomputation keeps.
    is_seen = config.compute.recompute is not Recompute.selective and saved.num_bytes
    need: MemoryNeed = memory_need(
        run.engine.shards(),
        run.corpus.network.parameters(),
        engine_facts(config, group.place),
        activations=saved.num_bytes if is_seen else None,
        samples=saved.samples,
        snapshots=0 if memory is None else memory.num_slots * memory.layout.num_bytes,
    )
    return need.line(room_bytes(group.device, group.place.local_world_size))
