"""Runs that several drills compare with, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import Result, finish

# Three steps' worth of positions and a bit: enough bad steps to force a rollback.
POISON = "faults=[poison@samples=700-790]"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def clean(runs: Path) -> Result:
    """60 steps on 2 ranks, nothing wrong."""
    return finish(runs / "clean")


@pytest.fixture(scope="session")
def clean_alone(runs: Path) -> Result:
    """60 steps in one process without torchrun, nothing wrong."""
    return finish(runs / "clean-alone", ranks=0)


@pytest.fixture(scope="session")
def poisoned(runs: Path) -> Result:
    """60 steps on 2 ranks with a bad range, its checkpoints all kept."""
    return finish(runs / "poisoned", POISON, "checkpoint.keep=9")
