"""Says at the end how many inputs were tried."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    num = sum(
        int(value)
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, value in report.user_properties
        if name == "inputs"
    )
    if num:
        terminalreporter.write_line(f"{num} hostile or damaged inputs tried")
