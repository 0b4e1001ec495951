"""How much is measured, and how ranks are started for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_SECONDS = 900
_TAIL = 1500


class MeasureError(Exception):
    """One measurement could not be taken; the others go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command was asked for.

    ``model`` and ``overrides`` are the runner's settings; ``pairs`` scales how often each
    comparison is repeated.
    """

    quick: bool
    ranks: int
    has_gpu: bool
    overrides: Sequence[str] = ()
    say: Callable[[str], None] = print

    def pairs(self, number: int) -> int:
        """``number`` in a whole run, a fifth of it in a quick one."""
        return max(5, number // 5) if self.quick else number

    def rounds(self, number: int) -> int:
        """Of what takes seconds each."""
        return 1 if self.quick else number

    @property
    def size(self) -> list[str]:
        """Settings of the model and batch: the runner's own defaults on a CPU (nano)."""
        if not self.has_gpu:
            return []
        batch = [f"batch.global_size={8 * self.ranks}", "batch.micro_size=8"]
        return ["model=small", "data.seq_len=1024", *batch]

    @property
    def short(self) -> list[str]:
        """Settings that make steps short: costs that do not grow with the batch stand out."""
        if self.has_gpu:
            return ["model=nano", "data.seq_len=256", f"batch.global_size={4 * self.ranks}"]
        return [f"batch.global_size={2 * self.ranks}", "data.seq_len=64"]

    @property
    def block(self) -> int:
        """Steps in a row of one side. With a GPU many, for nothing waits within them."""
        return 10 if self.has_gpu else 2


def torchrun(ranks: int, module: str, *told: str, python: str = sys.executable) -> list[str]:
    """The command that runs ``module`` on so many ranks of this machine."""
    launcher = [python, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", "-m", module, *told]


def environment() -> dict[str, str]:
    """One thread a rank, and the modules of this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@contextmanager
def folder() -> Iterator[Path]:
    """A temporary directory, gone in the end."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """A command in a session of its own; what it says goes to ``log``."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment(),
            cwd=ROOT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for it.

    Raises:
        MeasureError: it failed or did not end; the end of what it said is told.
    """
    try:
        code = process.wait(_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = -1
    if code:
        raise MeasureError(f"ended with {code}: {_last_words(log)}")


def on_ranks(ranks: int, module: str, *told: str, python: str = sys.executable) -> dict[str, Any]:
    """Run ``module`` on the ranks with ``--folder DIR``; gives DIR/result.json."""
    with folder() as own:
        log = own / "log"
        command = torchrun(ranks, module, "--folder", str(own), *told, python=python)
        finish(start(command, log), log)
        result: dict[str, Any] = json.loads((own / "result.json").read_text())
        return result


def _last_words(log: Path) -> str:
    """The exception that a rank raised, or the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace")[-50_000:].splitlines()]
    raised = [line for line in lines if "Error: " in line and "torch.distributed" not in line]
    words = (raised or [line for line in lines if line] or ["it said nothing"])[
        -1 if not raised else 0
    ]
    return words[:_TAIL]
