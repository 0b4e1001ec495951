"""How far a command is: silent for a moment's work, a bar on a terminal, a line now and then."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from runner.command.bar import Bar
from runner.observe.console import Working


def shown(*, is_terminal: bool, seconds: float, unit: str = "") -> str:
    """What a hundred equal parts say that take so long in all."""
    file, now = io.StringIO(), [0.0]
    console = Console(file=file, force_terminal=is_terminal, width=120)
    with Bar("verifying", 100 << 20, unit=unit, console=console, clock=lambda: now[0]) as bar:
        for _ in range(100):
            now[0] += seconds / 100
            bar.add(1 << 20)
    return file.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_moments_work_says_nothing(is_terminal: bool) -> None:
    assert shown(is_terminal=is_terminal, seconds=1.9) == ""


def test_a_terminal_gets_a_bar_with_what_is_left() -> None:
    text = shown(is_terminal=True, seconds=100)
    assert "verifying [############------------] 50%  0.05 of 0.10 GiB  1 MiB/s  ETA 50s" in text


def test_a_pipe_gets_a_line_each_half_minute() -> None:
    lines = shown(is_terminal=False, seconds=100).splitlines()
    assert len(lines) == 3 and all("ETA" in line for line in lines)


def test_other_things_are_counted_too() -> None:
    text = shown(is_terminal=True, seconds=100, unit="rows")
    assert "52,428,800 of 104,857,600 rows  1,048,576 rows/s  ETA 50s" in text


def test_what_takes_seconds_each_has_a_pace_too() -> None:
    now = [0.0]
    working = Working("short runs", lambda: now[0], unit="runs")
    now[0] = 45.0
    assert working.text(3, 10).endswith("3 of 10 runs  0.067 runs/s  ETA 1m45s")
