"""Computes a rank's need of memory, and the largest micro-batch that would fit.

Weights, gradients and optimizer state are counted from the real shards. Activations are those that
one micro-batch kept for its backward pass. Gathered weights follow from the engine
(docs/engines.md). Buffers of libraries are not counted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from runner.config.schema import ComputeConfig, ParallelConfig, Precision, Recompute
from runner.config.validate import is_zero
from runner.distributed.env import RankEnv
from runner.engine.fsdp import MeshLayout
from runner.engine.protocol import Shard
from runner.model.quantised import QuantisedLinear, quantised_layers
from runner.system.units import format_bytes
from runner.train.run import EngineRun

_GRADIENT_BYTES = 4  # FP32 on every engine
_LAYER = re.compile(r"(.*?\.\d+)\.")


_FAR = 10_000


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
        base: quantised weights, which every rank holds whole.
        gathered: largest amount of gathered weights, and of wide ones, at a time.
        activations: those of a micro-batch of ``samples``; None if unknown.
        snapshots: in the memory of the host.
    """

    weights: int
    base: int = 0
    gradients: int
    optimizer: int
    gathered: int
    activations: int | None
    samples: int
    snapshots: int

    @property
    def fixed(self) -> int:
        """The part that does not depend on the micro-batch."""
        return self.weights + self.base + self.gradients + self.optimizer + self.gathered

    def fitting(self, room: int) -> int | None:
        """Samples of the largest micro-batch that ``room`` bytes would hold; None: not known."""
        if not self.activations or not self.samples:
            return None
        return max(0, (room - self.fixed) * self.samples // self.activations)

    def line(self, room: int) -> str:
        """One line for the console; ``room`` is the rank's memory in bytes."""
        amounts = [
            ("weights", self.weights),
            *([("quantised base", self.base)] if self.base else []),
            ("gradients", self.gradients),
            ("optimizer", self.optimizer),
            ("gathered weights", self.gathered),
        ]
        if self.activations is not None:
            amounts.append((f"activations of {self.samples} samples", self.activations))
        listed = ", ".join(f"{name} {format_bytes(amount)}" for name, amount in amounts)
        total = self.fixed + (self.activations or 0)
        fitting = self.fitting(room)
        # So far from what was measured nothing is known.
        is_known = fitting is not None and fitting <= _FAR * self.samples
        fits = "" if not is_known else f", which would hold micro-batches of {fitting:,}"
        snapshots = f"; snapshots {format_bytes(self.snapshots)}" if self.snapshots else ""
        return (
            f"memory of a rank: {listed}: {format_bytes(total)} of {format_bytes(room)}"
            f"{fits}{snapshots}"
        )


def memory_need(
    shards: Iterable[Shard],
    parameters: Mapping[str, nn.Parameter],
    facts: EngineFacts,
    *,
    quantised: Iterable[tuple[str, QuantisedLinear]] = (),
    activations: int | None,
    samples: int,
    snapshots: int,
) -> MemoryNeed:
    """The need of this rank, which holds ``shards`` of the state.

    Args:
        quantised: layers that are held in fewer bits.
    """
    held = [layer for _, layer in quantised]
    # One layer is made wide at a time.
    widest = max((math.prod(layer.shape) for layer in held), default=0)
    listed = list(shards)
    num_bytes = {shard.name: shard.local.numel() * shard.local.itemsize for shard in listed}
    own = {s.name.partition("/")[2]: s.local.numel() for s in listed if _is_parameter(s.name)}
    whole = {name: math.prod(one.shape) for name, one in parameters.items()}
    trained = [name for name, one in parameters.items() if one.requires_grad]
    weights = sum(size for name, size in num_bytes.items() if _is_parameter(name))
    return MemoryNeed(
        weights=weights,
        base=sum(layer.num_bytes for layer in held),
        gradients=_gradients(own, whole, trained, facts),
        optimizer=sum(num_bytes.values()) - weights,
        gathered=_gathered(own, whole, facts) + facts.item_bytes * widest,
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


_BF16_BYTES, _FP32_BYTES = 2, 4


def engine_facts(parallel: ParallelConfig, compute: ComputeConfig, place: RankEnv) -> EngineFacts:
    """Describe the memory use of the configured engine."""
    kind = parallel.kind
    if is_zero(kind):
        return EngineFacts(
            zero_stage=int(kind.value.removeprefix("zero")),
            item_bytes=_BF16_BYTES,
            is_sharded=True,
            reshards=True,
            keeps_whole_gradients=False,
        )
    sizes = place.world_size, place.local_world_size
    plan = MeshLayout.of(parallel, compute, *sizes)
    return EngineFacts(
        zero_stage=0,
        item_bytes=_BF16_BYTES if compute.precision is Precision.bf16 else _FP32_BYTES,
        is_sharded=plan.shard_size > 1,
        reshards=plan.reshard_after_forward,
        keeps_whole_gradients=not plan.reduce_each_micro_batch,
    )


def memory_line(
    run: EngineRun, parallel: ParallelConfig, compute: ComputeConfig, saved: SavedActivations
) -> str:
    """Format the line; see :meth:`MemoryNeed.line`.

    Args:
        saved: has recorded a micro-batch.
    """
    group, memory, network = run.group, run.memory.memory, run.corpus.network
    # No hook sees the results that selective recomputation keeps.
    is_seen = compute.recompute is not Recompute.selective and saved.num_bytes
    need: MemoryNeed = memory_need(
        run.engine.shards(),
        network.parameters(),
        engine_facts(parallel, compute, group.place),
        quantised=quantised_layers(network.twin_network),
        activations=saved.num_bytes if is_seen else None,
        samples=saved.samples,
        snapshots=0 if memory is None else memory.num_slots * memory.layout.num_bytes,
    )
    return need.line(room_bytes(group.device, group.place.local_world_size))
