"""Starts and ends the process group."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from runner.dist.launcher import Place, tell_exit
from runner.dist.meet import Facts, call_roll, meet
from runner.error import ConfigError, RunnerError


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


def start_group(
    place: Place,
    device: torch.device,
    *,
    timeout_seconds: float,
    start_seconds: float = 120.0,
    facts: Facts | None = None,
) -> list[Facts]:
    """Make the default group: gloo on CPU, NCCL (and gloo) on CUDA.

    Args:
        facts: JSON about this rank, with ``versions`` that must be equal on all ranks.

    Returns:
        The facts of the ranks of this node.

    Raises:
        StartError: the ranks did not find each other; names who is absent.
    """
    # torch read TORCH_DISTRIBUTED_DEBUG when it was imported; debug=collectives came later.
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    store = meet(place, seconds=start_seconds)
    room, told = call_roll(store, place, facts or {"versions": {}}, seconds=start_seconds)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=room,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    return told


def leave(code: int) -> NoReturn:
    """End this rank without finalizing the interpreter, and tell the launcher how.

    Threads that gloo leaves behind a closed group made about one finished run in twenty end
    there with SIGABRT ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    tell_exit(os.environ, f"rank-{os.environ.get('RANK', '0')}", code)
    os._exit(code)


def end_group() -> None:
    """Leave together, unless this rank leaves alone with an error the others do not know."""
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, RunnerError):
        return
    # Without the barrier about half of 3-rank gloo runs died in destroy with SIGABRT.
    dist.barrier()
    dist.destroy_process_group()
