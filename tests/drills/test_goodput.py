"""Where the time of a real run went: a rollback, a killed rank and a stop in one run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner.run_dir.time_account import KINDS, account
from runner.tools.goodput import measured
from runner.tools.report.run_reader import RunReader, RunStatus
from tests.run import finish, read_lines, train

FAULTS = "faults=[poison@samples=700-790,kill@step=45,rank=1]"


@pytest.mark.twin
def test_the_time_of_a_rollback_and_a_restart_is_accounted(tmp_path: Path) -> None:
    out = tmp_path / "run"
    began = time.time()
    half = train(out, "steps=30", "schedule.total=60", FAULTS)
    assert half.code == 0, half.tail
    time.sleep(2)  # down
    run = finish(out, "steps=60", "schedule.total=60", FAULTS, restarts=1)
    outside = time.time() - began
    kinds, summary = run.summary["time"], run.summary
    assert summary["restarts"] == 1 and summary["rollbacks"] == 1, run.tail
    assert set(kinds) == set(KINDS)
    wall = sum(kinds.values())
    journal = read_lines(out / "journal.jsonl")
    first = journal[0]["time"]
    # From the first start, which is later than that of its process, to the summary; but for the
    # pause after the first half, which was done.
    idle = sum(line["detail"]["idle_seconds"] for line in journal if line["kind"] == "start")
    assert idle > 2.0
    whole = (out / "summary.json").stat().st_mtime - first
    assert whole == pytest.approx(wall + idle, rel=0.2)
    assert wall < outside
    metrics = read_lines(out / "metrics.jsonl")
    counted = {m["step"]: m["seconds"] - m["data_wait_seconds"] for m in metrics}
    assert sorted(counted) == list(range(1, 61))
    assert kinds["productive"] == pytest.approx(sum(counted.values()), abs=0.002)
    assert summary["goodput"] == pytest.approx(kinds["productive"] / wall, abs=1e-4)
    # Lines that the restart cut away are known from the journal alone.
    lost = [line for line in journal if line["kind"] == "start" and line["detail"]["lost"]]
    (killed,) = [line for line in lost if "recomputed" in line["detail"]["lost"]]
    (rollback,) = [line for line in journal if line["kind"] == "rollback"]
    assert 0 < killed["detail"]["lost"]["recomputed"] < kinds["recomputed"], run.tail
    assert rollback["cost_steps"] > 0 and kinds["discarded"] > 0
    assert kinds["restart"] > 0 and kinds["rollback"] > 0 and kinds["checkpoint"] > 0
    # From the files alone it is the same, but for the last save, which no line tells.
    again = account(metrics, journal).breakdown(wall)
    for kind in set(KINDS) - {"checkpoint", "other"}:
        assert again[kind] == pytest.approx(kinds[kind], abs=0.002), kind
    assert again["checkpoint"] <= kinds["checkpoint"] + 0.002
    assert "where the time went" in run.text and "goodput" in run.text
    # Asked again, a finished run is what it was: neither the pause nor the look is part of it.
    asked = finish(out, "steps=60", "schedule.total=60", FAULTS).summary
    assert {name for name in summary if asked[name] != summary[name]} <= {"incarnation", "time"}
    assert asked["time"] == pytest.approx(kinds, abs=0.005)
    reader = RunReader(out)
    reader.update()
    assert RunStatus(reader).restarts == 1
    assert reader.fold.account.idle_seconds > idle
    # What plan --run takes from it.
    found = {name: value.number for name, value in measured(out, journal).items()}
    assert found["nodes"] == 1 and found["mtbf_node_hours"] > 0
    assert 0 < found["stall_seconds"] < wall and 0 < found["save_seconds"] < wall
    assert found["restart_seconds"] > 0 and found["state_gb"] > 0
    assert found["step_seconds"] == pytest.approx(kinds["productive"] / 60, rel=2)
