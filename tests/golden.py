"""Texts that users read, in one file: a better sentence is a diff to read, and no broken test.

    python -m tests.golden --write              # makes tests/records/messages.json anew
    python -m tests.golden --write TEST...      # what these tests say of it; pytest's arguments

A test calls :func:`same` with the text; what it is about (the key, the kind, the numbers) it
compares itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "records" / "messages.json"
WRITE = "HOLDFAST_GOLDEN_WRITE"
_TEMPORARY = re.compile(r"/[^\s'\"=]*?/pytest-\d+/[\w.-]+?\d(?=[/\s'\":,;)]|$)")
_calls: Counter[str] = Counter()


def same(text: str) -> None:
    """The text is what the record has of this test; a folder of the test is called TMP in it."""
    test = os.environ["PYTEST_CURRENT_TEST"].removeprefix("tests/").removesuffix(" (call)")
    _calls[test] += 1
    key = test if _calls[test] == 1 else f"{test} {_calls[test]}"
    text = _TEMPORARY.sub("TMP", text)
    if os.environ.get(WRITE):
        _store(key, text)
        return
    known = json.loads(RECORD.read_text())
    assert text == known.get(key), (
        "if it is meant: python -m tests.golden --write, and see the diff"
    )


def _store(key: str, text: str) -> None:
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    known[key] = text
    RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    """Run the tests that compare texts, and keep what they say."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.golden")
    parser.add_argument("--write", action="store_true", help="make the record anew")
    parser.add_argument("tests", nargs="*", help="pytest's arguments; none: all that compare texts")
    options, more = parser.parse_known_args()
    if not options.write:
        parser.error("only --write does something; the tests themselves compare")
    tests = [*options.tests, *more]
    if not tests:
        files = (ROOT / "tests").rglob("test_*.py")
        tests = [str(path) for path in files if "golden." in path.read_text()]
        RECORD.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {WRITE: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
