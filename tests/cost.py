"""Which test files cost the most processor time: printed with pytest's slowest tests.

On two cores the tests take as long as their processor time allows, so this is what must not grow.
Seconds on the clock say little: most drills wait. A plugin of pytest's that knows nothing of ours;
tests/conftest.py takes its hooks over.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

_SHOWN = 15  # files
_SECONDS = pytest.StashKey[Counter[str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Add up by file what this process and those it has waited for used, fixtures included."""
    began = _processor_seconds()
    result = yield
    seconds = item.config.stash.setdefault(_SECONDS, Counter())
    seconds[item.nodeid.partition("::")[0]] += _processor_seconds() - began
    return result


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the most expensive files."""
    seconds = config.stash.get(_SECONDS, Counter())
    if not config.getoption("durations") or not seconds:
        return
    terminalreporter.section(f"most processor time, of {sum(seconds.values()):.0f} s in all")
    for file, amount in seconds.most_common(_SHOWN):
        terminalreporter.write_line(f"{amount:.1f}s {file}")


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
