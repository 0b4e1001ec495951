"""The rows of ``--full`` over several sittings: what is run first, and what is kept of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import full
from tests.full import Fate, read_record, read_total, tiers, warning, write_record

ROOT = Path(__file__).parents[2]
FATES = {
    "tests/test_a.py::test_new[x y]": Fate("passed", "ccc", 3),
    "tests/test_a.py::test_older": Fate("passed", "bbb", 0),
    "tests/test_b.py::test_bad": Fate("failed", "ccc", 12),
    "tests/test_b.py::test_old[a::b]": Fate("skipped", "aaa", 1),
}
AGES = {"aaa": 301, "bbb": 7, "ccc": 0}


def test_failed_rows_come_first_then_new_ones_then_the_oldest() -> None:
    bad, new, old = (
        "tests/test_b.py::test_bad", "tests/test_c.py::test_it", "tests/test_b.py::test_old[a::b]",
    )  # fmt: skip
    order = tiers([*FATES, new], FATES, AGES)
    assert order == [[bad], [new], [old], ["tests/test_a.py::test_older"]]


def test_the_record_has_a_line_a_row(tmp_path: Path) -> None:
    record = tmp_path / "full.json"
    assert read_record(record) == {}
    write_record(record, FATES, 9)
    assert read_record(record) == FATES and read_total(record) == 9
    assert len([line for line in record.read_text().splitlines() if "::" in line]) == 1
    assert (
        sum("test_" in line and ".py" not in line for line in record.read_text().splitlines()) == 4
    )


def test_what_failed_or_is_old_is_warned_of() -> None:
    words = "of 6 rows of --full 1 failed when last run, 1 were last run more than 300 commits ago"
    assert f"{words}, and 2 never were" in warning(FATES, AGES, 6)
    young = {name: fate for name, fate in FATES.items() if fate.outcome == "passed"}
    assert not warning(young, AGES, len(young))
    assert "3 never were" in warning(young, AGES, len(young) + 3)
    unknown = {"tests/test_a.py::test_it": Fate("passed", "gone", 1)}
    assert not warning(unknown, {"gone": full._UNKNOWN}, 1), "a clone without the history"


ROWS = """
import pytest
from pathlib import Path

@pytest.mark.full
@pytest.mark.parametrize("which", ["a", "b c"])
def test_row(which):
    assert not Path("fails").exists() or which == "a"

def test_always():
    assert False, "not a row of --full"
"""
CONFTEST = """
from tests import share
pytest_collection = share.pytest_collection
pytest_make_collect_report = share.pytest_make_collect_report
pytest_runtestloop = share.pytest_runtestloop

def pytest_addoption(parser):
    parser.addoption("--full", action="store_true")
    share.pytest_addoption(parser)
"""


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def sit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.full", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def fates(folder: Path) -> dict[str, str]:
    """By the row's parameter."""
    known = read_record(folder / "tests/records/full.json")
    return {name.partition("[")[2]: fate.outcome for name, fate in known.items()}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_row_is_kept_with_its_commit_and_only_of_a_clean_tree(tmp_path: Path) -> None:
    (tmp_path / "tests/records").mkdir(parents=True)
    for name in ("__init__.py", "full.py", "side_by_side.py", "share.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    (tmp_path / "tests/test_rows.py").write_text(ROWS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra -p no:cacheprovider")
    (tmp_path / ".gitignore").write_text("__pycache__")
    (tmp_path / "fails").touch()
    git(tmp_path, "init", "-q")
    assert "commit them first" in sit(tmp_path).stdout and not fates(tmp_path)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    done = sit(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert fates(tmp_path) == {"a]": "passed", "b c]": "failed"}, done.stdout
    assert "failed: tests/test_rows.py::test_row[b c]" in done.stdout
    again = sit(tmp_path)
    assert "1 of 2 rows passed" in again.stdout and "test_row[a]" not in again.stdout
    git(tmp_path, "rm", "-q", "fails")
    git(tmp_path, "commit", "-qam", "two")
    last = sit(tmp_path, "row[b c")
    assert last.returncode == 0, last.stdout
    assert fates(tmp_path) == {"a]": "passed", "b c]": "passed"}
    listed = sit(tmp_path, "--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["passed", "passed"]
    assert listed[0].endswith("[a]"), "the older one is due first"
