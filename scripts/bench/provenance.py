"""Describes the origin of a record: command, code, versions and machine."""

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

_PACKAGES = ("torch", "deepspeed", "numpy")


def head(command: Sequence[str]) -> dict[str, Any]:
    """The head of a record; nothing in it identifies the machine."""
    load = machine.load()
    record = machine.describe() | {
        "load_at_start": load,
        "warning": machine.busy_warning(load, machine.cores()),
    }
    return {
        "command": shlex.join(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": record,
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """The commit of the measured code, with "+" if there were uncommitted changes."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=12"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
