"""The line at the start that says how much of a rank's memory the run needs."""

from __future__ import annotations

from runner.config.schema import Precision, Recompute, RunConfig
from runner.config.validate import is_zero
from runner.distributed.env import RankEnv
from runner.session import parts
from runner.session.phases import Machinery, Opened
from runner.startup.memory_need import (
    EngineFacts,
    MemoryNeed,
    SavedActivations,
    memory_need,
    room_bytes,
)

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
    plan = parts.layout(config, place)
    return EngineFacts(
        zero_stage=0,
        item_bytes=_BF16_BYTES if config.compute.precision is Precision.bf16 else _FP32_BYTES,
        is_sharded=plan.shard_size > 1,
        reshards=plan.reshard_after_forward,
        keeps_whole_gradients=not plan.reduce_each_micro_batch,
    )


def memory_line(opened: Opened, machinery: Machinery, saved: SavedActivations) -> str:
    """Format the line; see :meth:`MemoryNeed.line`.

    Args:
        saved: has recorded a micro-batch.
    """
    group, config = opened.group, opened.lease.config
    memory = machinery.tier.memory
    # No hook sees the results that selective recomputation keeps.
    is_seen = config.compute.recompute is not Recompute.selective and saved.num_bytes
    need: MemoryNeed = memory_need(
        machinery.engine.shards(),
        opened.corpus.network.parameters(),
        engine_facts(config, group.place),
        activations=saved.num_bytes if is_seen else None,
        samples=saved.samples,
        snapshots=0 if memory is None else memory.num_slots * memory.layout.num_bytes,
    )
    return need.line(room_bytes(group.device, group.place.local_world_size))
