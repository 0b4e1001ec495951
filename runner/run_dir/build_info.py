"""What a run consists of: versions, the code, which rank is on which host."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from runner.system.version import __version__


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


def ranks_on(host: str, hosts: Sequence[str]) -> str:
    """The ranks of a host as ``0-7``, or ``0-3,8`` where they are not consecutive."""
    spans: list[list[int]] = []
    for rank, name in enumerate(hosts):
        if name == host and spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        elif name == host:
            spans.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)
