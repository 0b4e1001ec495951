"""What holds of the drills as a whole."""

from __future__ import annotations

from pathlib import Path

from tests.run import TINY

DRILLS = Path(__file__).parents[1] / "drills"
OFF = "eval.every=0"


def test_most_drills_evaluate() -> None:
    """A fault must find evaluation beside it, as in a real run; a few drills are to be without."""
    files = sorted(DRILLS.glob("test_*.py"))
    without = [path.name for path in files if OFF in path.read_text()]
    assert OFF not in TINY
    assert len(without) < len(files) / 2, without
