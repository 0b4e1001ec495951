"""Measures how long training waits for a snapshot, against a plain copy and torch's savers."""

from __future__ import annotations

import statistics
from typing import Any

from scripts.bench.plan import Plan
from scripts.bench.process import on_ranks
from scripts.bench.ratio import paired
from scripts.bench.report import Row

AIM_COPY = 1.3
_MEDIUM = ["model.dim=512", "model.layers=8", "model.heads=8"]
# The batch does not matter here: the smallest makes the steps between short.
_TINY_BATCH = ["data.seq_len=32", "batch.micro_size=1"]
_OTHERS = {"dcp_save": "dcp.save", "dcp_async_save": "dcp.async_save", "torch_save": "torch.save"}


def measure(plan: Plan) -> list[Row]:
    size = plan.size if plan.has_gpu else _MEDIUM
    result = stalls(plan, size, rounds=3 if plan.quick else 12)
    copy = "plain copy of the same bytes"
    rows = [_row("snapshot in memory", "ring_memory", "copy", copy, result)]
    for name, label in _OTHERS.items():
        rows.append(_row("checkpoint on disk", "ring_disk", name, label, result))
    for row in rows:
        plan.say(f"  {row.what} / {row.against}: {row.ratio.median:.3f}" if row.ratio else row.what)
    return rows


def stalls(plan: Plan, size: list[str], *, rounds: int) -> dict[str, Any]:
    """Seconds that training waited, by method; see ``snapshot_ranks``."""
    batch = [*_TINY_BATCH, f"batch.global_size={plan.ranks}"]
    overrides = [*size, *batch, *plan.overrides]
    return on_ranks(plan.ranks, "scripts.bench.snapshot_ranks", f"--rounds={rounds}", *overrides)


def _row(label: str, own: str, other: str, description: str, result: dict[str, Any]) -> Row:
    ours, theirs = result["seconds"][own], result["seconds"][other]
    return Row(
        what=f"training waits for a {label}",
        against=description,
        ratio=paired(list(zip(ours, theirs, strict=True))),
        ours=statistics.median(ours),
        theirs=statistics.median(theirs),
        aim=AIM_COPY if other == "copy" else None,
        detail={"bytes_per_rank": result["bytes_per_rank"], "parameters": result["parameters"]},
    )
