"""``holdfast profile``: five steps on two ranks, their table and traces; the run is not touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runner.__main__ import main
from runner.command.profile import covered
from runner.system.error import EXIT_CONFIG
from tests.run import TINY
from tests.warm import torchrun


def test_the_union_of_intervals() -> None:
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1.5, 2)]) == 5


def test_two_ranks_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "run", tmp_path / "run-profile"
    words = [f"out={out}", *TINY, "faults=[kill@step=3,rank=1]"]
    # What a run of these settings has, and a profile does without.
    words += ["checkpoint.memory_mirror=true", "checkpoint.memory_slots=3"]
    words += ["track._target_=tests.tracking.Recorder", f"track.path={tmp_path / 'told'}"]
    told = torchrun(["-m", "runner", "profile", *words], ranks=2, timeout=200)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "USDT" not in told.stdout + told.stderr
    shown = told.stdout
    for row in ("waiting for data", "communication", "memory at its peak", "FSDP::all_gather"):
        assert row in shown
    assert not out.exists() and not (tmp_path / "told").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.json", "rank-1.json"]
    for trace in folder.iterdir():
        names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
        assert "c10d::allreduce_" in names
    capsys.readouterr()
    assert main(["profile", *words]) == EXIT_CONFIG, "a folder of before is not written over"
