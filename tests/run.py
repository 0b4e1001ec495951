"""Starts real runs and reads what they leave: the drills' hands and eyes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What differs between two runs of the same trajectory.
TIMINGS = ("seconds", "tokens_per_second", "data_wait_seconds")

# A model and a language that learn in seconds; the guard is armed early.
TINY = (
    "model=tiny",
    "data=synthetic",
    "data.workers=0",
    "eval.every=0",
    "steps=60",
    "schedule.warmup=5",
    "checkpoint.every=10",
    "checkpoint.clean_after=5",
    "guard.min_history=10",
    "track.every=1000",
    "parallel.timeout_seconds=60",
)


@dataclass(frozen=True)
class Result:
    """One finished command and the run directory it worked on."""

    out: Path
    code: int
    text: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())

    @property
    def digest(self) -> str:
        return self.summary["state_digest"]

    def journal(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = read_lines(self.out / "journal.jsonl")
        return [line for line in lines if kind is None or line["kind"] == kind]

    def metrics(self) -> list[dict[str, Any]]:
        """Lines without timings."""
        return [
            {key: value for key, value in line.items() if key not in TIMINGS}
            for line in read_lines(self.out / "metrics.jsonl")
        ]

    def counted(self) -> dict[int, dict[str, Any]]:
        """Step to the line that counts: the last applied one."""
        return {line["step"]: line for line in self.metrics() if line["action"] == "apply"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(out: Path, *overrides: str, ranks: int = 2) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    if ranks == 0:  # no launcher at all
        return [sys.executable, "-m", "runner", f"out={out}", *TINY, *overrides]
    return [*launcher, f"--nproc-per-node={ranks}", "-m", "runner", f"out={out}", *TINY, *overrides]


def train(out: Path, *overrides: str, ranks: int = 2, timeout: float = 120) -> Result:
    """Run one command to its end; ``ranks=0`` starts without torchrun."""
    done = subprocess.run(
        command(out, *overrides, ranks=ranks),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    return Result(out=out, code=done.returncode, text=done.stdout + done.stderr)


def finish(out: Path, *overrides: str, ranks: int = 2) -> Result:
    """:func:`train`, which must end well."""
    result = train(out, *overrides, ranks=ranks)
    assert result.code == 0, result.text[-3000:]
    assert result.summary["status"] == "done"
    return result


def skip_override(ranges: Sequence[Sequence[int]]) -> str:
    """``data.skip=...`` for these half-open ranges."""
    return "data.skip=" + json.dumps([list(pair) for pair in ranges]).replace(" ", "")
