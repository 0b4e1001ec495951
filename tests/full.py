"""The rows of tests that ``--full`` alone runs, over several sittings.

    python -m tests.full --minutes 60     # failed rows, then new ones, then the oldest, for an hour
    python -m tests.full "nothing breaks" # of rows with a text in their names: of all twins
    python -m tests.full --list           # in that order, with what is known of each
    python -m tests.full --old            # a warning if some are old or failed; in scripts/check.sh

``tests/records/full.json`` keeps of each row how it ended, at which commit, and its seconds. It is
written after every row, so that a sitting may be ended at any time; commit it afterwards. Without
``--minutes`` a sitting ends when all rows have passed at this commit. Two files run at a time.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from tests.side_by_side import run_sessions

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests/records/full.json"
OLD_COMMITS = 300
SESSIONS = 2
_UNKNOWN = 10**9  # commits: this history does not have it


@dataclass(frozen=True)
class Fate:
    """How a row ended last: "passed", "skipped" or "failed"."""

    outcome: str
    commit: str
    seconds: int

    def __str__(self) -> str:
        return f"{self.outcome} {self.commit} {self.seconds}"

    @classmethod
    def of(cls, text: str) -> Fate:
        outcome, commit, seconds = text.split()
        return cls(outcome, commit, int(seconds))


Fates = Mapping[str, Fate]


def read_record(record: Path) -> dict[str, Fate]:
    """By the row's name."""
    if not record.exists():
        return {}
    files = json.loads(record.read_text())["rows"]
    return {f"{file}::{row}": Fate.of(text) for file in files for row, text in files[file].items()}


def read_total(record: Path) -> int:
    """How many rows there were when they were last collected; 0 if never."""
    return int(json.loads(record.read_text()).get("total", 0)) if record.exists() else 0


def write_record(record: Path, fates: Fates, total: int) -> None:
    """A line a row, by file; ``total``: of all rows, also of those that were never run."""
    files: dict[str, dict[str, str]] = {}
    for name in sorted(fates):
        file, _, row = name.partition("::")
        files.setdefault(file, {})[row] = str(fates[name])
    text = json.dumps({"command": "python -m tests.full", "total": total, "rows": files}, indent=0)
    record.write_text(text + "\n")


def tiers(names: Iterable[str], fates: Fates, ages: Mapping[str, int]) -> list[list[str]]:
    """Rows in the order in which they are due, those due alike together.

    Args:
        ages: of each commit in ``fates``, the commits since; a row that passed 0 ago is not due.
    """

    def rank(name: str) -> tuple[int, int]:
        fate = fates.get(name)
        if fate is None:
            return 1, 0
        return (0, 0) if fate.outcome == "failed" else (2, -ages[fate.commit])

    due = sorted((name for name in names if rank(name) != (2, 0)), key=rank)
    return [list(rows) for _, rows in groupby(due, key=rank)]


# The repository


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def clean_commit() -> str | None:
    """The commit whose files these are; None if some differ, the record aside."""
    record = RECORD.relative_to(ROOT)
    if _git("status", "--porcelain", "--", ".", f":!{record}"):
        return None
    return _git("rev-parse", "--short", "HEAD")


def commits_since(fates: Fates) -> dict[str, int]:
    """The age of each commit in the record."""
    ages = {}
    for commit in {fate.commit for fate in fates.values()}:
        try:
            ages[commit] = int(_git("rev-list", "--count", f"{commit}..HEAD"))
        except (OSError, subprocess.CalledProcessError):
            ages[commit] = _UNKNOWN
    return ages


# A plugin of pytest: some rows only, and the outcome of each


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--due", type=Path, help="a file with the rows to run, their commit and time")


def pytest_configure(config: pytest.Config) -> None:
    due: Path | None = config.getoption("--due")
    if due is not None:
        config.pluginmanager.register(Recorder(**json.loads(due.read_text())))


class Recorder:
    """Runs ``names`` at ``commit`` until ``stop_at``, in seconds since the epoch."""

    def __init__(self, names: Sequence[str], commit: str, stop_at: float | None) -> None:
        self._names = frozenset(names)
        self._commit = commit
        self._stop_at = stop_at
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # With --share modules come here first, without their items.
        items[:] = [
            item
            for item in items
            if not isinstance(item, pytest.Item) or item.nodeid in self._names
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.outcome != "passed" or report.when == "call":
            # What failed in its call stays failed, whatever its teardown says.
            self._outcomes.setdefault(name, report.outcome)
            if report.failed:
                self._outcomes[name] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        fate = Fate(self._outcomes[nodeid], self._commit, round(self._seconds[nodeid]))
        if clean_commit() != self._commit:
            pytest.exit("the files are no longer those of the commit; nothing more is recorded", 3)
        with Path(__file__).open() as lock:  # the other session writes too
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_record(RECORD, read_record(RECORD) | {nodeid: fate}, read_total(RECORD))
        if self._stop_at is not None and time.time() > self._stop_at:
            pytest.exit("the time of this sitting is over", 0)


class _Collected:
    """The names of all rows that ``--full`` alone runs."""

    names: Sequence[str] = ()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.names = [item.nodeid for item in items if item.get_closest_marker("full")]


def collected(words: Sequence[str]) -> list[str]:
    """All such rows that have one of the words in their names."""
    plugin = _Collected()
    quiet = ["-p", "no:terminal", "--override-ini=addopts="]  # whose options are the terminal's
    code = pytest.main(["--full", "--collect-only", *quiet, "tests"], plugins=[plugin])
    if code:
        raise SystemExit(f"error: the tests cannot be collected (pytest ended with {int(code)})")
    return [name for name in plugin.names if not words or any(word in name for word in words)]


def sit(names: Sequence[str], commit: str, stop_at: float | None) -> None:
    """One sitting."""
    fates = read_record(RECORD)
    for rows in tiers(names, fates, commits_since(fates)):
        if stop_at is not None and time.time() > stop_at:
            return
        share = Path(tempfile.mkdtemp(prefix="holdfast-full-"))
        try:
            due = share / "due.json"
            due.write_text(json.dumps({"names": rows, "commit": commit, "stop_at": stop_at}))
            files = list(dict.fromkeys(name.partition("::")[0] for name in rows))
            options = ["--full", "-p", "tests.full", f"--due={due}", *files]
            run_sessions(options, share, sessions=SESSIONS)
        finally:
            shutil.rmtree(share, ignore_errors=True)


def warning(fates: Fates, ages: Mapping[str, int], total: int) -> str:
    """Empty if each of all rows was run, and none has failed or is old."""
    failed = sum(fate.outcome == "failed" for fate in fates.values())
    old = sum(OLD_COMMITS < ages[fate.commit] < _UNKNOWN for fate in fates.values())
    missing = max(0, total - len(fates))
    if not failed + old + missing:
        return ""
    return (
        f"warning: of {max(total, len(fates))} rows of --full {failed} failed when last run, {old} "
        f"were last run more than {OLD_COMMITS} commits ago, and {missing} never were: "
        "python -m tests.full --minutes 60"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", metavar="TEXT", help="rows with this in their names")
    parser.add_argument(
        "--minutes", type=float, help="of this sitting; by default until all passed"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and their fates")
    parser.add_argument("--old", action="store_true", help="warn if some failed or are old")
    options = parser.parse_args()
    fates = read_record(RECORD)
    ages = commits_since(fates)
    if options.old:
        line = warning(fates, ages, read_total(RECORD))
        print(line, end="\n" if line else "")
        return 0
    names = collected(options.words)
    if options.list:
        listed = [name for rows in tiers(names, fates, ages) for name in rows]
        for name in [*listed, *sorted(set(names) - set(listed))]:
            print(f"{fates.get(name, 'never run')!s:22} {name}")
        return 0
    commit = clean_commit()
    if commit is None:
        print("error: files differ from the commit, which the record names: commit them first")
        return 2
    if not options.words:  # rows that no longer are have no fate
        fates = {name: fates[name] for name in names if name in fates}
        write_record(RECORD, fates, len(names))
    sit(names, commit, None if options.minutes is None else time.time() + 60 * options.minutes)
    fates = read_record(RECORD)
    ages = commits_since(fates)
    rest = sum(map(len, tiers(names, fates, ages)))
    failed = [name for name in names if name in fates and fates[name].outcome == "failed"]
    print(f"{len(names) - rest} of {len(names)} rows passed at {commit}; {len(failed)} failed")
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
