"""The legs of scripts/matrix.sh: which releases, and what is kept of them."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from scripts import matrix
from scripts.matrix import LEGS, ROOT, Leg, keep, locked_versions, main, name_of, requirements

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_is_varied_and_what_stays_as_it_is_locked() -> None:
    run, dev = requirements(PROJECT)
    assert {"torch", "numpy", "deepspeed", "transformers", "s3fs"} <= set(map(name_of, run))
    assert {"pytest", "mypy"} <= set(map(name_of, dev)) and "holdfast-train" not in map(
        name_of, dev
    )
    locked = locked_versions()
    for text in [*run, *dev]:
        requirement = Requirement(text)
        assert Version(locked[name_of(text)]) in requirement.specifier, "the lock is within"
        lowest = [one for one in requirement.specifier if one.operator == ">="]
        assert lowest or text in dev, f"{text}: without a lower bound there is no oldest release"
    assert f"pytest=={locked['pytest']}" in matrix.wanted("oldest", run, dev)
    assert set(run) <= set(matrix.wanted("newest", run, dev))
    assert matrix.wanted("locked", run, dev) == [f"{n}=={v}" for n, v in locked.items()]


def test_torch_has_an_upper_bound() -> None:
    """A new torch once brought another "nccl", whose evidence blamed innocent ranks."""
    [torch] = [Requirement(text) for text in PROJECT["dependencies"] if name_of(text) == "torch"]
    assert "<" in {one.operator for one in torch.specifier}


OUTPUT = """\
FAILED tests/mechanism/test_a.py::test_one[x-1] - AssertionError: 3 passed
ERROR tests/mechanism/test_b.py
= 2 failed, 5094 passed, 31 skipped, 1 error in 812.44s (0:13:32) =
3 passed, 1 skipped in 7.10s
"""


def test_counts_and_failures_are_read() -> None:
    assert matrix.summary(OUTPUT) == {
        "counts": {"failed": 2, "passed": 5097, "skipped": 32, "errors": 1},
        "failed": ["tests/mechanism/test_a.py::test_one[x-1]", "tests/mechanism/test_b.py"],
    }


def test_each_leg_is_one_entry_and_a_failure_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def install(leg: Leg) -> None:
        if leg.name == "newest":
            raise subprocess.CalledProcessError(1, ["python", "-m", "pip", "install"])

    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(Leg, "install", install)
    monkeypatch.setattr(
        Leg,
        "test",
        lambda leg, tests: (
            ran.append((leg.name, tests)) or {"exit_code": 0, "counts": {"passed": 1}}
        ),
    )
    out = tmp_path / "records" / "matrix.json"
    assert main([f"--out={out}", "--leg=oldest", "--", "-x", "tests/policy"]) == 0
    assert main([f"--out={out}"]) == 1
    record: dict[str, Any] = json.loads(out.read_text())
    assert list(record) == list(LEGS) and record["newest"]["error"].startswith("not installed")
    assert all({"date", "commit", "exit_code"} <= entry.keys() for entry in record.values())
    assert ran == [("oldest", ["-x", "tests/policy"]), ("oldest", []), ("locked", [])]
    keep(out, "newest", {"exit_code": 0})
    assert "error" not in json.loads(out.read_text())["newest"]


def test_the_oldest_are_resolved_and_nothing_touches_the_projects_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(matrix.venv, "create", lambda folder, with_pip: folder.mkdir(parents=True))
    monkeypatch.setattr(
        matrix.subprocess,
        "run",
        lambda words, **_: calls.append(words) or SimpleNamespace(stdout="", returncode=0),
    )
    for name in LEGS:
        Leg(name, tmp_path).install()
    assert {words[0] for words in calls} == {str(tmp_path / n / "bin" / "python") for n in LEGS}
    [resolve] = [words for words in calls if "compile" in words]
    assert "lowest-direct" in resolve and "oldest" in resolve[0]
