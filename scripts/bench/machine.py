"""Describes the machine, and whether it was busy with other work."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

_BUSY = 0.5  # load per core at the start above which other work disturbs


def describe() -> dict[str, Any]:
    """Facts for the results; nothing that identifies the machine."""
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "cores": cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
    }


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cpu_model(table: Path) -> str:
    """The first processor's name, or its architecture where the kernel does not say."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def busy_warning(average: float, num_cores: int) -> str | None:
    """A warning if the machine is busy with other work, else empty."""
    if average <= _BUSY * num_cores:
        return None
    return (
        f"the machine was busy when this began: load {average:.2f} on {num_cores} cores; ratios "
        "are noisier than they need be, and seconds longer"
    )


def device_name() -> str:
    """ "cpu", or the GPU's name in file-name letters: what a results file is called."""
    if not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name(0).lower().replace(" ", "-")
