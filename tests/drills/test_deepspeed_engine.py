"""The guard around somebody's DeepSpeed engine: one rank sees NaN, none has a trace of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.compare import logged_by
from tests.rows import full
from tests.run import read_lines
from tests.script_run import ends_of


@pytest.mark.parametrize("layout", ["zero1", full("zero2"), full("bf16"), full("bf16-2")])
def test_poisoned_and_killed_is_told_to_skip_is_the_bare_loop(tmp_path: Path, layout: str) -> None:
    """Three runs end alike: with the guard twice, and a loop that nobody guards."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    todo = ("poison", "told", "bare")
    words = (str(tmp_path), layout, *todo)
    ends = ends_of("deepspeed_script.py", tmp_path, *words, restarts=2, zero=True, KILL_AT="50")
    lines = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 3
    [stopped] = [line["reason"] for line in lines if line["kind"] == "preempted"]
    assert "rank 0: SIGTERM); saved at step 15" in stopped  # 16 batches, a step of two is skipped
    [back] = [line for line in lines if line["kind"] == "rollback"]
    assert back["ranks"] == [1]
    told, own = (logged_by(tmp_path / f"{layout}-{name}") for name in ("told", "poison"))
    assert own == told and len(own) > 40
    for end in ends:
        assert end["poison"]["skipped"] == [[12, 14], [40, 42], [56, 64]]
        assert end["poison"] == end["told"]
        assert end["poison"]["weights"] == end["bare"]["weights"]
    assert ends[0]["poison"]["digest"] == ends[1]["poison"]["digest"]
    assert ends[0]["poison"]["weights"] != ends[1]["poison"]["weights"]  # parts, each its own
