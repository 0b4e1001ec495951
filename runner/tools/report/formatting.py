"""How times, numbers and names are printed on the page."""

from __future__ import annotations

import time

from runner.system.units import duration
from runner.tools.report.incident import Line

_KNOWN = ("done", "running", "halted", "failed", "crash", "halt", "silent", "preempted", "redo")


def when(seconds: float) -> str:
    """Local date and time; empty for 0."""
    if not seconds:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def took(seconds: float) -> str:
    """A duration such as 0.7s, 12s or 3m07s."""
    return f"{seconds:.1f}s" if 0 < seconds < 10 else duration(seconds)


def ranks_of(line: Line) -> str:
    """The first 32 ranks of a line."""
    return ", ".join(map(str, line.ranks[:32]))


def status_class(status: str) -> str:
    """The CSS class of a status or kind."""
    return status if status in _KNOWN else "plain"


def cut(text: str, most: int) -> str:
    """The end of a long name, which says more than its start."""
    return text if len(text) <= most else f"…{text[1 - most :]}"
