"""Measures the runner against one opponent with ``pair``; most measurements use this."""

from __future__ import annotations

import statistics
from typing import Any

from scripts.bench.plan import Plan
from scripts.bench.process import on_ranks
from scripts.bench.ratio import grouped, paired
from scripts.bench.report import Row

_ARMED = 24  # steps after which all of the guard's rules are active


def compared(
    plan: Plan,
    label: str,
    against: str,
    *settings: str,
    opponent: str,
    pairs: int,
    block: int | None = None,
    warmup: int | None = None,
    group: int = 1,
    ranks: int | None = None,
    pair_options: tuple[str, ...] = (),
    aim: float | None = None,
) -> Row:
    """Seconds per step of both, and the ratio over pairs of blocks, or of groups of blocks.

    Raises:
        MeasureError: a rank failed, or the two sides trained differently.
    """
    steps = block or plan.block
    result = on_ranks(
        ranks or plan.ranks,
        "scripts.bench.pair",
        f"--against={opponent}",
        f"--block={steps}",
        f"--pairs={pairs}",
        f"--warmup={-(-_ARMED // steps) if warmup is None else warmup}",
        *pair_options,
        *plan.size,
        *settings,
        *plan.overrides,
    )
    blocks = [(ours, theirs) for ours, theirs in result["pairs"]]
    row = Row(
        what=label,
        against=against,
        ratio=paired(grouped(blocks, group)),
        ours=statistics.median(ours for ours, _ in blocks) / steps,
        theirs=statistics.median(theirs for _, theirs in blocks) / steps,
        aim=aim,
        detail=_detail(result, list(settings), steps * group),
    )
    plan.say(f"  {label}: {row.ratio.median:.4f}" if row.ratio else label)
    return row


def _detail(result: dict[str, Any], settings: list[str], steps: int) -> dict[str, Any]:
    kept = ("ranks", "parameters", "tokens_per_step", "syncs_per_step", "precision")
    detail = {key: result[key] for key in kept if result[key]}
    detail |= {"settings": settings, "steps_in_a_pair": steps}
    detail["share_of_own_threads"] = round(result["threads_share"], 5)
    ours, theirs = result["losses"]["ours"], result["losses"]["theirs"]
    if theirs:
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=False)]
        detail["first_losses"] = [round(ours[0], 4), round(theirs[0], 4)]
        detail["largest_gap_of_first_losses"] = float(f"{max(gaps):.3g}")
        detail["losses_compared"] = len(gaps)
    return detail
