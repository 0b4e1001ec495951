"""The table of checks that ``check-model`` and ``preflight`` print."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from runner.startup.checks import Check
from runner.system.exit_codes import EXIT_CONFIG, EXIT_DONE
from runner.system.parsing import json_text


def print_checks(title: str, heading: str, checks: Sequence[Check], seconds: float) -> int:
    """Print the checks; returns the exit code: 2 if one fails that is not a warning."""
    table = Table(title=f"{title} ({seconds:.0f} s)", title_justify="left")
    for text in (heading, "", "what was seen, and what to do"):
        table.add_column(text)
    for check in checks:
        remedy = f" -> {check.remedy}" if check.holds is False else ""
        table.add_row(check.name, mark(check), check.found + remedy)
    Console(file=sys.stdout, width=120, markup=False, highlight=False).print(table)
    return exit_code(checks)


def print_json(checks: Sequence[Check]) -> int:
    """Print a JSON line for each; returns the exit code as :func:`print_checks`."""
    for check in checks:
        line = {"check": check.name, "result": mark(check), "found": check.found}
        if check.holds is False:
            line["remedy"] = check.remedy
        sys.stdout.write(json_text(line) + "\n")
    return exit_code(checks)


def mark(check: Check) -> str:
    """The result of a check in one word."""
    if check.holds is False:
        return "warns" if check.is_warning else "FAILS"
    return "ok" if check.holds else "-"


def exit_code(checks: Sequence[Check]) -> int:
    """The exit code of the command."""
    fails = any(check.holds is False and not check.is_warning for check in checks)
    return EXIT_CONFIG if fails else EXIT_DONE
