"""Where a record comes from: the command, the code, the versions and the machine."""

from __future__ import annotations

import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from scripts.bench import machine
from scripts.bench.process import ROOT

_PACKAGES = ("torch", "deepspeed", "numpy", "lightning", "accelerate", "transformers")


def head(command: Sequence[str]) -> dict[str, Any]:
    """What stands at the top of a record; nothing in it names the machine."""
    load = machine.load()
    told = machine.describe() | {
        "load_at_start": load,
        "warning": machine.busy_warning(load, machine.cores()),
    }
    return {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": told,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # of .venv-bench: their versions stand in frameworks.txt
            continue
    return found


def _commit() -> str | None:
    """Of the code measured; with "+" when there were changes beside it."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
