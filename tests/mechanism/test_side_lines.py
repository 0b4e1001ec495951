"""The lines beside the metrics: what the ranks took, what became of the checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner.observe.side_lines import RankTimes, RingLines, SideLines
from runner.policy.outlier_ranks import RankPace
from runner.policy.retention.records import Record, State, Tier


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def side(path: Path, attempt: int = 1) -> SideLines:
    return SideLines(path, check=lambda: None, attempt=lambda: attempt, clock=lambda: 7.0)


def record(serial: int, state: State, *, step: int = 10, tier: Tier = Tier.disk) -> Record:
    return Record(serial=serial, step=step, cursor=0, state=state, tier=tier)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "ring.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b')
    lines = side(path)
    lines.write({"c": 2})
    lines.close()
    assert lines_of(path) == [{"a": 1}, {"time": 7.0, "attempt": 1, "c": 2}]


def test_a_disk_that_takes_nothing_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "ranks.jsonl").mkdir()
    with pytest.raises(Exception, match=r"ranks\.jsonl"):
        side(tmp_path / "ranks.jsonl")
    lines = side(tmp_path / "no such folder" / "ranks.jsonl")
    lines.write({"step": 1})
    lines.close()


def test_what_becomes_of_each_checkpoint_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "ring.jsonl"
    records: list[Record] = []
    stored: list[Record] = []
    ring = RingLines(side(path), records=lambda: records, stored=lambda: stored)
    ring.note(0)
    records += [record(1, State.committed), record(1, State.committed, tier=Tier.memory)]
    ring.note(11)
    ring.note(12)
    records[:] = [record(1, State.clean), record(2, State.tainted, step=20)]
    stored += [record(1, State.clean)]
    ring.note(25)
    ring.close()
    told = [(line["step"], line["tier"], line["serial"], line["state"]) for line in lines_of(path)]
    assert told == [
        (11, "disk", 1, "committed"),
        (11, "memory", 1, "committed"),
        (25, "memory", 1, "gone"),
        (25, "disk", 1, "clean"),
        (25, "disk", 2, "committed"),
        (25, "disk", 2, "tainted"),
        (25, "remote", 1, "committed"),
        (25, "remote", 1, "clean"),
    ]
    assert [line.get("of") for line in lines_of(path)][-1] == 10


def test_a_restart_goes_on_from_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "ring.jsonl"
    before = [record(1, State.clean), record(3, State.committed, tier=Tier.memory)]
    first = RingLines(side(path), records=lambda: before)
    first.note(30)
    first.close()
    length = len(lines_of(path))
    again = RingLines(side(path, attempt=2), records=lambda: [record(1, State.clean)])
    again.note(10)
    again.note(11)
    again.close()
    (told,) = lines_of(path)[length:]
    assert (told["tier"], told["serial"], told["state"], told["attempt"]) == (
        "memory",
        3,
        "gone",
        2,
    )


def test_of_a_long_run_not_every_snapshot_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ring.jsonl"
    records: list[Record] = []
    ring = RingLines(side(path), records=lambda: records)
    for step in range(10, 200_000, 10):
        records[:] = [record(step // 10, State.committed, step=step, tier=Tier.memory)]
        ring.note(step)
    ring.close()
    told = lines_of(path)
    assert len(told) < 6_000
    begun = [line["serial"] for line in told if line["state"] == "committed"]
    gone = [line["serial"] for line in told if line["state"] == "gone"]
    assert begun[: len(gone)] == gone and len(begun) - len(gone) <= 1


def test_the_slowest_look_between_two_lines_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    times = RankTimes(side(path), every=50)
    for step in range(50, 1_000_001, 50):
        slow = 9.0 if step == 765_400 else 0.1
        clock = 0.0 if step == 765_450 else 100 / slow  # unknown for once
        times.note(
            step,
            [
                RankPace(host=0.1, device=0.01, step=0.2, gpu=(70.0, 600.0, 10 * slow, 2000.0)),
                RankPace(host=slow, device=1e-3, step=1, gpu=(70.0, 600.0, 60.0, clock)),
            ],
        )
    times.close()
    told = lines_of(path)
    assert len(told) < 5_000, "one each 50 steps would be 20,000"
    assert max(line["own_seconds"][1] for line in told) == 9.0
    assert max(line["gpu_celsius"][0] for line in told) == 90.0
    assert min(line["gpu_mhz"][1] for line in told) == pytest.approx(100 / 9, rel=1e-3)
    assert told[0]["step"] == 50 and told[0]["device_seconds"] == [0.01, 0.001]


def test_many_ranks_share_numbers(tmp_path: Path) -> None:
    path = tmp_path / "ranks.jsonl"
    times = RankTimes(side(path), every=50)
    paces = [RankPace(host=float(rank == 777), device=0.0, step=0.0) for rank in range(1000)]
    times.note(50, paces)
    times.close()
    (told,) = lines_of(path)
    assert (told["ranks"], told["ranks_a_value"], len(told["own_seconds"])) == (1000, 4, 250)
    assert "gpu_gib" not in told
    assert told["own_seconds"][777 // 4] == 1.0 and sum(told["own_seconds"]) == 1.0
