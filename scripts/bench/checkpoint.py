"""Guard and checkpoints together against a hand-written loop that saves nothing.

Snapshots in memory as they come (every 10 steps, or more seldom where they would cost more than
half a percent), on disk every 100. A pair is 100 steps of each side, taken 25 by 25, so that each
has one save and its proof. The save falls into the middle of a turn, and the turn ends when the
background has ended too: it cannot be charged to the other side.
"""

from __future__ import annotations

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.report import Row

AIM = 1.02
_BLOCK, _EVERY = 25, 100
_GROUP = _EVERY // _BLOCK
# Saved 15 steps before a turn's end, proven 5 steps before it (checkpoint.clean_after=10).
_PHASE = 15


def measure(plan: Plan) -> list[Row]:
    rows = []
    cases = [(", short steps", plan.short, 1 if plan.quick else 8)]
    if not plan.quick:
        cases.insert(0, ("", [], 2))
    for size, settings, cycles in cases:
        rows.append(
            compared(
                plan,
                f"step, guard and checkpoints (memory by cost, disk every 100), fsdp{size}",
                "bare FSDP2 loop that saves nothing",
                f"checkpoint.every={_EVERY}",
                "checkpoint.memory_every=null",
                *settings,
                opponent="bare-fsdp",
                block=_BLOCK,
                pairs=_GROUP * cycles,
                warmup=2,
                group=_GROUP,
                pair_options=("--settle", f"--phase={_PHASE}"),
                aim=AIM,
            )
        )
    return rows
