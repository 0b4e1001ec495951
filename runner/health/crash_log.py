"""Journal lines for crashes, written by a survivor at once or by the next start from the disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from runner.health.node_reports import read_all_reports
from runner.health.rank_report import Report, read_fatal_log
from runner.health.root_cause import RootCause, find_root_cause
from runner.policy.decision.history import Incident
from runner.run_dir.lease import has_ended, oldest_number
from runner.run_dir.paths import RunDir
from runner.system.json_lines import last_line, step_of


def crash_incident(cause: RootCause, number: int) -> Incident:
    """The journal line for the crash of incarnation ``number``."""
    first = cause.first
    return Incident(
        kind="crash",
        step=cause.step,
        decision="restart from the ring",
        reason=cause.reason,
        ranks=cause.ranks,
        detail={
            "incarnation": number,
            "cause": cause.kind,
            "signature": cause.signature,
            "host": first.host if first else "",
            "traceback": first.traceback if first else "",
        },
    )


def unexplained(run_dir: RunDir, lines: list[dict[str, Any]], number: int) -> list[Incident]:
    """Lines for incarnations before ``number`` that crashed and have no line yet."""
    journalled = {line["detail"].get("incarnation") for line in lines if line["kind"] == "crash"}
    starts = {line["detail"].get("incarnation"): line for line in lines if line["kind"] == "start"}
    incidents = []
    # Incarnations before the oldest claim wrote to another directory, which was lost.
    for earlier in range(oldest_number(run_dir.incarnation), number):
        if earlier in journalled or has_ended(run_dir.incarnation, earlier):
            continue
        world_size = _world_size(starts.get(earlier))
        reports = read_all_reports(run_dir.incident(earlier))
        by_rank = {report.rank: report for report in reports}
        next_step = _last_step(run_dir) + 1  # it died in the step after the last one journalled
        for report in _fatal_reports(run_dir, earlier, world_size, next_step):
            by_rank.setdefault(report.rank, report)
        cause = find_root_cause(list(by_rank.values()), world_size)
        incidents.append(crash_incident(replace(cause, step=cause.step or next_step), earlier))
    return incidents


def clear_fatal_logs(run_dir: RunDir, number: int) -> None:
    """Remove the fatal logs of incarnations before ``number``: the journal has them by now."""
    for path in run_dir.debug.glob("fatal-*.txt"):
        if not path.name.startswith(f"fatal-{number:06d}-"):
            path.unlink(missing_ok=True)


def _world_size(start: Mapping[str, Any] | None) -> int:
    return int(start["detail"].get("world_size", 1)) if start else 1


def _fatal_reports(run_dir: RunDir, number: int, world_size: int, step: int) -> Iterable[Report]:
    for path in sorted(run_dir.debug.glob(f"fatal-{number:06d}-rank-*.txt")):
        rank = path.stem.rpartition("-")[2]
        if not (rank.isascii() and rank.isdecimal()) or int(rank) >= world_size:
            continue
        seen = Report(
            rank=int(rank), world_size=world_size, kind="fatal", step=step, phase="some phase"
        )
        report = read_fatal_log(path, seen)
        if report is not None:
            yield report


def _last_step(run_dir: RunDir) -> int:
    return step_of(last_line(run_dir.metrics) or {})
