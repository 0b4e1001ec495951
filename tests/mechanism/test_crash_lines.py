"""What the next start journals for incarnations that ended without a line of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.health.cause_reporter import unexplained
from runner.health.rank_report import Report, write_report
from runner.run_dir.paths import RunDir


def start(number: int) -> dict[str, Any]:
    return {"kind": "start", "detail": {"incarnation": number, "world_size": 2}}


def test_each_incarnation_is_told_once(tmp_path: Path) -> None:
    """Whatever ranks have reports: their numbers are no numbers of incarnations."""
    run_dir = RunDir(tmp_path)
    run_dir.create()
    for number in (1, 3):
        for rank in (0, 1):
            report = Report(
                rank=rank, world_size=2, kind="exception", step=number * 10, phase="compute",
                message=f"ValueError: {number}",
            )  # fmt: skip
            write_report(run_dir.incident(number), report)
    told = {"kind": "crash", "detail": {"incarnation": 4}}
    lines = [*map(start, range(1, 6)), told]
    run_dir.incarnation.mkdir()
    (run_dir.incarnation / "000005.ended").touch()
    found = unexplained(run_dir, lines, 6)
    assert [(line.detail["incarnation"], line.step) for line in found] == [(1, 10), (2, 1), (3, 30)]
    assert "without a report" in found[1].reason
