"""Draws docs/soak.svg from the records of both soaks: python -m scripts.soak_picture"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
GREEN, RED, ORANGE, GREY = "#2f8f5b", "#c0392b", "#e08214", "#8a8a8a"
NUMBERS = {
    "nan_grad", "nan_loss", "flip_grad", "misread", "spoil_state", "flip_bit", "poison", "spike",
    "wrong_product",
}  # fmt: skip
STORED = {"corrupt_checkpoint", "corrupt_snapshots", "disk_full", "store_gone"}
GROUPS = (("processes", RED), ("checkpoints, disks, stores", GREEN), ("numbers", "#1f5fa8"))


def main() -> None:
    # Text stays text, and the same records give the same file.
    rcParams.update({"svg.hashsalt": "holdfast", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    soak, trace = (
        json.loads((DOCS / "records" / name).read_text())
        for name in ("soak.json", "soak-trace.json")
    )
    _faults(left, soak["totals"]["by_kind"])
    _trace(right, trace["segments"])
    for axes, words in ((left, told(soak)), (right, told(trace))):
        axes.set_title("\n".join(words), loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "soak.svg", metadata={"Date": None, "Creator": None})


def told(record: dict[str, Any]) -> list[str]:
    """What a record says, in lines."""
    totals = record["totals"]
    if "sittings" in totals:
        runs = (
            f"{totals['same_digest']} of {totals['sittings']} runs: the digest of the run in peace"
        )
        if more := totals.get("same_with_faults_below_limits"):
            runs += f",\n{more} more with what stayed below the guard's limits"
        return [f"{totals['faults']} random faults on one machine", *runs.split("\n")]
    return [
        f"{totals['faults']} failures of a cluster in {totals['days']:.0f} days; "
        f"{totals['hit_the_run']} hit the run,",
        f"{totals['recovered_without_a_hand']} of these without a hand; goodput "
        f"{totals['goodput']:.0%}, plan says {totals['plan']['goodput_of_these']:.0%}",
        f"{totals['same_digest']} of {totals['segments']} runs: the digest of the run in peace",
    ]


def _faults(axes: Any, by_kind: dict[str, int]) -> None:
    """How often each kind struck."""
    kinds = sorted(by_kind, key=lambda kind: by_kind[kind])
    groups = [2 if kind in NUMBERS else int(kind in STORED) for kind in kinds]
    for number, (label, colour) in enumerate(GROUPS):
        mine = [kind for kind, group in zip(kinds, groups, strict=True) if group == number]
        places = [kinds.index(kind) for kind in mine]
        bars = axes.barh(places, [by_kind[kind] for kind in mine], color=colour, label=label)
        axes.bar_label(bars, padding=2)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.legend(loc="lower right", frameon=False)


def _trace(axes: Any, segments: list[dict[str, Any]]) -> None:
    """Each failure on its node, over the runs that were played."""
    rows = sorted(
        {(one["seed"], fault["node"]) for one in segments for fault in one["faults"]}, reverse=True
    )
    for one in segments:
        mine = [place for place, (seed, _) in enumerate(rows) if seed == one["seed"]]
        axes.fill_between(
            [one["day"], one["until_day"]], min(mine) - 0.4, max(mine) + 0.4,
            color=GREEN if one["same_digest"] else RED, alpha=0.13,
        )  # fmt: skip
    for hit, colour, label in (
        (False, GREY, "a node that was idle"),
        (True, ORANGE, "hit the run"),
    ):
        faults = [(f, one["seed"]) for one in segments for f in one["faults"] if f["hit"] is hit]
        axes.scatter(
            [fault["day"] for fault, _ in faults],
            [rows.index((seed, fault["node"])) for fault, seed in faults],
            color=colour, s=60 if hit else 18, marker="x", label=label,
        )  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"seed {seed}, {node}" for seed, node in rows])
    axes.set_ylim(-2, len(rows))
    axes.set_xlabel("day of the trace; each band is a run, green if its digest is the same")
    axes.legend(loc="lower right", frameon=False, ncols=2)


if __name__ == "__main__":
    main()
