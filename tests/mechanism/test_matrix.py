"""The legs of scripts/matrix.sh: which releases, and what is kept of them."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from packaging.version import Version

from scripts import matrix
from scripts.matrix import ROOT, locked_versions, name_of, requirements

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
