"""A rank dies in a guarded script: the restart goes on, and the journal says who died and how."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.rows import full
from tests.run import read_lines
from tests.script_run import ends_of

SCRIPT = "crashing_script.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("undisturbed")
    return ends_of(SCRIPT, out, str(out))


@pytest.mark.parametrize(
    ("rank", "how", "words"),
    [
        full("1", "kill", r"rank 1: killed by SIGKILL"),
        ("1", "raise", r"rank 1: ValueError: the tokens of this batch are out of range .*:\d+ die"),
        full("0", "kill", r"rank 0: killed by SIGKILL"),
        full("0", "raise", r"rank 0: ValueError: the tokens"),
    ],
)
def test_the_journal_says_who_died_and_how(
    tmp_path: Path, undisturbed: list[dict[str, Any]], rank: str, how: str, words: str
) -> None:
    assert ends_of(SCRIPT, tmp_path, str(tmp_path), rank, how, restarts=1) == undisturbed
    lines = read_lines(tmp_path / "run" / "journal.jsonl")
    [crash] = [line for line in lines if line["kind"] == "crash"]
    assert crash["ranks"] == [int(rank)], crash
    assert re.match(words, crash["reason"]), crash["reason"]
    assert crash["detail"]["incarnation"] == 1
    starts = [line for line in lines if line["kind"] == "start"]
    assert len(starts) == 2 and starts[1]["step"] > 0
