"""Measures how costs grow with parameters, ranks, and the bytes of a checkpoint."""

from __future__ import annotations

import statistics

from scripts.bench.compared import compared
from scripts.bench.plan import Plan
from scripts.bench.ratio import paired
from scripts.bench.report import Row
from scripts.bench.snapshot import stalls

# 0.9, 5 and 26 million parameters with bytes as tokens.
SIZES = {
    "nano": ["model=nano"],
    "dim 256, 6 layers": ["model.dim=256", "model.layers=6", "model.heads=4"],
    "dim 512, 8 layers": ["model.dim=512", "model.layers=8", "model.heads=8"],
}
GPU_SIZES = {
    "dim 512, 8 layers": ["model.dim=512", "model.layers=8", "model.heads=8"],
    "small": ["model=small"],
    "dim 1536, 24 layers": ["model.dim=1536", "model.layers=24", "model.heads=12"],
}
_MOST_RANKS = 4
_BARE = "bare FSDP2 loop"


def measure(plan: Plan) -> list[Row]:
    sizes = GPU_SIZES if plan.has_gpu else SIZES
    if plan.quick:
        sizes = dict(list(sizes.items())[:2])
    return [*_parameters(plan, sizes), *_ranks(plan), *_bytes(plan, sizes)]


def _parameters(plan: Plan, sizes: dict[str, list[str]]) -> list[Row]:
    batch = [f"batch.global_size={2 * plan.ranks}", "data.seq_len=64"]
    return [
        compared(
            plan,
            f"step, guard on, fsdp, {name}",
            _BARE,
            *size,
            *batch,
            opponent="bare-fsdp",
            pairs=plan.pairs(20),
            warmup=10,
        )
        for name, size in sizes.items()
    ]


def _ranks(plan: Plan) -> list[Row]:
    """One row per number of ranks, with a batch that all of them divide."""
    most = plan.ranks if plan.has_gpu else _MOST_RANKS
    batch = ["batch.global_size=12", "batch.micro_size=12", "data.seq_len=64"]
    return [
        compared(
            plan,
            f"step, guard on, fsdp, {number} rank{'s' if number > 1 else ''}",
            _BARE,
            *batch,
            opponent="bare-fsdp",
            pairs=plan.pairs(20),
            block=5,
            ranks=number,
        )
        for number in range(1, most + 1)
        if not (plan.quick and number == 3)
    ]


def _bytes(plan: Plan, sizes: dict[str, list[str]]) -> list[Row]:
    rows = []
    for name, size in sizes.items():
        result = stalls(plan, size, rounds=3 if plan.quick else 6)
        seconds = result["seconds"]
        ours = seconds["ring_memory"]
        megabytes = result["bytes_per_rank"] / 1e6
        rows.append(
            Row(
                what=f"training waits for a snapshot, {name}, {megabytes:.3g} MB a rank",
                against="plain copy of the same bytes",
                ratio=paired(list(zip(ours, seconds["copy"], strict=True))),
                ours=statistics.median(ours),
                theirs=statistics.median(seconds["copy"]),
                detail={"bytes_per_rank": result["bytes_per_rank"]},
            )
        )
        plan.say(f"  snapshot of {megabytes:.3g} MB: {rows[-1].ours}")
    return rows
