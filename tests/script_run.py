"""Starts a user's training script under torchrun, with restarts, for the drills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).parents[1]
RANKS = 2

ACCELERATE_LAUNCH = ("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu")
ACCELERATE_LAUNCH += ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")


def ends_of(
    script: str,
    out: Path,
    *arguments: str,
    restarts: int = 0,
    accelerate: bool = False,
    zero: bool = False,
    **env: str,
) -> list[dict[str, Any]]:
    """Run the script; returns what each rank wrote to ``out/rankN.json``.

    Args:
        script: under tests/.
        accelerate: by `accelerate launch`.
        zero: it imports DeepSpeed.
    """
    finished(script, out, *arguments, restarts=restarts, accelerate=accelerate, zero=zero, **env)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def finished(
    script: str,
    out: Path,
    *arguments: str,
    ranks: int = RANKS,
    restarts: int = 0,
    rendezvous: Sequence[str] = ("--standalone",),
    zero: bool = False,
    accelerate: bool = False,
    **env: str,
) -> None:
    """Run the script to its end; ``ranks=0`` is without torchrun."""
    launcher = ["-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={ranks}"]
    launcher += [f"--max-restarts={restarts}"]
    if accelerate:  # with --cpu it would start one process
        launcher = [*ACCELERATE_LAUNCH, f"--num_processes={ranks}", f"--max_restarts={restarts}"]
    command = [sys.executable, *(launcher if ranks else []), str(ROOT / "tests" / script)]
    command += arguments
    memory = out / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    own = {
        "HOLDFAST_MEMORY_DIR": str(memory),
        "ACCELERATE_USE_CPU": "true",
        "DS_ACCELERATOR": "cpu",
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | own | env
    forked = warm.ZeroPopen if zero else warm.WarmPopen
    begin = forked if warm.suits(command, environment) else subprocess.Popen
    process = begin(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    text, _ = process.communicate(timeout=800)
    assert process.returncode == 0, text[-6000:]
