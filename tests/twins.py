"""The twins of the crash and hang drills: the same drills where no collective breaks, as over NCCL.

    python -m tests.twins                              # all of them: an hour and more
    python -m tests.twins tests/drills/test_slurm.py   # those of some files; pytest's -k works
    python -m tests.twins --list                       # when each was run last, and how it ended

Most twins are left out of the default suite (``@pytest.mark.twin``, ``tests/drills/conftest.py``).
This runs them and keeps in ``tests/records/twins.json`` when each was run last, at which commit,
and how it ended, after every drill, so that a run that is ended early leaves what it has seen.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests/records/twins.json"
COMMAND = "python -m tests.twins"
NEVER = "never run"
_DRILLS = "tests/drills"


def is_twin(item: pytest.Item) -> bool:
    """Whether it is the row of a drill in which no collective breaks."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("_breaks") is False


class Recorder:
    """A plugin of pytest: keeps the twins only, and the outcome of each.

    Args:
        record: the JSON file that outcomes are added to; None: none is kept.
    """

    def __init__(self, record: Path | None) -> None:
        self._record = record
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}
        self.names: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        others = [item for item in items if not is_twin(item)]
        items[:] = [item for item in items if is_twin(item)]
        config.hook.pytest_deselected(items=others)
        self.names = [item.nodeid for item in items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.outcome != "passed" or report.when == "call":
            # What failed in its call stays failed, whatever its teardown says.
            self._outcomes.setdefault(name, report.outcome)
            if report.failed:
                self._outcomes[name] = report.outcome
        if report.when == "teardown" and self._record is not None:
            _add(self._record, name, self._outcomes[name], self._seconds[name])


def read_record(record: Path) -> dict[str, dict[str, object]]:
    """Twin's name to what is known of its last run: outcome, date, commit, seconds."""
    if not record.exists():
        return {}
    twins: dict[str, dict[str, object]] = json.loads(record.read_text())["twins"]
    return twins


def _add(record: Path, name: str, outcome: str, seconds: float) -> None:
    now = {
        "outcome": outcome,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "seconds": round(seconds, 1),
    }
    with Path(__file__).open() as lock:  # another session may run other files
        fcntl.flock(lock, fcntl.LOCK_EX)
        twins = read_record(record) | {name: now}
        whole = {"command": COMMAND, "twins": dict(sorted(twins.items()))}
        record.write_text(json.dumps(whole, indent=1) + "\n")


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main(arguments: Sequence[str]) -> int:
    recorder = Recorder(None if "--list" in arguments else RECORD)
    options = [word for word in arguments if word != "--list"]
    if not any(word.startswith("tests") for word in options):
        options.append(_DRILLS)
    if "--list" not in arguments:
        return pytest.main(["--full", *options], plugins=[recorder])
    code = pytest.main(["--full", "--collect-only", "-qq", *options], plugins=[recorder])
    twins = read_record(RECORD)
    for name in recorder.names:
        last = twins.get(name)
        when = NEVER if last is None else f"{last['date']} {last['outcome']}"
        print(f"{when:20} {name}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
