"""Starts and ends the process group, and says which rank this is.

The only place that reads the launcher's environment (torchrun's names).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from runner.error import ConfigError, RunnerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands: its rank, the world, its node's share of it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def place_from(environment: Mapping[str, str]) -> Place:
    """Read torchrun's variables; without them this is the only process.

    Raises:
        ConfigError: some of the variables are there and others are not, or are no numbers.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, world, local, local_world = (int(environment[name]) for name in names)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the launcher's environment is incomplete ({error}): {', '.join(names)} must all "
            "be whole numbers; start with torchrun, or without any of them for one process"
        ) from None
    return Place(rank=rank, world_size=world, local_rank=local, local_world_size=local_world)


def choose_device(wanted: str, place: Place) -> torch.device:
    """``auto`` takes this rank's GPU where there is one for every rank of the node.

    Raises:
        ConfigError: cuda is asked for and not there, or there are too few GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_gpus < place.local_world_size):
        return torch.device("cpu")
    if num_gpus < place.local_world_size:
        raise ConfigError(
            f"parallel.device=cuda: {place.local_world_size} ranks on this node but {num_gpus} "
            "GPUs; start fewer ranks or use parallel.device=cpu"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def start_group(place: Place, device: torch.device, *, timeout_seconds: float) -> None:
    """Make the default group: gloo on CPU, NCCL (and gloo) on CUDA."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    # torch read TORCH_DISTRIBUTED_DEBUG when it was imported; debug=collectives came later.
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def leave(code: int) -> NoReturn:
    """End the process without finalizing the interpreter.

    Threads that gloo leaves behind a closed group made about one finished run in twenty end
    there with SIGABRT ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_group() -> None:
    """Leave together, unless this rank leaves alone with an error the others do not know."""
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, RunnerError):
        return
    # Without the barrier about half of 3-rank gloo runs died in destroy with SIGABRT.
    dist.barrier()
    dist.destroy_process_group()
