"""Describes the origin of a record: command, code, versions and machine.

Nothing in it identifies the machine.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from scripts.bench.process import ROOT

_BUSY = 0.5  # load per core at the start above which other work disturbs


def head(command: Sequence[str]) -> dict[str, Any]:
    """The head of a record."""
    cores = len(os.sched_getaffinity(0))  # that this process may use
    return {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy")},
        },
        "machine": {
            "cpu": cpu_model(Path("/proc/cpuinfo")),
            "cores": cores,
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
            "system": f"{platform.system()} {platform.machine()}",
            "load_at_start": load(),
            "warning": busy_warning(load(), cores),
        },
    }


def commit() -> str | None:
    """The commit of the measured code, with "+" if there were uncommitted changes."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


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
    """A warning if the machine is busy with other work."""
    if average <= _BUSY * num_cores:
        return None
    return (
        f"the machine was busy when this began: load {average:.2f} on {num_cores} cores; ratios "
        "are noisier than they need be, and seconds longer"
    )
