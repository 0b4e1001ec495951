"""Measures ``guard.ok`` in a user's loop against the same loop without it, in turns."""

from __future__ import annotations

import statistics
from typing import Any

from scripts.bench.plan import Plan
from scripts.bench.process import on_ranks
from scripts.bench.ratio import paired
from scripts.bench.report import Row

_STEP_SECONDS = 0.3
_AIM = 1.01


def measure(plan: Plan) -> list[Row]:
    """One row for a single process, and one for the ranks under DDP."""
    return [_row(plan, ranks) for ranks in sorted({1, plan.ranks})]


def _row(plan: Plan, ranks: int) -> Row:
    options = [f"--pairs={plan.pairs(200)}", f"--seconds={_STEP_SECONDS}"]
    result: dict[str, Any] = on_ranks(ranks, "scripts.bench.looped", *options)
    pairs = [(ours, theirs) for ours, theirs in result["pairs"]]
    layout_text = "one process" if ranks == 1 else f"{ranks} ranks, DDP"
    return Row(
        what=f"guard.over and guard.ok in a loop of one's own, {layout_text}",
        against="the loop with clip_grad_norm_",
        ratio=paired(pairs),
        ours=statistics.median(ours for ours, _ in pairs),
        theirs=statistics.median(theirs for _, theirs in pairs),
        aim=_AIM,
        detail={
            "ranks": ranks,
            "parameters": result["parameters"],
            "rows": result["rows"],
            # The processor time of the first rank's main thread, which excludes other programs.
            "processor_ms": [round(1e3 * seconds, 3) for seconds in result["computing"]],
            "processor_ratio": round(result["computing"][0] / result["computing"][1], 5),
            "difference_ms": round(
                1e3 * statistics.median(ours - theirs for ours, theirs in pairs), 3
            ),
            "checkpoints": "none within what is timed",
        },
    )
