"""The guard under other frameworks on two ranks: one sees bad data, one is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.mechanism.test_integrations import NEEDS
from tests.run import read_lines

SCRIPT = Path(__file__).parents[1] / "frameworks.py"
ROOT = SCRIPT.parents[1]
RANKS = 2


def run(out: Path, name: str, *todo: str, restarts: int = 0, **env: str) -> list[dict[str, Any]]:
    """What each rank leaves, by what was to do."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    launcher += [f"--max-restarts={restarts}"]
    told = [sys.executable, *launcher, str(SCRIPT), name, str(out), *todo]
    memory = out / "memory"
    memory.mkdir(parents=True, exist_ok=True)
    own = {
        "HOLDFAST_MEMORY_DIR": str(memory),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "ACCELERATE_USE_CPU": "true",
    }
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
    text, _ = process.communicate(timeout=800)
    assert process.returncode == 0, text[-6000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize(
    "name",
    [
        "accelerate",
        pytest.param("fabric", marks=pytest.mark.full),
        pytest.param("lightning", marks=pytest.mark.full),
        pytest.param("hf", marks=pytest.mark.full),
        pytest.param("sft", marks=pytest.mark.full),
    ],
)
def test_poisoned_killed_and_resumed_is_told_to_skip(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    ends = run(tmp_path, name, "poison", "told", restarts=1, KILL_AT="47")
    for end in ends:
        assert end["poison"] == end["told"]
        assert end["poison"]["skipped"] == ends[0]["poison"]["skipped"] != []
    lines = read_lines(tmp_path / f"{name}-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2
    if name == "accelerate":  # the others shuffle
        assert [line["ranks"] for line in lines if line["kind"] == "rollback"] == [[1], [1]]
    told = read_lines(tmp_path / f"{name}-told" / "journal.jsonl")
    assert not [line for line in told if line["kind"] in ("discard", "rollback")]
