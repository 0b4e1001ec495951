"""The guard in a script of somebody's own, on two ranks and with real kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.run import read_lines

SCRIPT = Path(__file__).parents[1] / "guarded_script.py"
ROOT = SCRIPT.parents[1]


def run(out: Path, layout: str, *todo: str, ranks: int = 2, restarts: int = 0, **env: str) -> Any:
    """What the script leaves, by the name of what was to do."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher += [f"--max-restarts={restarts}"]
    told = [*(sys.executable, *(launcher if ranks else [])), str(SCRIPT), str(out), layout, *todo]
    memory = out / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    # By default torchrun's restarts share a store, and gloo may connect to the address that a rank
    # of the attempt before left in it (torch 2.13).
    own = {"HOLDFAST_MEMORY_DIR": str(memory), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    made = os.environ | {"OMP_NUM_THREADS": "1"} | own | env
    begin = warm.WarmPopen if warm.suits(told, made) else subprocess.Popen
    process = begin(
        told,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=made,
        cwd=ROOT,
        start_new_session=True,
    )
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text[-5000:]
    return json.loads((out / f"{layout}.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "sampler"])
def test_one_rank_sees_nan_and_none_has_a_trace_of_it(tmp_path: Path, layout: str) -> None:
    ends = run(tmp_path, layout, "poison", "told", "break")
    assert ends["poison"] == ends["told"] == ends["break"]
    assert ends["poison"]["skipped"] == [[6, 7], [20, 21], [28, 32]]
    lines = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    [back] = [line for line in lines if line["kind"] == "rollback"]
    assert back["ranks"] == [1]


def test_a_killed_rank_and_a_restart_change_nothing(tmp_path: Path) -> None:
    ends = run(tmp_path, "fsdp", "poison", "told", restarts=1, KILL_AT="26")
    assert ends["poison"] == ends["told"]
    starts = read_lines(tmp_path / "fsdp-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in starts) == 2
