"""What grows with ranks, by counts and bytes, never by seconds: see docs/scale.md.

The sizes that the page tells of are behind ``--full``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runner.checkpoint.disk.tier import DiskTier
from scripts.scale import manifest, reports, roll_call
from scripts.scale.__main__ import markdown
from scripts.scale.roll_call import in_child, result_of

ROOT = Path(__file__).parents[2]
MANY = [pytest.param(number, marks=pytest.mark.full) for number in (4096, 16384)]


@pytest.mark.parametrize("world_size", [64, *MANY])
def test_the_roll_call(world_size: int) -> None:
    told = roll_call.measure(world_size, seconds=600.0)
    assert told["failures"] == [] and told["num_told"] == world_size
    if told["bytes"] is not None:
        assert told["bytes"] < 7_500 * world_size, "no more on each rank where there are more"


def test_a_save_grows_no_faster_than_its_files() -> None:
    few, many = (
        result_of(in_child(lambda n=n: manifest.measure(n, size="tiny"))) for n in (64, 256)
    )
    assert many["pieces"] > 3 * few["pieces"]
    assert many["manifest_bytes"] < 4 * few["manifest_bytes"]
    assert many["files_a_rank_needs"] == few["files_a_rank_needs"] == 2


@pytest.mark.full
@pytest.mark.parametrize("world_size", [4096, 16384])
def test_a_save_of_eight_billion_parameters(world_size: int) -> None:
    told = result_of(in_child(lambda: manifest.measure(world_size, size="8b")))
    assert told["manifest_bytes"] < 400 * world_size and told["files_a_rank_needs"] == 2


@pytest.mark.parametrize("world_size", [256, *MANY])
def test_a_crash_report(world_size: int) -> None:
    told = result_of(in_child(lambda: reports.measure(world_size)))
    assert told["files_for_rank_0"] == world_size // reports.RANKS_PER_NODE
    assert told["bytes_for_rank_0"] < 2_500 * world_size


def test_every_row_of_the_page_is_of_the_format_that_so_many_ranks_use() -> None:
    """Indexes were once measured on 256 ranks, which used none: 0.15 MB where 17 were read."""
    rows = json.loads((ROOT / "docs" / "scale.json").read_text())["rows"]
    assert min(row["ranks"] for row in rows) > DiskTier.most_listed
    with pytest.raises(AssertionError, match="no indexes"):
        manifest.measure(DiskTier.most_listed, size="1b")


def test_the_page_shows_the_measured_table() -> None:
    text = (ROOT / "docs" / "scale.md").read_text()
    measured = json.loads((ROOT / "docs" / "scale.json").read_text())
    assert markdown(measured["rows"]) in text
    assert measured["command"].replace("python", "", 1) in text
    most = max(row["ranks"] for row in measured["rows"])
    allowed = re.search(r"max_ranks: int = key\(\s*(\d+)", _schema())
    assert allowed is not None and int(allowed[1]) == most


def _schema() -> str:
    return (ROOT / "runner" / "config" / "schema.py").read_text()
