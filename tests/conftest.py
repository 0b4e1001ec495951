"""Shared by all tests: the ``--full`` flag, and one thread a rank."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

MEMORY_DIR = "HOLDFAST_MEMORY_DIR"

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full matrices as well")


def pytest_configure(config: pytest.Config) -> None:
    """Snapshots in memory of the runs under test lie apart from everybody else's."""
    shared = Path("/dev/shm")
    where = tempfile.mkdtemp(prefix="holdfast-test-", dir=shared if shared.is_dir() else None)
    os.environ[MEMORY_DIR] = where


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ.pop(MEMORY_DIR, ""), ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="full matrix: run with --full")
    for item in items:
        if "full" in item.keywords:
            item.add_marker(skip)
