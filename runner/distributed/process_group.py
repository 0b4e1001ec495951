"""Starts and ends the process group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from runner.distributed.device import FoundDevice
from runner.distributed.env import RankEnv, is_nccl
from runner.distributed.rendezvous import Facts, connect_store, spare_connections, wait_for_ranks
from runner.system.error import ConfigError, RunnerError, StartError
from runner.system.process import host_name
from runner.system.units import name_ranks


def take_device(device: FoundDevice) -> torch.device:
    """Make the device this process's own, and return it."""
    if device.device.type == "cuda":
        torch.cuda.set_device(device.device)
    return device.device


def start_group(
    place: RankEnv,
    device: torch.device,
    *,
    timeout_seconds: float,
    start_seconds: float = 120.0,
    facts: Facts | None = None,
    problem: str = "",
    have_met: Callable[[Store, Sequence[Facts]], None] = lambda room, facts: None,
) -> tuple[list[Facts], Departure]:
    """Make the default group: gloo on CPU, NCCL (and gloo) on CUDA.

    Args:
        facts: JSON about this rank, with ``versions`` that must be equal on all ranks, and
            ``gpu``, which must not be.
        problem: of this rank's device; it is in ``versions`` too, so that all ranks raise.
        have_met: called after the rendezvous, before the ranks connect, with the store of this
            group and the facts of this node's ranks.

    Returns:
        The facts of the ranks of this node, and what tells whether all ranks leave together.

    Raises:
        StartError: ranks are absent, and are named; or two ranks share one GPU.
        ConfigError: every rank has this ``problem``.
    """
    # torch read TORCH_DISTRIBUTED_DEBUG when it was imported; debug=collectives came later.
    dist.set_debug_level_from_env()
    store = connect_store(place, seconds=start_seconds)
    room, facts_by_rank = wait_for_ranks(
        store, place, facts or {"versions": {}}, seconds=start_seconds
    )
    if problem:
        raise ConfigError(problem)
    _require_own_gpus(facts_by_rank)
    have_met(room, facts_by_rank)
    spare_connections(place.world_size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=room,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        # Make the communicator now, while the monitor watches, not in the first collective.
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
    return facts_by_rank, Departure(room, place.world_size)


def _require_own_gpus(facts_by_rank: Sequence[Facts]) -> None:
    """Refuse two ranks on one GPU: NCCL's own error names neither."""
    by_gpu: dict[str, list[int]] = {}
    for facts in facts_by_rank:
        if facts.get("gpu"):
            by_gpu.setdefault(str(facts["gpu"]), []).append(int(facts["rank"]))
    shared = {gpu: ranks for gpu, ranks in by_gpu.items() if len(ranks) > 1}
    if shared:
        pairs = "; ".join(f"{name_ranks(r)}: {gpu}" for gpu, r in shared.items())
        raise StartError(
            f"{host_name()}: ranks share a GPU ({pairs}); start one rank a GPU (each task may see "
            "one of its own), or use parallel.device=cpu",
            is_local=True,
        )


def limit_groups(seconds: float) -> None:
    """Let no collective of any group of this process wait longer.

    Device meshes and DeepSpeed make groups with torch's own limit, which is half an hour.
    """
    distributed: Any = dist.distributed_c10d
    # Public from torch 2.14 on.
    set_timeout = getattr(dist, "set_timeout", None) or distributed._set_pg_timeout
    for group in list(distributed._world.pg_map):
        set_timeout(timedelta(seconds=seconds), group)


class Departure:
    """Tells whether an error that ends this rank ends every rank.

    By the store: others may wait in a collective, and one of this rank would be taken for it.

    Args:
        store: of this group alone.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = PrefixStore("departure", store)
        self._world_size = world_size

    def announce(self) -> None:
        """Announce that this rank leaves, for a rank that waits in :meth:`is_common`."""
        with contextlib.suppress(RuntimeError):  # DistStoreError as well: the host is gone
            if self._store.add("ranks", 1) == self._world_size:
                self._store.set("all", "1")

    def is_common(self, seconds: float) -> bool:
        """Announce that this rank leaves, and whether all ranks do so within ``seconds``."""
        self.announce()
        try:
            self._store.wait(["all"], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True


def end_group(have_met: Callable[[], None] = lambda: None) -> None:
    """End the group together, unless this rank leaves alone with an error of its own.

    Args:
        have_met: called when all ranks have arrived; from then on ranks may leave one by one.
    """
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, RunnerError):
        return
    # Without the barrier about half of 3-rank gloo runs died in destroy with SIGABRT.
    if is_nccl(dist.get_backend_config()):
        dist.all_reduce(torch.zeros(1))  # over gloo: a barrier would use NCCL, without a time limit
    else:
        dist.barrier()
    have_met()
    dist.destroy_process_group()
