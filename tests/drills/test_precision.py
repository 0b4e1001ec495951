"""Runs of ``compute.precision=auto`` on machines that have BF16, or have not, or in part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.run import Result, finish, train

AUTO = ("compute.precision=auto", "checkpoint.memory_every=0")

# A processor with BF16 on the ranks of NATIVE, one without on the others.
PROGRAM = """
import os
from runner.session import inventory
from runner.__main__ import run

inventory.has_native_bf16 = lambda *_: os.environ.get("RANK", "0") in os.environ["NATIVE"]
run()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    made = tmp_path / "on_other_processors.py"
    made.write_text(PROGRAM)
    return made


def stored_precision(result: Result) -> str:
    found = re.search(r"precision: (\w+)", (result.out / "config.yaml").read_text())
    assert found is not None
    return found[1]


def test_a_run_of_bf16_goes_on_so_without_such_a_processor(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    finish(out, "compute.precision=bf16", "steps=5", "schedule.total=9", ranks=0)
    monkeypatch.setenv("NATIVE", "")
    ended = finish(out, *AUTO, "steps=9", ranks=0, program=program)
    assert "auto: bf16, as the run began, but the processor has no BF16" in ended.text
    assert stored_precision(ended) == "bf16" and ended.summary["steps"] == 9
    refused = train(out, "compute.precision=fp32", "steps=9", ranks=0)
    assert refused.code == 2 and "compute.precision: was bf16, now fp32" in refused.text
