"""What grows with ranks, by counts and bytes, never by seconds: see docs/scale.md."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from runner.checkpoint.disk.shards import collect_indexes, write_index
from runner.checkpoint.manifest import FileFacts
from runner.health.rank_report import read_all_reports, write_node
from runner.health.root_cause import find_root_cause
from tests.crash_reports import RANKS_PER_NODE, report
from tests.stored import manifest

ROOT = Path(__file__).parents[2]
_SHAPES = {f"param/blocks.{at}.weight": (4096, 8) for at in range(8)}


def _manifest_bytes(folder: Path, world_size: int) -> int:
    """Of a save in which each rank has the same rows of each tensor."""
    folder.mkdir()
    names = sorted(_SHAPES)
    count = 4096 * 8 // world_size
    for rank in range(world_size):
        pieces = np.array([(at, rank * count, count) for at in range(len(names))])
        facts = FileFacts(num_bytes=4 * count * len(names), sha256="0" * 64)
        write_index(folder, rank, facts, pieces)
    layout, files = collect_indexes(folder, names, world_size)
    made = manifest(world_size=world_size, shapes=_SHAPES, files=files, runs=layout.runs)
    return len(json.dumps(made.to_json()))


def test_a_save_grows_no_faster_than_its_files(tmp_path: Path) -> None:
    few, many = (_manifest_bytes(tmp_path / str(n), n) for n in (64, 256))
    assert many < 4 * few


def test_a_crash_report_grows_with_the_ranks_and_no_faster(tmp_path: Path) -> None:
    world_size, absent = 256, 85
    for first in range(0, world_size, RANKS_PER_NODE):
        ranks = range(first, first + RANKS_PER_NODE)
        reports = [report(rank, world_size, absent=absent) for rank in ranks]
        write_node(tmp_path, first, [replace(one, time=1.7e9 + one.rank) for one in reports])
    files = list(tmp_path.iterdir())
    assert len(files) == world_size // RANKS_PER_NODE
    assert sum(path.stat().st_size for path in files) < 2_500 * world_size
    cause = find_root_cause(read_all_reports(tmp_path), world_size)
    assert cause.ranks == (absent,) and cause.kind == "absent", cause.reason


def test_the_page_is_of_the_ranks_that_the_runner_allows() -> None:
    rows = json.loads((ROOT / "docs" / "scale.json").read_text())["rows"]
    sizes = [row["ranks"] for row in rows]
    page = (ROOT / "docs" / "records" / "scale.md").read_text()
    assert all(f"\n| {size:,} | " in page for size in sizes)
    schema = (ROOT / "runner" / "config" / "schema.py").read_text()
    allowed = re.search(r"max_ranks: int = key\(\s*(\d+)", schema)
    assert allowed is not None and int(allowed[1]) == max(sizes)
