"""How times, numbers and names are told on the page."""

from __future__ import annotations

import time

from runner.observe.console import duration
from runner.report.incident import Line

_KNOWN = ("done", "running", "halted", "failed", "crash", "halt", "silent", "preempted", "redo")


def when(seconds: float) -> str:
    """Local time; empty for none."""
    if not seconds:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def took(seconds: float) -> str:
    """0.7s, 12s, 3m07s."""
    return f"{seconds:.1f}s" if 0 < seconds < 10 else duration(seconds)


def ranks_of(line: Line) -> str:
    """The first of them."""
    return ", ".join(map(str, line.ranks[:32]))


def status_class(status: str) -> str:
    """A class that the style knows."""
    return status if status in _KNOWN else "plain"


def cut(words: str, most: int) -> str:
    """The end of a long name: that tells more."""
    return words if len(words) <= most else f"…{words[1 - most :]}"
