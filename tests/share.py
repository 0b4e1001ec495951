"""``--share``: sessions that divide the test files among themselves, for tests/side_by_side.py.

A plugin of pytest's that knows nothing of ours; tests/conftest.py takes its hooks over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=Path,
        metavar="DIR",
        help="run the test files that no other session with the same DIR has begun",
    )


def _claimed(session: pytest.Session, share: Path) -> Iterator[pytest.Item]:
    """Tests of the files that this session was the first to come to."""
    for path, items in itertools.groupby(session.items, key=lambda item: item.path):
        claim = share / f"begun-{str(path).replace(os.sep, '.')}"
        with contextlib.suppress(FileExistsError):
            claim.touch(exist_ok=False)
            yield from items


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """pytest's own loop, but over what is claimed on the way."""
    share = session.config.getoption("--share")
    if share is None or session.config.option.collectonly or session.testsfailed:
        return None
    items = _claimed(session, share)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record failures for tests/side_by_side.py."""
    report = yield
    share = item.config.getoption("--share")
    if report.failed and share is not None:
        with (share / f"failed-{os.getpid()}").open("a") as file:
            file.write(f"{item.nodeid}\n")
    return report
