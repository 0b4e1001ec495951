"""``--share``: sessions that divide the test files among themselves, for tests/side_by_side.py.

A plugin of pytest's that knows nothing of ours; tests/conftest.py takes its hooks over.
"""

from __future__ import annotations

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool | None:
    """Nothing yet: a file is imported by the session that runs it, and by no other."""
    return True if _share(session) else None


def _share(session: pytest.Session) -> Path | None:
    """The folder of all sessions; None where tests are not shared, but run or listed."""
    share: Path | None = session.config.getoption("--share")
    return None if session.config.option.collectonly else share


def _test_files(session: pytest.Session) -> Iterator[Path]:
    for word in session.config.args:
        folder = session.config.invocation_params.dir / word
        yield from [folder] if folder.is_file() else sorted(folder.rglob("test_*.py"))


def _is_first(claim: Path) -> bool:
    """Whether no other session has made this claim before."""
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _claimed(session: pytest.Session, share: Path) -> Iterator[pytest.Item]:
    """Tests of the files that this session was the first to come to."""
    names = [str(path) for path in _test_files(session)]
    # One collection for the whole session: fixtures of a conftest.py belong to its folder's node,
    # which a second collection would replace. The modules in it are not imported yet.
    modules = list(session.perform_collect(names, genitems=False))
    if _is_first(share / "from-the-end"):
        # Drills come first and mostly wait; tests in one process come last and mostly compute.
        modules.sort(key=lambda module: module.path.parent, reverse=True)
    everything: list[pytest.Item] = []
    for module in modules:
        if not _is_first(share / f"begun-{str(module.path).replace(os.sep, '.')}"):
            continue
        items = list(session.genitems(module))
        session.config.hook.pytest_collection_modifyitems(
            session=session, config=session.config, items=items
        )
        everything += items
        session.items, session.testscollected = everything, len(everything)
        yield from items


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """pytest's own loop, but over what is claimed on the way."""
    share = _share(session)
    if share is None:
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
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Record files that cannot be imported, as failures are."""
    report = yield
    if report.failed:
        _record(collector.config, collector.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record failures for tests/side_by_side.py."""
    report = yield
    if report.failed:
        _record(item.config, item.nodeid)
    return report


def _record(config: pytest.Config, name: str) -> None:
    share = config.getoption("--share")
    if share is not None:
        with (share / f"failed-{os.getpid()}").open("a") as file:
            file.write(f"{name}\n")
