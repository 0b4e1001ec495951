"""Starts ranks and other commands, and sees to their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_SECONDS = 900
_TAIL = 1500


class MeasureError(Exception):
    """One measurement could not be taken; the others go on."""


def torchrun(ranks: int, module: str, *told: str, python: str = sys.executable) -> list[str]:
    """The command that runs ``module`` on so many ranks of this machine."""
    launcher = [python, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", "-m", module, *told]


def environment() -> dict[str, str]:
    """One thread a rank, and the modules of this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary directory, gone in the end."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command; what it says goes to ``log``. Nothing of it is left behind, whatever happens."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for its end.

    Raises:
        MeasureError: it failed or did not end; the end of what it said is told.
    """
    try:
        code: int | str = process.wait(_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        code = f"no end after {_TIMEOUT_SECONDS} s"
    if code:
        raise MeasureError(f"ended with {code}: {_last_words(log)}")


def run(command: Sequence[str], log: Path) -> None:
    """A command from its beginning to its end. Raises as :func:`finish`."""
    with running(command, log) as process:
        finish(process, log)


def on_ranks(ranks: int, module: str, *told: str, python: str = sys.executable) -> dict[str, Any]:
    """Run ``module`` on the ranks with ``--folder DIR``; gives DIR/result.json."""
    with folder() as own:
        log = own / "log"
        command = torchrun(ranks, module, "--folder", str(own), *told, python=python)
        run(command, log)
        result: dict[str, Any] = json.loads((own / "result.json").read_text())
        return result


def _last_words(log: Path) -> str:
    """The first exception that a rank raised, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace")[-50_000:].splitlines()]
    for line in lines:
        if "Error: " in line and "torch.distributed" not in line:
            return line[:_TAIL]
    return next((line for line in reversed(lines) if line), "it said nothing")[:_TAIL]


def kill_tree(root: int) -> None:
    """SIGKILL to a process and all below it, as a lost node ends them."""
    for pid in [root, *descendants(root)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    """Processes below ``root``, parents first; sessions do not matter."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            told = stat.read_text()
        except OSError:  # it has just ended
            continue
        parents[int(stat.parent.name)] = int(told.rpartition(")")[2].split()[1])
    found = [root]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found[1:]
