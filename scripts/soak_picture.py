"""Draws docs/soak.svg from the records of both soaks: python -m scripts.soak_picture"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import rcParams
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
BLUE, GREEN, RED, ORANGE, GREY = "#1f5fa8", "#2f8f5b", "#c0392b", "#e08214", "#8a8a8a"


def main() -> None:
    # Text stays text, and the same records give the same file.
    rcParams.update({"svg.hashsalt": "holdfast", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(10, 6.2), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=(1, 1.5))
    for one, name, draw in zip(axes, ("soak", "soak-trace"), (_faults, _trace), strict=True):
        record = json.loads((DOCS / "records" / f"{name}.json").read_text())
        draw(one, record)
        one.set_title("\n".join(told(record["totals"])), loc="left", fontsize=10)
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "soak.svg", metadata={"Date": None, "Creator": None})


def told(totals: dict[str, Any]) -> list[str]:
    """What a record says, in lines."""
    runs = totals.get("sittings") or totals["segments"]
    same = f"{totals['same_digest']} of {runs} runs with the digest of the undisturbed run"
    if "sittings" in totals:
        below = totals.get("same_with_faults_below_limits")
        more = [f"{below} more with what stayed below the guard's limits"] if below else []
        return [f"{totals['faults']} random faults on one machine", same, *more]
    goodput, plan = totals["goodput"], totals["plan"]["goodput_of_these"]
    return [
        f"{totals['faults']} failures of a cluster in {totals['days']:.0f} days; "
        f"{totals['hit_the_run']} hit a run,",
        f"{totals['recovered_without_a_hand']} of these without a hand; goodput {goodput:.0%}, "
        f"plan says {plan:.0%}",
        same,
    ]


def _faults(axes: Any, record: dict[str, Any]) -> None:
    """How often each kind struck."""
    kinds = sorted(record["totals"]["by_kind"].items(), key=lambda pair: pair[1])
    axes.bar_label(axes.barh(*zip(*kinds, strict=True), color=BLUE), padding=2)


def _trace(axes: Any, record: dict[str, Any]) -> None:
    """Each failure on its node, over the runs that were played."""
    runs = record["segments"]
    faults = [(run["seed"], fault["node"], fault) for run in runs for fault in run["faults"]]
    rows = sorted({(seed, node) for seed, node, _ in faults}, reverse=True)
    for run in runs:
        mine = [row for row, (seed, _) in enumerate(rows) if seed == run["seed"]]
        days, colour = run["until_day"] - run["day"], GREEN if run["same_digest"] else RED
        place = (min(mine) - 0.4, len(mine) - 0.2)
        axes.broken_barh([(run["day"], days)], place, color=colour, alpha=0.13)
    for hit, label in ((False, "a node that was idle"), (True, "hit the run")):
        when = [fault["day"] for *_, fault in faults if fault["hit"] is hit]
        on = [rows.index((seed, node)) for seed, node, fault in faults if fault["hit"] is hit]
        style = {"color": ORANGE, "s": 60} if hit else {"color": GREY, "s": 18}
        axes.scatter(when, on, marker="x", label=label, **style)
    axes.set_yticks(range(len(rows)), [f"seed {seed}, {node}" for seed, node in rows])
    axes.set_ylim(-2, len(rows))
    axes.set_xlabel("day of the trace; each band is a run, green if its digest is the same")
    axes.legend(loc="lower right", frameon=False, ncols=2)


if __name__ == "__main__":
    main()
