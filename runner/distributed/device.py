"""Which device this rank computes on, and what of it must be equal on all ranks.

A rank that finds no GPU while others have one must not fall back to the CPU: it would open a group
of another kind, and the others would wait for it in NCCL for ever. So a problem found here is
not raised on this rank alone: the rendezvous compares it, and every rank raises it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from runner.distributed.env import RankEnv, gpus_asked_for
from runner.system.process import host_name
from runner.system.version import __version__

_DRIVER = Path("/proc/driver/nvidia")
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}  # by the major version of CUDA, on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevice:
    """``problem``: why the rank cannot train on the configured device; names the node."""

    device: torch.device
    problem: str = ""


def find_device(wanted: str, place: RankEnv, environment: Mapping[str, str]) -> FoundDevice:
    """Find the device for ``parallel.device=auto|cpu|cuda``.

    ``auto`` takes the CPU only where no GPU is visible and the job has none. A task that
    sees one GPU (``srun --gpus-per-task=1``) takes that one, whatever its local rank is.
    """
    cpu = torch.device("cpu")
    if wanted == "cpu":
        return FoundDevice(device=cpu)
    count, host = torch.cuda.device_count(), host_name()
    if count == 0:
        why = _why_there_should_be_one(environment)
        if wanted == "auto" and not why:
            return FoundDevice(device=cpu)
        reason = why or "parallel.device=cuda"
        return FoundDevice(device=cpu, problem=f"{host}: torch sees no GPU, but {reason}")
    if 1 < count < place.local_world_size:
        problem = (
            f"{host}: {place.local_world_size} ranks but {count} GPUs (parallel.device={wanted}); "
            "a GPU may have fallen off the bus; start fewer ranks, or use parallel.device=cpu"
        )
        return FoundDevice(device=cpu, problem=problem)
    if problem := cuda_problem():
        return FoundDevice(device=cpu, problem=f"{host}: {problem}; or use parallel.device=cpu")
    return FoundDevice(device=torch.device("cuda", 0 if count == 1 else place.local_rank))


def cuda_problem() -> str:
    """Why CUDA does not start here, with versions and what to do; "" if it does.

    GPUs can be counted even then: NVIDIA's management library counts them.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return ""
    except (RuntimeError, AssertionError) as error:  # torch's own is of both kinds
        words = str(error).strip().partition("\n")[0]
    cuda, driver = str(torch.version.cuda), driver_version()
    needed = _LEAST_DRIVER.get(cuda.partition(".")[0])
    needs = f", which needs driver {needed} or newer" if needed else ""
    return (
        f"CUDA does not start: torch {torch.__version__} is built for CUDA {cuda}{needs}, and this "
        f"machine has driver {driver} ({words}); install a newer driver, or a build of torch for "
        "this one (docs/running.md)"
    )


def _why_there_should_be_one(environment: Mapping[str, str]) -> str:
    if asked := gpus_asked_for(environment):
        return f"the job asked for GPUs ({asked}); use parallel.device=cpu if it is meant so"
    if torch.version.cuda is None or "CUDA_VISIBLE_DEVICES" in environment:
        return ""
    num_gpus = num_gpus_here()
    return f"the driver knows {num_gpus}; see nvidia-smi, it may have failed" if num_gpus else ""


def num_gpus_here() -> int:
    """How many NVIDIA GPUs the driver has on this machine, visible to this process or not."""
    folder = _DRIVER / "gpus"
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def device_versions(own_device: FoundDevice) -> dict[str, str]:
    """Kind of device, and versions of its software, that must be equal on all ranks."""
    if own_device.problem:
        return {"device": own_device.problem}
    if own_device.device.type != "cuda":
        return {"device": own_device.device.type}
    return {
        "device": "cuda",
        "cuda": str(torch.version.cuda or torch.version.hip),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
    }


def device_facts(device: torch.device) -> dict[str, str]:
    """What is better equal on all ranks: a slow or wrong one is found by its equals."""
    if device.type != "cuda":
        return {}
    return {
        "gpu": torch.cuda.get_device_name(device),
        "gpus": str(torch.cuda.device_count()),
        "driver": driver_version(),
    }


def driver_version() -> str:
    """Of NVIDIA's kernel module; "unknown" without one."""
    try:
        fields = (_DRIVER / "version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return "unknown"
    return next((word for word in fields if word[0].isdigit()), "unknown")


def device_name(device: torch.device) -> str:
    """A unique name of this GPU; empty on a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


# What a run consists of: versions, the code, which rank is on which host.


def versions() -> dict[str, str]:
    """Versions that must be equal on all ranks for them to compute the same."""
    return {
        "holdfast": __version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@cache
def code_digest() -> str:
    """SHA-256 (first 16 hex digits) over this package's source files."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
