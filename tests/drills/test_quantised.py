"""Adapters on a quantised base: poisoned, killed, resumed, and refused on another base.

bitsandbytes and torchao are no part of the test environment: pip install '.[quantised]'.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.run import read_lines
from tests.script_run import finished

BAD = [[5, 6], [19, 23]]


def need(base: str) -> None:
    package = "torchao" if base == "ao8" else "bitsandbytes"
    for name in (package, "peft", "transformers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (pip install '.[quantised]')")


def run(out: Path, base: str, *todo: str, ranks: int, **how: Any) -> list[dict[str, Any]]:
    finished("quantised_script.py", out, str(out), base, *todo, ranks=ranks, **how)
    return [json.loads((out / f"rank{n}.json").read_text()) for n in range(max(1, ranks))]


@pytest.mark.full
@pytest.mark.parametrize("base", ["nf4", "fp4", "int8", "ao8"])
def test_poisoned_killed_and_resumed_adapters_are_those_of_a_loop_that_left_out(
    tmp_path: Path, base: str
) -> None:
    """Evaluations between steps, on two ranks; then another base is refused, and the base is not
    in the checkpoints."""
    need(base)
    todo = ("poison", "told", "bare", "other", "look")
    ends = run(tmp_path, base, *todo, ranks=2, restarts=1, KILL_AT="24")
    for end in ends:
        assert end["poison"]["skipped"] == BAD and end["poison"]["updates"] == 35
        assert end["poison"]["digest"] == end["told"]["digest"] == end["look"]["digest"]
        assert end["poison"]["weights"] == end["bare"]["weights"]
        assert "another base: its quantised weights have digest " in end["other"]
    assert ends[0]["poison"]["resumed"] > 0
    kinds = [line["kind"] for line in read_lines(tmp_path / "poison" / "journal.jsonl")]
    assert {"discard", "rollback", "crash"} <= set(kinds)
    newest = max((tmp_path / "poison" / "ring").glob("*/manifest.json"))
    names = list(json.loads(newest.read_text())["train_state"]["loop"]["tensors"])
    assert any(".lora_A." in name for name in names)
    assert not any("q_proj.base_layer" in name or "q_proj.weight" in name for name in names)


@pytest.mark.full
@pytest.mark.parametrize("base", ["nf4", "ao8"])
def test_one_process_is_exact_as_well(tmp_path: Path, base: str) -> None:
    need(base)
    [end] = run(tmp_path, base, "poison", "told", "bare", ranks=0)
    assert end["poison"]["skipped"] == BAD
    assert end["poison"]["digest"] == end["told"]["digest"]
    assert end["poison"]["weights"] == end["bare"]["weights"]
