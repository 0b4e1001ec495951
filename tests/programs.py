"""Programs that a test starts anew and waits for; :mod:`tests.warm` forks its own instead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ended(
    *words: str,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """What came of a command, its output kept; ``env`` is added to this process's."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=os.environ | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=check,
    )


def python(
    *words: str, env: Mapping[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """:func:`ended` of this interpreter."""
    return ended(sys.executable, *words, env=env, **options)  # type: ignore[arg-type]
