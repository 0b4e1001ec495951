"""Makes the writers of the files beside the metrics; on rank 0 only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runner.checkpoint.ring import Ring
from runner.observe.journal import Journal
from runner.observe.side_lines import RankTimes, RingLines, SideLines
from runner.session.group import RankGroup
from runner.session.phases import Lease


def ring_lines(lease: Lease, group: RankGroup, ring: Ring, journal: Journal) -> RingLines | None:
    """For ``out/ring.jsonl``."""
    if not group.is_first:
        return None
    return RingLines(
        _side_lines(group.run_dir.ring_lines, lease, lambda: journal.attempt),
        records=lambda: ring.records,
        stored=lambda: ring.uploads.stored if ring.uploads else (),
    )


def rank_times(lease: Lease, group: RankGroup, journal: Journal) -> RankTimes | None:
    """Make the writer of ``out/ranks.jsonl``; None also if speeds are not compared."""
    every = lease.config.watchdog.straggler_every
    if not group.is_first or not every:
        return None
    lines = _side_lines(group.run_dir.rank_times, lease, lambda: journal.attempt)
    return RankTimes(lines, every=every)


def _side_lines(path: Path, lease: Lease, attempt: Callable[[], int]) -> SideLines:
    return SideLines(path, check=lease.run_lease.check, attempt=attempt)
