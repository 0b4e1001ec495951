"""The memory tier at a start: whether it fits, and how many slots; agreed by all ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from runner.checkpoint.memory.node_dir import NodeDir, free_bytes
from runner.checkpoint.memory.peer_replica import KEPT, PeerReplica
from runner.checkpoint.memory.snapshot import Memory, SlotLayout, empty_header
from runner.checkpoint.memory.tier import MemoryParts
from runner.checkpoint.protocol import Identity, SavedShard
from runner.config.schema import CheckpointConfig
from runner.distributed.env import RankEnv
from runner.policy.retention.records import (
    FEWEST_SLOTS,
    NodeNeed,
    SlotPlan,
    memory_every,
    plan_slots,
    slots_for_probation,
)
from runner.system.environment import variables
from runner.system.error import ConfigError
from runner.system.process import is_alive, own_process
from runner.system.units import format_bytes
from runner.train.run import RankGroup

MEMORY_DIR = "HOLDFAST_MEMORY_DIR"
_GIB = 1 << 30
_MOST_THREADS = 8


class StateOnDevice(Protocol):
    """The part of an engine that the memory tier needs."""

    @property
    def device(self) -> torch.device: ...
    def shards(self) -> Sequence[SavedShard]: ...


def node_folder(run_id: str, out: Path) -> NodeDir:
    """The folder for this node's snapshots of the run; a copy of ``out`` has another.

    In shared memory, unless HOLDFAST_MEMORY_DIR names another folder.
    """
    where = out.resolve()
    run = hashlib.sha256(f"{run_id} {where}".encode()).hexdigest()[:32]
    return NodeDir(
        Path(variables().get(MEMORY_DIR) or "/dev/shm"),
        run=run,
        out=where,
        process=own_process(),
        is_alive=is_alive,
    )


def open_memory(
    settings: CheckpointConfig,
    group: RankGroup,
    state: StateOnDevice,
    *,
    incarnation: int,
    identity: Identity,
    timeout_seconds: float,
) -> MemoryParts:
    """Reserve this rank's slots, sized for ``state``, without making them. Collective.

    Args:
        timeout_seconds: of the collectives that copy snapshots to another node.

    Returns:
        None on all ranks where memory is off, or does not fit and was not requested.

    Raises:
        ConfigError: ``checkpoint.memory_every`` was given, and it does not fit or work.
    """
    ranks, place, say = group.ranks, group.place, group.console.say
    node = node_folder(ranks.of_first("naming the run", group.run_dir.identity), group.run_dir.out)
    if memory_every(settings) == 0:
        if place.local_rank == 0:
            node.remove(node.folder)  # it would never be read again
        return MemoryParts()
    layout = SlotLayout(state.shards())
    by_rank = ranks.gather(_look(node, place, layout))
    for line in (line for report in by_rank for line in report["swept"]):
        say(f"removed snapshots in memory: {line}")
    errors = list(dict.fromkeys(report["error"] for report in by_rank if report["error"]))
    if errors:
        return _do_without(settings, "; ".join(errors), say)
    nodes = ranks_by_node(by_rank)
    has_replica = settings.memory_mirror and len(nodes) > 1
    if settings.memory_mirror and not has_replica:
        say("checkpoint.memory_mirror=true: all ranks are on one node, nothing is mirrored")
    needs = node_needs(by_rank, settings.memory_limit_gib, spare_slots=KEPT if has_replica else 0)
    plan = plan_slots(needs, wanted=wanted_slots(settings))
    if plan.slots == 0:
        return _do_without(settings, _too_little(plan.tightest, settings), say)
    say(_announced(plan, layout, node, len(by_rank), settings))
    mark = empty_header(
        layout,
        incarnation=incarnation,
        rank=place.rank,
        world_size=place.world_size,
        identity=identity,
    )
    memory = Memory(
        node,
        layout,
        mark=mark,
        num_slots=plan.slots,
        device=state.device,
        threads=max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // place.local_world_size)),
    )
    ranks.all_or_none("making a folder in shared memory", memory.open)
    if not has_replica:
        return MemoryParts(memory=memory)
    replica = PeerReplica(
        node,
        memory,
        nodes=nodes,
        sizes=[int(report["bytes"]) for report in by_rank],
        mark=mark,
        group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds)),
    )
    return MemoryParts(memory=memory, replica=replica)


def ranks_by_node(looks: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The ranks of each node, nodes by their first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, report in enumerate(looks):
        nodes.setdefault(report["memory"], []).append(rank)
    return list(nodes.values())


def _look(node: NodeDir, place: RankEnv, layout: SlotLayout) -> dict[str, Any]:
    own = own_process()
    report: dict[str, Any] = {"bytes": layout.num_bytes, "swept": [], "error": ""}
    report["host"] = own["host"]
    try:
        node.open()
        if place.local_rank == 0:
            report["swept"] = node.sweep()
        status = node.folder.stat()
        # Two host names of one machine, as containers have, share one memory.
        report["memory"] = f"{own['boot'] or own['host']} {status.st_dev}:{status.st_ino}"
        # This run's older snapshots will be gone by the time their place is needed.
        report["free"] = free_bytes(node.folder) + node.num_bytes()
    except OSError as error:
        report["error"] = str(error)
    return report


def node_needs(
    looks: Sequence[dict[str, Any]], limit_gib: float | None, *, spare_slots: int = 0
) -> list[NodeNeed]:
    """What each node has and needs, from its ranks' measurements.

    Args:
        looks: by rank: ``host``, which ``memory``, ``bytes`` of a slot, ``free`` bytes there.
        spare_slots: for another node's snapshots.
    """
    needs = []
    for of_node in ([looks[rank] for rank in ranks] for ranks in ranks_by_node(looks)):
        free = min(int(report["free"]) for report in of_node)
        budget = free // 2 if limit_gib is None else min(free, int(limit_gib * _GIB))
        needs.append(
            NodeNeed(
                name=of_node[0]["host"],
                slot_bytes=sum(int(report["bytes"]) for report in of_node),
                budget_bytes=budget,
                spare_slots=spare_slots,
            )
        )
    return needs


def wanted_slots(config: CheckpointConfig) -> int:
    """The number of slots of a rank if there is room for them."""
    interval = memory_every(config)
    if isinstance(config.every, int):
        interval = min(interval, config.every)
    needed = slots_for_probation(interval=interval, clean_after=config.clean_after)
    return config.memory_slots or needed


def _do_without(config: CheckpointConfig, why: str, say: Callable[[str], None]) -> MemoryParts:
    if config.memory_every is not None:
        raise ConfigError(f"checkpoint.memory_every={config.memory_every}: {why}")
    say(f"warning: no snapshots in memory: {why}")
    return MemoryParts()


def _too_little(node: NodeNeed, config: CheckpointConfig) -> str:
    limit = config.memory_limit_gib
    whose = "half of what is free" if limit is None else f"checkpoint.memory_limit_gib={limit:g}"
    return (
        f"{FEWEST_SLOTS} snapshots of {format_bytes(node.slot_bytes)} need "
        f"{format_bytes(FEWEST_SLOTS * node.slot_bytes)} of node {node.name}, which has "
        f"{format_bytes(node.budget_bytes)} for them ({whose}); raise "
        "checkpoint.memory_limit_gib, shard over more ranks, or set checkpoint.memory_every=0"
    )


def _announced(
    plan: SlotPlan, layout: SlotLayout, node: NodeDir, num_ranks: int, config: CheckpointConfig
) -> str:
    requested, tightest = wanted_slots(config), plan.tightest
    more = "" if config.memory_every is not None else " or more, by cost"
    fewer = "" if plan.slots == requested else f" (for {requested} there is no room)"
    copies = f" and {tightest.spare_slots} of another node's" if tightest.spare_slots else ""
    one_rank = f"each of {num_ranks} ranks" if num_ranks > 1 else "the rank"
    total = (plan.slots + tightest.spare_slots) * tightest.slot_bytes
    return (
        f"snapshots in memory: every {memory_every(config)} steps{more}, {plan.slots} slots{fewer}"
        f"{copies} of {format_bytes(layout.num_bytes)} for {one_rank}, "
        f"{format_bytes(total)} of {format_bytes(tightest.budget_bytes)} on a node, "
        f"in {node.folder.parent}"
    )
