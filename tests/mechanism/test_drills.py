"""What holds of the drills as a whole."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    claim = re.compile(r"assert .*(?:monotonic|perf_counter)\(\) - \w+ [<>]")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for line in path.read_text().splitlines()
        if claim.search(line) and "timeout" not in line
    ]
    assert found == []


LOSES_A_RANK = re.compile(r"\b(?:kill|abort|raise|stop|hang|skip_collective)@[^\"]*\brank=")
NOBODY_WAITS = re.compile(r"\branks=[01]\b")  # it is alone


def drills() -> Iterator[tuple[str, str]]:
    """Name and source of each, with what decorates it."""
    for path in sorted(DRILLS.glob("test_*.py")):
        source = path.read_text()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                whole = [ast.unparse(one) for one in node.decorator_list]
                whole.append(ast.get_source_segment(source, node) or "")
                yield f"{path.name}::{node.name}", "\n".join(whole)


def test_where_a_rank_dies_or_hangs_no_collective_breaks_either() -> None:
    """A drill over gloo alone passes thanks to what NCCL does not do: see ``_breaks``."""
    losing = [(name, text) for name, text in drills() if LOSES_A_RANK.search(text)]
    without = [
        name
        for name, text in losing
        if "pytest.mark.twin" not in text and not NOBODY_WAITS.search(text)
    ]
    assert len(losing) > 20 and without == []
