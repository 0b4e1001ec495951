"""How far a host is trusted after what happened to it."""

from __future__ import annotations

import pytest

from runner.policy.nodes import DIED, PASSED, SLOW, NodeEvent, Standing, choose, standing
from runner.policy.restart import HARDWARE

NOW, DAY = 1e9, 86400.0


@pytest.mark.parametrize(
    ("past", "faults", "is_tested"),
    [
        ([], 0, True),
        ([(5, PASSED)], 0, True),
        ([(2, HARDWARE)], 1, False),
        ([(4, DIED), (2, PASSED)], 1, True),
        ([(3, PASSED), (2, HARDWARE)], 1, False),
        ([(12, HARDWARE), (2, HARDWARE), (1, PASSED)], 2, True),
        ([(2, SLOW)], 0.25, False),
        ([(31, HARDWARE)], 0, True),
        ([(31, HARDWARE), (29, DIED)], 1, False),
        # A clock in the future.
        ([(-100, HARDWARE)], 1, False),
    ],
)
def test_faults_count_until_they_are_forgotten(
    past: list[tuple[float, str]], faults: float, is_tested: bool
) -> None:
    """``past``: days ago and kind, each; in any order."""
    events = [
        NodeEvent(host="a", kind=kind, time=NOW - ago * DAY, reason=kind) for ago, kind in past
    ]
    found = standing(reversed(events), now=NOW)
    assert (found.faults, found.is_tested) == (faults, is_tested)


@pytest.mark.parametrize(
    ("bad", "lost", "faults", "chosen"),
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
    bad: str, lost: str, faults: dict[str, float], chosen: str | None
) -> None:
    known = {host: Standing(faults=much) for host, much in faults.items()}
    found = choose("abc", count=2, bad=bad, lost=lost, known=known)
    assert found == (None if chosen is None else list(chosen))
