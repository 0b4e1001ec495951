"""Reports of many ranks: a folder for each node, and one file that combines them.

    out/incidents/000003/node-00096/rank-00097.json   as among few ranks
    out/incidents/000003/node-00096.json              all reports of that node, shortened

A node is named after its first rank. Its leader, the lowest rank that has a report, writes the
file. So only the ranks of one node list or read a file for each rank; the cause comes from one
file a node. In it stand the training thread's stack and the collectives from shortly before the
first unfinished one on, and what several ranks have in common stands once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.health.rank_report import Report, read_reports, stored_entries
from runner.system.files import read_bounded, write_durably
from runner.system.parsing import json_text
from runner.system.redact import redacted

FROM_RANKS = 65  # with fewer ranks each report stays in a file of its own
_FILE_BYTES = 1 << 27
_BEFORE = 16  # collectives kept before the first unfinished one, in each group
_MOST_ENTRIES = 64  # of one rank


def node_folder(folder: Path, first_rank: int) -> Path:
    return folder / f"node-{first_rank:05d}"


def node_file(folder: Path, first_rank: int) -> Path:
    return folder / f"node-{first_rank:05d}.json"


def reported_nodes(folder: Path) -> list[int]:
    """First ranks of the nodes whose file exists. Reads file names only."""
    stems = [path.stem.removeprefix("node-") for path in folder.glob("node-*.json")]
    return sorted(int(stem) for stem in stems if stem.isdigit())


def merge_node(folder: Path, first_rank: int) -> None:
    """Write the file of a node out of the reports in its folder."""
    write_node(folder, first_rank, read_reports(node_folder(folder, first_rank)))


def write_node(folder: Path, first_rank: int, reports: Sequence[Report]) -> None:
    """Write the file of a node: these reports, shortened."""
    stacks, lists = _Table(), _Table()
    listed = []
    for report in reports:
        frames = [stack for stack in report.stacks if stack["thread"] == "MainThread"]
        tree = redacted(replace(report, stacks=[], collectives=[]).to_json())
        about = (stacks.place(redacted({"of": frames})["of"]), lists.place(_shortened(report)))
        listed.append({"report": tree, "stacks": about[0], "collectives": about[1]})
    merged = {"reports": listed, "stacks": stacks.values, "collectives": lists.values}
    data = json_text(merged, is_compact=True).encode() + b"\n"
    write_durably(node_file(folder, first_rank), data)


def read_all_reports(folder: Path) -> list[Report]:
    """The readable reports of an incident, one a rank, however many ranks there were."""
    by_rank = {report.rank: report for report in read_reports(folder)}
    merged = set(reported_nodes(folder))
    for path in sorted(folder.glob("node-*.json")):
        for report in _read_node(path):
            by_rank.setdefault(report.rank, report)
    for path in folder.glob("node-*/"):
        stem = path.name.removeprefix("node-")
        if path.is_dir() and not (stem.isdigit() and int(stem) in merged):
            for report in read_reports(path):  # its leader did not come to it
                by_rank.setdefault(report.rank, report)
    return [by_rank[rank] for rank in sorted(by_rank)]


class _Table:
    """A table of distinct values."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        text = json.dumps(value, sort_keys=True)
        if text not in self._places:
            self._places[text] = len(self.values)
            self.values.append(value)
        return self._places[text]


def _shortened(report: Report) -> list[dict[str, Any]]:
    """The report with collectives from shortly before the first unfinished one of each group on.

    It begins earlier because another rank's first unfinished one may be earlier.
    """
    groups: dict[str, list[int]] = {}
    for at, entry in enumerate(report.collectives):
        groups.setdefault(str(entry["group"]), []).append(at)
    lengths: list[int] = []
    for places in groups.values():
        unfinished = (n for n, at in enumerate(places) if not report.collectives[at]["finished"])
        first = max(0, next(unfinished, len(places)) - _BEFORE)
        lengths += places[first : first + _MOST_ENTRIES]
    return [dict(report.collectives[at]) for at in sorted(lengths)]


def _read_node(path: Path) -> Sequence[Report]:
    try:
        tree = json.loads(read_bounded(path, _FILE_BYTES))
        lists = [stored_entries(entries) for entries in tree["collectives"]]
        return [
            replace(
                Report.from_json({**one["report"], "stacks": tree["stacks"][one["stacks"]]}),
                collectives=lists[one["collectives"]],
            )
            for one in tree["reports"]
        ]
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return []  # torn
