"""A crash of many ranks: what a node's leader writes, and what rank 0 reads and concludes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.health.node_reports import merge_node, node_folder, read_all_reports, write_node
from runner.health.rank_report import Report, stacks, write_report
from runner.health.root_cause import RootCause, find_root_cause

RANKS_PER_NODE = 8
_MOST_ENTRIES = 400  # that a rank tells of


def entries(
    first: int, num: int, *, finished: int, ops: Sequence[str] = ("_all_gather_base",)
) -> list[dict[str, Any]]:
    """A flight recorder's newest, of which the last ones are under way."""
    return [
        {
            "group": "0/nccl", "seq": first + at, "op": ops[at % len(ops)],
            "sizes": [[4096 + at % 7, 128]], "dtypes": ["BFloat16"],
            "state": "completed" if at < finished else "scheduled", "finished": at < finished,
            "line": f"runner/engine/fsdp.py:{100 + at % 7} forward",
        }
        for at in range(num)
    ]  # fmt: skip


def report(rank: int, world_size: int, *, absent: int) -> Report:
    """Of a job in which rank ``absent`` never came to a collective that all others wait in."""
    is_absent = rank == absent
    num = _MOST_ENTRIES - 30 if is_absent else _MOST_ENTRIES
    return Report(
        rank=rank, world_size=world_size, kind="hang" if is_absent else "called", step=1000,
        phase="forward", seconds=130.0, message="no progress for 130.0 s (limit 120.0 s)",
        host=f"gpu{rank // RANKS_PER_NODE:05d}", pid=4000 + rank, time=1.7e9 + rank % 100 / 100,
        stacks=stacks(), collectives=entries(50_000, num, finished=_MOST_ENTRIES - 30),
    )  # fmt: skip


def conclude(folder: Path, world_size: int) -> RootCause:
    """What rank 0 does once the others have told."""
    return find_root_cause(read_all_reports(folder), world_size)


def measure(world_size: int) -> dict[str, Any]:
    """Seconds and bytes of the leaders' files, and of rank 0 with them."""
    sync, os.fsync = os.fsync, lambda descriptor: None
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-scale-") as scratch:
            return _measure(Path(scratch), world_size)
    finally:
        os.fsync = sync


def _measure(folder: Path, world_size: int) -> dict[str, Any]:
    absent = world_size // 3
    one = report(absent, world_size, absent=absent), report(absent + 1, world_size, absent=absent)
    # What every node does alike, once: its ranks write, its leader reads and puts together.
    for rank in range(RANKS_PER_NODE):
        write_report(node_folder(folder, 0), replace(one[1], rank=rank))
    own_bytes = sum(path.stat().st_size for path in node_folder(folder, 0).iterdir())
    began = time.process_time()
    merge_node(folder, 0)
    leader_seconds = time.process_time() - began
    shutil.rmtree(node_folder(folder, 0))
    for first in range(0, world_size, RANKS_PER_NODE):
        ranks = range(first, min(first + RANKS_PER_NODE, world_size))
        reports = [replace(one[0 if r == absent else 1], rank=r, time=1.7e9 + r) for r in ranks]
        write_node(folder, first, reports)
    num_files = len(list(folder.iterdir()))
    told_bytes = sum(path.stat().st_size for path in folder.iterdir())
    began, cpu = time.perf_counter(), time.process_time()
    cause = conclude(folder, world_size)
    assert cause.ranks == (absent,) and cause.kind == "absent", cause.reason
    return {
        "rank_0_seconds": round(time.perf_counter() - began, 3),
        "rank_0_cpu_seconds": round(time.process_time() - cpu, 3),
        "leader_cpu_seconds": round(leader_seconds, 4),
        "files_for_rank_0": num_files,
        "bytes_for_rank_0": told_bytes,
        "bytes_of_a_node": own_bytes,
    }


if __name__ == "__main__":
    import json
    import sys

    for world in map(int, sys.argv[1:]):
        print(world, json.dumps(measure(world)), flush=True)
