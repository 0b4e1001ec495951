"""The guard under other frameworks on two ranks: one sees bad data, one is killed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.mechanism.test_integrations import NEEDS, SETTINGS, columns
from tests.rows import full
from tests.run import read_lines
from tests.script_run import ends_of


@pytest.mark.parametrize(
    ("name", "fp16", "launched"),
    [
        ("accelerate", "", False),
        full("accelerate", "", True, id="accelerate launch"),
        *(full(name, "", False) for name in ("fabric", "lightning", "hf", "sft", "qlora")),
        *(full(name, "1", False) for name in ("lightning", "accelerate", "hf")),
    ],
)
def test_poisoned_killed_and_resumed_is_told_to_skip(
    tmp_path: Path, name: str, fp16: str, launched: bool
) -> None:
    """``launched``: by ``accelerate launch``, all else by torchrun."""
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    words = (name, str(tmp_path), "poison", "told")
    how = {"accelerate": launched, "KILL_AT": "47", "FP16": fp16}
    ends = ends_of("frameworks.py", tmp_path, *words, restarts=1, **how)
    for end in ends:
        assert end["poison"] == end["told"]
        assert end["poison"]["skipped"] == ends[0]["poison"]["skipped"] != []
    lines = read_lines(tmp_path / f"{name}-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2
    if name == "accelerate":  # the others shuffle
        assert [line["ranks"] for line in lines if line["kind"] == "rollback"] == [[1], [1]]
    told = read_lines(tmp_path / f"{name}-told" / "journal.jsonl")
    assert not [line for line in told if line["kind"] in ("discard", "rollback")]
    if name == "hf":
        evaluated, other = (columns(tmp_path / f"{name}-{run}") for run in ("poison", "told"))
        assert evaluated == other and len(evaluated) > 3


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "more"), [(name, more) for name, rows in SETTINGS.items() for more in rows]
)
def test_settings_of_the_frameworks(tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    words = (name, str(tmp_path), "poison", "told")
    env = {"KILL_AT": "21", "MORE": json.dumps(more)}
    for end in ends_of("frameworks.py", tmp_path, *words, restarts=1, **env):
        assert end["poison"] == end["told"] and end["poison"]["skipped"] != []
    lines = read_lines(tmp_path / f"{name}-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2


@pytest.mark.full
@pytest.mark.parametrize("compiled", ["", "1"])
def test_a_loop_as_nanogpt_has_it(tmp_path: Path, compiled: str) -> None:
    """Autocast, a scaler, accumulation, workers, a schedule, DDP; and compiled."""
    words = (str(tmp_path), "poison", "told")
    ends = ends_of("nano_script.py", tmp_path, *words, restarts=1, KILL_AT="30", COMPILE=compiled)
    for end in ends:
        assert end["poison"] == end["told"]
        lost = sum(stop - start for start, stop in end["poison"]["skipped"]) // 2
        assert 3 <= lost <= 6  # two bad samples in each of three passes, 16 steps each
        assert end["poison"]["rest"][2] == 3 * 16 - lost
    lines = read_lines(tmp_path / "poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2
