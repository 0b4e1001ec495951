"""Which micro-batches a start takes after crashes for want of memory."""

from __future__ import annotations

from typing import Any

import pytest

from runner.health.rank_report import Report
from runner.health.root_cause import MEMORY, find_root_cause
from runner.launch.attempt import EXIT_CODES
from runner.policy.restart import MEMORY as POLICYS
from runner.policy.restart import Again, Attempt, End, RestartRules, after
from runner.startup.resume import settle_micro_size


def crash(cause: str = MEMORY) -> dict[str, Any]:
    return {"kind": "crash", "step": 7, "reason": "r", "ranks": [1], "detail": {"cause": cause}}


def started(lines: list[dict[str, Any]], wanted: int) -> int:
    """As a start does it: what it settles is journalled."""
    size, incident = settle_micro_size(wanted, lines)
    if incident is not None:
        lines.append({"kind": incident.kind, "detail": incident.detail})
    return size


def test_each_crash_halves_once_and_other_crashes_do_not() -> None:
    lines: list[dict[str, Any]] = []
    assert started(lines, 5) == 5
    lines.append(crash("signal"))
    assert started(lines, 5) == 5
    lines.append(crash())
    assert [started(lines, 5), started(lines, 5)] == [3, 3]
    lines += [crash(), crash()]
    assert [started(lines, 5), started(lines, 5)] == [2, 2]
    lines.append(crash())
    assert started(lines, 5) == 1
    lines.append(crash())
    assert started(lines, 5) == 1, "there is nothing smaller"


def test_another_setting_begins_anew() -> None:
    lines = [crash()]
    assert started(lines, 8) == 4
    assert started(lines, 6) == 6
    lines.append(crash())
    assert started(lines, 6) == 3


def test_the_line_says_what_was_decided_and_why() -> None:
    _, found = settle_micro_size(8, [crash()])
    assert found.decision == "batch.micro_size 8 -> 4, the global batch stays"
    assert (found.step, found.reason, found.ranks) == (7, "r", (1,))


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has", MEMORY),
        ("OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", MEMORY),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "exception"),
        ("MemoryError: Unable to allocate 2.00 GiB", MEMORY),
    ],
)
def test_what_is_want_of_memory(message: str, kind: str) -> None:
    told = Report(rank=1, world_size=2, kind="exception", step=3, phase="forward", message=message)
    assert find_root_cause([told], 2).kind == kind


def test_it_is_never_deterministic_but_the_budget_holds() -> None:
    assert POLICYS == MEMORY
    one = Attempt(
        code=1, clean_before=-1, clean_after=-1, took_up=True, step=3, cause=MEMORY, signature="s"
    )
    rules = RestartRules(codes=EXIT_CODES, restarts=5)
    assert isinstance(after([one] * 5, rules, asked_to_stop=False), Again)
    assert isinstance(after([one] * 6, rules, asked_to_stop=False), End)
