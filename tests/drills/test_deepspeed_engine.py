"""The guard around somebody's DeepSpeed engine: one rank sees NaN, none has a trace of it."""

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

SCRIPT = Path(__file__).parents[1] / "deepspeed_script.py"
ROOT = SCRIPT.parents[1]
RANKS = 2


def run(out: Path, layout: str, *todo: str, restarts: int = 0, **env: str) -> list[dict[str, Any]]:
    """What each rank leaves, by what was to do."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    told = [sys.executable, *launcher, f"--max-restarts={restarts}", str(SCRIPT), str(out), layout]
    memory = out / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    own = {
        "HOLDFAST_MEMORY_DIR": str(memory),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "DS_ACCELERATOR": "cpu",
    }
    made = os.environ | {"OMP_NUM_THREADS": "1"} | own | env
    begin = warm.ZeroPopen if warm.suits(told, made) else subprocess.Popen
    process = begin(
        [*told, *todo],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=made,
        cwd=ROOT,
        start_new_session=True,
    )
    text, _ = process.communicate(timeout=800)
    assert process.returncode == 0, text[-6000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(
    "layout",
    [
        "zero1",
        pytest.param("zero2", marks=pytest.mark.full),
        pytest.param("bf16", marks=pytest.mark.full),
        pytest.param("bf16-2", marks=pytest.mark.full),
    ],
)
def test_poisoned_and_killed_is_told_to_skip_is_the_bare_loop(tmp_path: Path, layout: str) -> None:
    """Three runs end alike: with the guard twice, and a loop that nobody guards."""
    ends = run(tmp_path, layout, "poison", "told", "bare", restarts=1, KILL_AT="50")
    lines = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2
    [back] = [line for line in lines if line["kind"] == "rollback"]
    assert back["ranks"] == [1]
    for end in ends:
        assert end["poison"]["skipped"] == [[12, 14], [40, 42], [56, 64]]
        assert end["poison"] == end["told"]
        assert end["poison"]["weights"] == end["bare"]["weights"]
    assert ends[0]["poison"]["digest"] == ends[1]["poison"]["digest"]
    assert ends[0]["poison"]["weights"] != ends[1]["poison"]["weights"]  # parts, each its own
