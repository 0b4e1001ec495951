"""How far a host is trusted after what happened to it."""

from __future__ import annotations

import pytest

from runner.policy.nodes import (
    DIED,
    PASSED,
    SLOW,
    NodeEvent,
    NodeRules,
    Standing,
    choose,
    standing,
)
from runner.policy.restart import HARDWARE

NOW, HOUR, DAY = 1e9, 3600.0, 86400.0
RULES = NodeRules(probation_hours=24, forget_days=30)


def events(*past: tuple[float, str]) -> list[NodeEvent]:
    """(hours ago, kind), each."""
    return [
        NodeEvent(host="a", kind=kind, time=NOW - ago * HOUR, reason=kind) for ago, kind in past
    ]


@pytest.mark.parametrize(
    ("past", "faults", "is_tested", "hours_left"),
    [
        ([], 0, True, None),
        ([(5, PASSED)], 0, True, None),
        ([(2, HARDWARE)], 1, False, 22),
        ([(100, DIED)], 1, False, -76),
        ([(100, DIED), (2, PASSED)], 1, True, 22),
        ([(100, DIED), (50, PASSED), (2, PASSED)], 1, True, -26),
        ([(3, PASSED), (2, HARDWARE)], 1, False, 22),
        ([(300, HARDWARE), (2, HARDWARE), (1, PASSED)], 2, True, 47),
        ([(300, HARDWARE), (200, DIED), (2, HARDWARE), (0, PASSED)], 3, True, 96),
        ([(2, SLOW)], 0.25, False, 4),
        ([(31 * 24, HARDWARE)], 0, True, None),
        # A clock in the future counts as now.
        ([(-100, HARDWARE)], 1, False, 24),
        ([(24.0 * n, HARDWARE) for n in range(20)], 20, False, 24 * 32),
    ],
)
def test_a_probation_begins_with_the_check_and_doubles(
    past: list[tuple[float, str]], faults: float, is_tested: bool, hours_left: float | None
) -> None:
    found = standing(reversed(events(*past)), now=NOW, rules=RULES)
    assert (found.faults, found.is_tested) == (faults, is_tested)
    if hours_left is not None:
        assert found.until == pytest.approx(NOW + hours_left * HOUR)
    is_trusted = not faults or (is_tested and (hours_left or 0) <= 0)
    assert found.badness == (0 if is_trusted else faults)


@pytest.mark.parametrize(
    ("bad", "lost", "badness", "chosen"),
    [
        ("", "", {}, "ab"),
        ("", "", {"a": 1.0}, "bc"),
        ("", "", {"a": 2.0, "b": 1.0}, "bc"),
        # Never starved: the least bad ones take part.
        ("", "", {"a": 1.0, "b": 3.0, "c": 2.0}, "ac"),
        ("", "c", {"a": 1.0}, "ab"),
        # What happened in this run counts more than what happened in others.
        ("b", "", {"a": 9.0}, "ac"),
        ("", "bc", {}, None),
    ],
)
def test_better_nodes_are_preferred_and_too_few_are_all_used(
    bad: str, lost: str, badness: dict[str, float], chosen: str | None
) -> None:
    known = {host: Standing(badness=much) for host, much in badness.items()}
    found = choose("abc", count=2, bad=bad, lost=lost, known=known)
    assert found == (None if chosen is None else list(chosen))
