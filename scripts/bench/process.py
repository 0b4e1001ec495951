"""Starts ranks and other commands, and ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 900
_TAIL = 1500
folder = partial(tempfile.TemporaryDirectory, prefix="bench-", ignore_cleanup_errors=True)


class MeasureError(Exception):
    """One measurement failed; the others continue."""


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` on this many ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """The environment of ranks: one thread each, and the modules of this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def run(command: Sequence[str], log: Path, seconds: float = TIMEOUT_SECONDS) -> None:
    """Run a command to its end, its output in ``log``; its processes are ended in any case.

    Args:
        seconds: how long it may take.

    Raises:
        MeasureError: it failed or did not end; the end of what it said is told.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT
        )
    try:
        code: int | str = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = f"no end after {seconds:g} s"
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            process.wait()
    if code:
        raise MeasureError(f"ended with {code}: {last_words(log)}")


def on_ranks(ranks: int, module: str, *arguments: str) -> dict[str, Any]:
    """Run ``module`` on the ranks with ``--folder DIR``; returns DIR/result.json."""
    with folder() as name:
        own = Path(name)
        log = own / "log"
        command = torchrun(ranks, module, "--folder", str(own), *arguments)
        run(command, log)
        result: dict[str, Any] = json.loads((own / "result.json").read_text())
        return result


def last_words(log: Path) -> str:
    """The first error that a rank told, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace")[-50_000:].splitlines()]
    for line in lines:
        if "rror: " in line and "torch.distributed" not in line:
            return line[:_TAIL]
    return next((line for line in reversed(lines) if line), "it said nothing")[:_TAIL]
