"""What a start, a save and a crash of many ranks cost: real code, simulated ranks.

    python -m scripts.scale 256 1024 4096 16384 --json docs/scale.json --page docs/scale.md

``roll_call``  a process of 1,024 threads for each 1,024 ranks, each thread a rank with a connection
               of its own to one TCPStore
``agreement``  one rank's part of gathering a value from all, over torch's fake process group
``manifest``   rank 0's commit, and what one rank reads of it, over files that all ranks wrote
``start_watch``  what it costs the store that nodes show that they live while ranks connect
``reports``    what rank 0 reads and concludes after a crash
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.scale import agreement, manifest, reports, roll_call, start_watch
from scripts.scale.roll_call import in_child, result_of

_PARTS = ("roll_call", "start_watch", "agreement", "manifest", "reports")


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    rows = []
    for world_size in options.ranks:
        row: dict[str, Any] = {"ranks": world_size}
        rows.append(row)
        for part in options.parts.split(","):
            load = round(os.getloadavg()[0], 1)
            # Each in a process of its own: what one leaves behind is no cost of another.
            cost = result_of(in_child(lambda p=part, n=world_size: _measure(p, n, options)))
            row[part] = cost | {"load_before": load, "date": time.strftime("%Y-%m-%d")}
            print(world_size, part, json.dumps(row[part]), flush=True)
            if options.json is not None:
                record = _merged(options.json, arguments, rows)
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(markdown(rows))
    if options.page is not None:
        measured = rows if options.json is None else json.loads(options.json.read_text())["rows"]
        options.page.write_text(with_table(options.page.read_text(), measured))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.scale", description=__doc__)
    parser.add_argument("ranks", nargs="+", type=int)
    parser.add_argument("--json", type=Path, help="put the results into this file")
    parser.add_argument("--page", type=Path, help="put the table of the JSON file into this page")
    parser.add_argument("--parts", default=",".join(_PARTS))
    parser.add_argument("--model", default="8b", help="of the manifest: tiny, 8b or 70b")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of the roll call")
    return parser


def _measure(part: str, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    if part == "roll_call":
        return roll_call.measure(world_size, seconds=options.seconds)
    if part == "start_watch":
        return start_watch.measure(world_size)
    if part == "agreement":
        return agreement.measure(world_size)
    if part == "manifest":
        return manifest.measure(world_size, size=options.model)
    return reports.measure(world_size)


def _merged(path: Path, arguments: Sequence[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The file with these rows: sizes and parts that were not measured now stay as they were."""
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    by_ranks = {row["ranks"]: row for row in record.get("rows", [])}
    for row in rows:
        by_ranks[row["ranks"]] = by_ranks.get(row["ranks"], {}) | row
    record.setdefault("command", "python -m scripts.scale " + " ".join(arguments))
    return record | {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "torch": torch.__version__,
        "rows": [by_ranks[ranks] for ranks in sorted(by_ranks)],
    }


def with_table(page: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page with these rows in the place of the ones in its table."""
    first = page.index(_HEAD)
    last = page.index("\n\n", first)
    return page[:first] + markdown(rows) + page[last:]


_TITLES = (
    "ranks", "start, s", "rank 0, CPU s", "store, CPU s", "all ranks, CPU s",
    "simulator, CPU s", "MB", "gather, CPU s", "save, rank 0, s", "CPU s", "manifest, MB",
    "read, CPU s", "own part, CPU s", "crash, rank 0, s", "CPU s", "MB",
)  # fmt: skip
_HEAD = "| " + " | ".join(_TITLES) + " |"


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/scale.md; a dash where a part was left out or failed."""
    lines = [_HEAD, "|" + "---:|" * len(_TITLES)]
    for row in rows:
        cells = [f"{row['ranks']:,}", *(_cell(row, *place) for place in _PLACES)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


_MB = 1e-6
_PLACES: tuple[tuple[tuple[str, ...], float], ...] = (
    (("roll_call", "seconds"), 1),
    (("roll_call", "rank_0_cpu_seconds"), 1),
    (("roll_call", "server_cpu_seconds"), 1),
    (("roll_call", "all_ranks_cpu_seconds"), 1),
    (("roll_call", "simulator_cpu_seconds"), 1),
    (("roll_call", "bytes"), _MB),
    (("agreement", "cpu_seconds"), 1),
    (("manifest", "commit", "seconds"), 1),
    (("manifest", "commit", "cpu_seconds"), 1),
    (("manifest", "manifest_bytes"), _MB),
    (("manifest", "read", "cpu_seconds"), 1),
    (("manifest", "find own", "cpu_seconds"), 1),
    (("reports", "rank_0_seconds"), 1),
    (("reports", "rank_0_cpu_seconds"), 1),
    (("reports", "bytes_for_rank_0"), _MB),
)


def _cell(row: dict[str, Any], path: tuple[str, ...], factor: float) -> str:
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return "-" if not isinstance(value, int | float) else f"{value * factor:.3g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
