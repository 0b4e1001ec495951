"""What the launcher says about this process: its rank, its job, its time limit.

The only place that knows what a launcher puts into the environment: names of torchrun, of srun,
and ours. The environment itself is an argument.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.system.error import ConfigError
from runner.system.parsing import json_text

# Ours, from a supervisor to the ranks.
EXIT_DIR = "HOLDFAST_EXIT_DIR"
LAUNCH_ID = "HOLDFAST_LAUNCH_ID"
ATTEMPT = "HOLDFAST_ATTEMPT"
WATCHED = "HOLDFAST_WATCHED"  # set: a watcher outside tells of the run; see track.watch
END_TIME = "HOLDFAST_END_TIME"
RESTART = "HOLDFAST_RESTART"  # JSON, see runner.run_dir.start_times
_BEGUN = ".begun-"  # hidden: not an exit code
UNWRITTEN = ".writing."  # begins the name of what is being written there
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_MOST_RANKS = 1 << 20
_DIGITS = 18  # of any number that a launcher may set


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """The place of this process: its rank, the world size, its node's share of it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnv:
    """The job that this process is part of.

    Attributes:
        job: the job's name over all its restarts; None when the launcher gives none.
        order: counts of restarts, by the scheduler and then by the supervisor.
        step: where in the job it runs; equal after torchrun's own restarts, and in a second
            launch of the same name.
        end_time: seconds since the epoch at which the scheduler ends the job, if it does.
        has_agent: whether a launcher watches this process, which must end with it.
        agents: the launcher processes, one on each node, by the names that
            :func:`runner.system.process.parent_name` gives; known after the rendezvous.
    """

    job: str | None
    order: tuple[int, int]
    step: str
    end_time: float | None
    has_agent: bool
    agents: tuple[str, ...] = ()

    def supersedes(
        self, job: str | None, order: tuple[int, int], step: str, agents: Sequence[str]
    ) -> bool:
        """Whether the launcher itself replaced that launch by this one.

        torchrun restarts ranks without a number that would show it on every node, and its name
        (``--rdzv-id``) is the user's choice: a second torchrun may have the same. But at least
        one of its agents lives on, whatever nodes come and go.
        """
        if self.job is None or self.job != job:
            return False
        if self.order == order:
            return self.step == step and not set(self.agents).isdisjoint(agents)
        return self.order > order


def place_from(environment: Mapping[str, str]) -> RankEnv:
    """Read torchrun's variables, or srun's; without them this is the only process.

    Raises:
        ConfigError: some of the variables are missing, or are not numbers.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, world, local, local_world = _numbers(environment, names)
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
        rank, world, local, node = _numbers(environment, names)
        counts = _tasks_per_node(environment)
        if node >= len(counts):
            raise ConfigError(
                f"SLURM_NODEID={node}: SLURM_STEP_TASKS_PER_NODE has {len(counts)} nodes; start "
                "with srun"
            )
        local_world = counts[node]
    else:
        return RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1)
    if not (rank < world <= _MOST_RANKS and local < local_world <= world):
        raise ConfigError(
            f"the launcher's environment makes no sense: rank {rank} of {world}, {local} of "
            f"{local_world} on this node; start with torchrun or srun"
        )
    return RankEnv(rank=rank, world_size=world, local_rank=local, local_world_size=local_world)


def own_rank(environment: Mapping[str, str]) -> int:
    """The rank that torchrun set; 0 without one, or if it is not a number."""
    return _whole(environment.get("RANK"))


def own_local_rank(environment: Mapping[str, str]) -> int:
    """The local rank on this node, as :func:`own_rank`."""
    return _whole(environment.get("LOCAL_RANK"))


def _numbers(environment: Mapping[str, str], names: tuple[str, ...]) -> list[int]:
    for name in names:
        text = environment.get(name)
        if not _is_number(text):
            problem = repr(name) if text is None else f"{text[:40]!r} is not a whole number"
            raise ConfigError(
                f"the launcher's environment is incomplete ({problem}): {', '.join(names)} must "
                "all be whole numbers; start with torchrun or srun, or without any of them for one "
                "process"
            )
    return [int(environment[name]) for name in names]


def _is_number(text: str | None) -> bool:
    """Whether these are ASCII digits: isdigit() also accepts some that int() refuses."""
    return text is not None and text.isascii() and text.isdecimal() and len(text) <= _DIGITS


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """Parse SLURM_STEP_TASKS_PER_NODE, as ``2(x3),1``, into one number per node."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part)
        if match is None or len(counts) + int(match[2] or 1) > _MOST_RANKS:
            raise ConfigError(
                f"SLURM_STEP_TASKS_PER_NODE={text[:200]}: cannot be read; start with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def rendezvous_endpoint(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The rendezvous of srun's tasks; None if the environment names it or there is one process.

    The first node of the step and a port from the job's number, unless MASTER_ADDR and
    MASTER_PORT say otherwise.

    Raises:
        ConfigError: a variable is not a number, or not a port.
    """
    if "RANK" in environment or "SLURM_STEP_ID" not in environment:
        return None
    host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", ""))
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    job, step = _numbers({"SLURM_JOB_ID": "0"} | dict(environment), names)
    port = environment.get("MASTER_PORT") or str(_FIRST_PORT + (job * 7 + step) % _NUM_PORTS)
    if not _is_number(port) or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port[:40]}: must be a whole number from 1 to 65535")
    return host or "localhost", int(port)


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: ``gpu[03-05,9],login`` gives ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "" if match is None else match[1] + (match[2] or "") + (match[3] or "")


def launch_from(environment: Mapping[str, str]) -> JobEnv:
    """Read what the launcher says about the job."""
    run_id = environment.get("TORCHELASTIC_RUN_ID", "none")
    job = environment.get(LAUNCH_ID) or (f"torchrun {run_id}" if run_id != "none" else "")
    if slurm := environment.get("SLURM_JOB_ID"):
        job = f"slurm {environment.get('SLURM_CLUSTER_NAME', '')} {slurm}"
    end = environment.get("SLURM_JOB_END_TIME") or environment.get(END_TIME)
    return JobEnv(
        job=job or None,
        order=(_whole(environment.get("SLURM_RESTART_COUNT")), _whole(environment.get(ATTEMPT))),
        step=f"{environment.get('SLURM_STEP_ID', '')} {run_id}",
        end_time=float(end) if end and _is_number(end) and int(end) > 0 else None,
        has_agent=run_id != "none" or "SLURM_STEP_ID" in environment or "RANK" in environment,
    )


# A number, or a list of names; NVIDIA_VISIBLE_DEVICES=all stands in images that need no GPU.
_ASKED = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_TASK", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_NOT_ASKED = ("", "0", "all", "void", "none")


def gpus_asked_for(environment: Mapping[str, str]) -> str:
    """The variable that says that this job has GPUs on this node; empty: none does."""
    names = (*_ASKED, "NVIDIA_VISIBLE_DEVICES")
    names_set = [n for n in names if environment.get(n, "").strip().lower() not in _NOT_ASKED]
    return f"{names_set[0]}={environment[names_set[0]][:80]}" if names_set else ""


def gpus_on_node(environment: Mapping[str, str]) -> int | None:
    """How many GPUs of this node Slurm gave to the job; None where it does not say."""
    return _whole(environment.get("SLURM_GPUS_ON_NODE")) or None


def _whole(text: str | None) -> int:
    return int(text) if text and _is_number(text) else 0


def tell_begun(environment: Mapping[str, str], rank: int, facts: Mapping[str, Any]) -> None:
    """Tell the supervisor, if there is one, that this rank has begun, and which process it is."""
    _leave(environment, f"{_BEGUN}{rank}", json_text(facts))


def read_begun(folder: Path) -> dict[int, dict[str, Any]]:
    """What ranks wrote with :func:`tell_begun`, by rank."""
    begun: dict[int, dict[str, Any]] = {}
    for path in folder.glob(f"{_BEGUN}*"):
        with contextlib.suppress(OSError, ValueError):
            begun[int(path.name.removeprefix(_BEGUN))] = json.loads(path.read_text())
    return begun


def recorded_exit(environment: Mapping[str, str], name: str) -> int | None:
    """What :func:`tell_exit` wrote for a process of this node; None without a supervisor."""
    try:
        return int((Path(environment[EXIT_DIR]) / name).read_text())
    except (KeyError, OSError, ValueError):
        return None


def rank_name(rank: int) -> str:
    """The name of a rank's exit code for :func:`tell_exit`."""
    return f"rank-{rank}"


def tell_exit(environment: Mapping[str, str], name: str, code: int) -> None:
    """Write this process's exit code where the supervisor looks, if there is one."""
    _leave(environment, name, f"{code}\n")


def _leave(environment: Mapping[str, str], name: str, text: str) -> None:
    if EXIT_DIR not in environment:
        return
    folder = Path(environment[EXIT_DIR])
    temporary = folder / f"{UNWRITTEN}{name}.{os.getpid()}"
    with contextlib.suppress(OSError):  # the supervisor is gone
        temporary.write_text(text)
        temporary.rename(folder / name)


# What torch.distributed and NCCL check and record. Set it before the group exists.


# 3 keeps NCCL's communicators until the recorders are read; 1 is torchrun's default for its
# workers, and tears them down.
_ASYNC_ERRORS, _TORCHRUNS = "3", "1"
_DUMPS = "flight-recorder-rank"  # torch appends the rank
# The flight recorder keeps the last collectives of each rank; NCCL dumps it on a time-out.
_ALWAYS = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": _ASYNC_ERRORS,
    # The training thread raises what a failed device says, and reports it. NCCL's watchdog would
    # raise the same in its own thread, and abort the process before the report is written.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


def debug_settings(kind: str, *, folder: Path) -> dict[str, str]:
    """Environment variables for ``debug=off|nccl|collectives``."""
    settings = dict(_ALWAYS)
    settings["TORCH_FR_DUMP_TEMP_FILE"] = str(folder / _DUMPS)
    if kind != "off":
        # Records each collective's begin on the device by an event: a device that hangs before
        # a collective can then be distinguished from a network that is down.
        settings["TORCH_NCCL_ENABLE_TIMING"] = "1"
    if kind == "nccl":
        settings |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,COLL,ENV",
            "NCCL_DEBUG_FILE": str(folder / "nccl.%h.%p.log"),
        }
    elif kind == "collectives":
        settings["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    return settings


def is_nccl(backends: str) -> bool:
    """Whether a backend's name, or one of several (``cpu:gloo,cuda:nccl``), is an NCCL.

    torch 2.14 has three: ``nccl2`` (what ``nccl`` makes), ``nccl-lazy`` and ``nccl-legacy``.
    """
    return "nccl" in backends


def is_torchruns_own(environment: Mapping[str, str]) -> bool:
    """Whether NCCL's error handling is torchrun's default, not a choice of the user or of us."""
    setting = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    return setting == _TORCHRUNS and "TORCHELASTIC_RUN_ID" in environment


def set_debug(environment: MutableMapping[str, str], settings: dict[str, str]) -> dict[str, str]:
    """Apply settings that the user has not set; returns the effective values.

    torchrun's own choice is not the user's: see :func:`is_torchruns_own`.
    """
    if is_torchruns_own(environment):
        del environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    for name, value in settings.items():
        environment.setdefault(name, value)
    return {name: environment[name] for name in settings}


def keep_dump(folder: Path, rank: int) -> None:
    """Rename what NCCL dumped in an earlier incarnation of this rank; it would be overwritten.

    The new name begins with the time of the dump, UTC.
    """
    dump = folder / f"{_DUMPS}{rank}"
    with contextlib.suppress(OSError):  # mostly: there is none
        when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(dump.stat().st_mtime))
        dump.rename(folder / f"{when}-{dump.name}")
