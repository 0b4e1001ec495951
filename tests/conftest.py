"""Shared by all tests: the flags ``--full`` and ``--share``, and one thread a rank."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cost, reaper, run, share, warm

# What pytest calls here.
pytest_collection = share.pytest_collection
pytest_make_collect_report = share.pytest_make_collect_report
pytest_runtestloop = share.pytest_runtestloop
pytest_runtest_makereport = share.pytest_runtest_makereport
pytest_runtest_protocol = cost.pytest_runtest_protocol
pytest_terminal_summary = cost.pytest_terminal_summary

MEMORY_DIR = "HOLDFAST_MEMORY_DIR"

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the full matrices as well")
    share.pytest_addoption(parser)


_REAPER = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep memory snapshots of the tests separate from those of other runs.

    A process of its own ends what the session leaves, since a session may end at any moment.
    """
    # For side_by_side.LIMIT_SECONDS; a copy of 2, which is captured during a test.
    faulthandler.register(signal.SIGUSR2, file=os.dup(2))
    shared = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="holdfast-test-", dir=shared if shared.is_dir() else None)
    mark = secrets.token_hex(8)
    command = [sys.executable, "-S", "-E", reaper.__file__, mark, folder]
    config.stash[_REAPER] = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, cwd="/"
    )
    os.environ |= {MEMORY_DIR: folder, reaper.MARK: mark}


def pytest_unconfigure(config: pytest.Config) -> None:
    warm.close()
    shutil.rmtree(os.environ.pop(MEMORY_DIR, ""), ignore_errors=True)
    left = config.stash[_REAPER]
    left.stdin.close()
    left.wait(20)


@pytest.fixture(autouse=True, scope="module")
def _collections_are_short() -> None:
    """Have collections pass over what is imported: half a second each, and DeepSpeed asks for many.

    What earlier modules left in circles stays with it.
    """
    gc.freeze()


@pytest.fixture(autouse=True)
def _ends_what_it_began() -> Iterator[None]:
    """Clean up, also if a test fails or times out."""
    yield
    run.end_all()


@pytest.fixture(autouse=True)
def _our_logger_is_as_at_first() -> Iterator[None]:
    """Undo a program's ``log.begin``, which would change the output of later tests.

    Before a test as well: what began it may have been a fixture of more than one.
    """
    _reset_our_logger()
    yield
    _reset_our_logger()


def _reset_our_logger() -> None:
    logger = logging.getLogger("runner")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="full matrix: run with --full")
    for item in items:
        if item.get_closest_marker("full"):  # keywords have the names of folders, too
            item.add_marker(skip)
