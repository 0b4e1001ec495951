"""What holds of the drills as a whole."""

from __future__ import annotations

import re
from pathlib import Path

from tests.run import TINY

TESTS = Path(__file__).parents[1]
DRILLS = TESTS / "drills"
OFF = "eval.every=0"


def test_most_drills_evaluate() -> None:
    """A fault must find evaluation beside it, as in a real run; a few drills are to be without."""
    files = sorted(DRILLS.glob("test_*.py"))
    without = [path.name for path in files if OFF in path.read_text()]
    assert OFF not in TINY
    assert len(without) < len(files) / 2, without


def test_none_asserts_how_long_something_took() -> None:
    """A machine that does other work makes it fail. Waiting with a generous limit is no claim."""
    claim = re.compile(r"assert .*(?:monotonic|perf_counter)\(\) - \w+ <")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for line in path.read_text().splitlines()
        if claim.search(line) and "timeout" not in line
    ]
    assert found == []
