"""Reports of many ranks: one file a node, and the same cause as from a file a rank."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.distributed.env import JobEnv
from runner.health import cause_reporter
from runner.health.rank_report import (
    FROM_RANKS,
    Report,
    merge_node,
    node_file,
    node_folder,
    read_all_reports,
    reported_nodes,
    stacks,
    write_report,
)
from runner.health.root_cause import RootCause, find_root_cause
from runner.run_dir.lease import acquire
from runner.run_dir.paths import RunDir
from tests.crash_reports import entries, report
from tests.mechanism.test_witness import watched
from tests.rows import full_but

WORLD, A_NODE = 72, 8


def called(rank: int) -> Report:
    """Of a rank that waits for rank 24, which never came."""
    return replace(report(rank, WORLD, absent=24), stacks=[])


def strayed(rank: int) -> Report:
    told = entries(7, 60, finished=59, ops=("all_reduce",))
    told[-1]["op"] = "broadcast" if rank == 30 else "all_reduce"
    return replace(called(rank), kind="called", collectives=told)


def raised(rank: int) -> Report:
    kind, words = ("exception", "ValueError: no") if rank == 41 else ("lost_contact", "closed")
    return replace(called(rank), kind=kind, message=words)


CRASHES: dict[str, tuple[Callable[[int], Report], set[int]]] = {
    "absent": (called, set()),
    "operation": (strayed, set()),
    "exception": (raised, set()),
    "silence": (called, {3, 64}),
}


ALWAYS = {("absent", None), ("operation", None), ("silence", 16)}  # test_blame.py has each cause
CASES = full_but(ALWAYS, itertools.product(CRASHES, (None, 16)))


@pytest.mark.parametrize(("kind", "without_leader"), CASES)
def test_the_cause_is_the_same(tmp_path: Path, kind: str, without_leader: int | None) -> None:
    """Also where a node's leader did not come to write its file."""
    make, silent = CRASHES[kind]
    reports = [make(rank) for rank in range(WORLD) if rank not in silent]
    for one in reports:
        write_report(node_folder(tmp_path, one.rank // A_NODE * A_NODE), one)
    for first in range(0, WORLD, A_NODE):
        if first != without_leader:
            merge_node(tmp_path, first)
    found, expected = (
        find_root_cause(read_all_reports(tmp_path), WORLD),
        find_root_cause(reports, WORLD),
    )
    assert found.kind == expected.kind == kind
    assert (found.ranks, found.reason) == (expected.ranks, expected.reason)


def test_what_ranks_have_in_common_stands_once(tmp_path: Path) -> None:
    for rank in range(A_NODE):
        write_report(node_folder(tmp_path, 0), called(rank))
    merge_node(tmp_path, 0)
    whole = sum(path.stat().st_size for path in node_folder(tmp_path, 0).iterdir())
    assert node_file(tmp_path, 0).stat().st_size < whole / 50
    assert len(json.loads(node_file(tmp_path, 0).read_text())["collectives"]) == 1


@pytest.mark.parametrize("harm", [b"", b"[]", b'{"reports": [1]}', b"\xff", b'{"reports": [{}]}'])
def test_a_torn_file_hides_no_other(tmp_path: Path, harm: bytes) -> None:
    for first in (0, 8):
        write_report(node_folder(tmp_path, first), called(first))
        merge_node(tmp_path, first)
    node_file(tmp_path, 0).write_bytes(harm)
    assert [one.rank for one in read_all_reports(tmp_path)] == [8]


@pytest.fixture(autouse=True)
def _settles_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cause_reporter, "SETTLE_SECONDS", 20.0)


def test_one_tells_for_all(tmp_path: Path) -> None:
    """All ranks at once, each with its own monitor: a file a node, and one cause."""
    alone = JobEnv(job=None, order=(0, 0), step="", end_time=None, has_agent=False)
    lease = acquire(RunDir(tmp_path).incarnation, alone, stale_seconds=1, take_over=True, say=print)
    written: list[tuple[int, RootCause]] = []

    def rank_of(rank: int) -> None:
        one = watched(tmp_path, world_size=WORLD, rank=rank, per_node=A_NODE, has_agent=False)
        one.causes.run_lease, one.causes.neighbours = lease, NoPeers()
        if rank == 0:
            one.causes.journal = lambda cause, number: written.append((number, cause))
        one.causes.write(called(rank))
        one.causes.tell_cause()

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = RunDir(tmp_path).incident(1)
    assert WORLD >= FROM_RANKS
    assert reported_nodes(folder) == list(range(0, WORLD, A_NODE))
    assert len(list(folder.iterdir())) == 2 * WORLD // A_NODE + 1
    cause = json.loads((folder / "cause.json").read_text())
    assert cause["kind"] == "absent" and cause["ranks"] == [24]
    [(number, journalled)] = written
    assert number == 1 and journalled.ranks == (24,)


def test_nothing_is_collected_while_stacks_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that report at once once waited for each other for ever: cpython's issue 106883.

    And one read a code object where a frame had been, on the way to that frame's caller.
    """
    collects: list[bool] = []

    def look(function: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*args: object) -> Any:
            collects.append(gc.isenabled())
            return function(*args)

        return looked

    monkeypatch.setattr(sys, "_current_frames", look(sys._current_frames))
    walk = traceback.walk_stack
    # The walk is lazy: what it yields is noted where it is asked for.
    monkeypatch.setattr(traceback, "walk_stack", lambda frame: map(look(tuple), walk(frame)))
    told = {one["thread"]: one["frames"] for one in stacks()}
    assert "_current_frames" in {frame["function"] for frame in told["MainThread"]}
    assert len(collects) > len(told["MainThread"]) and not any(collects) and gc.isenabled()


class NoPeers:
    def __init__(self) -> None:
        self.deaths: dict[int, int | None] = {}
