"""What trains imports no tools, and nothing that ``scripts.size`` does not count as its core."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import size
from tests.run import train

_IMPORTED = re.compile(r"^import time:.*\|\s+(runner[\w.]*)$", re.MULTILINE)
_LISTED = {"PYTHONPROFILEIMPORTTIME": "1"}


def _outside(text: str) -> set[str]:
    """The modules of ours that a process imported, and that are not of the core."""
    imported = set(_IMPORTED.findall(text))
    assert "runner.system.error" in imported, "nothing is listed"
    core = size.core({name: ast.parse(source) for name, source in size.modules().items()})
    assert "runner.train.loop" in core and not any(name.startswith("runner.tools") for name in core)
    return imported - core - {"runner"}


pytestmark = pytest.mark.full  # the import contract says the same of what is written


def test_a_training_process_imports_no_tools(tmp_path: Path) -> None:
    """Not at its start, nor where it evaluates, has its curve read and its page written."""
    run = train(
        tmp_path / "run", "steps=120", "eval.every=40", "eval.samples=8", "optim.lr=1e-6",
        "track.report_minutes=0", ranks=0, cold=True, env=_LISTED,
    )  # fmt: skip
    assert run.code == 0, run.tail
    assert len(run.journal("reading")) == 1 and (run.out / "report.html").exists()
    assert _outside(run.text) == set()


def test_a_users_loop_imports_no_tools() -> None:
    program = "from runner import Guard, Ring, Sampler"
    listed = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=os.environ | _LISTED
    )
    assert listed.returncode == 0, listed.stderr[-2000:]
    assert _outside(listed.stderr) == set()
