"""What the ranks of a job leave that waits for one rank in a collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.health.rank_report import Report, stacks

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
