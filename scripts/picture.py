"""Draws docs/survived.svg: python scripts/picture.py [--record docs/survived.json]

Trains the nano model on real text three times, two ranks each: with a poisoned range, with the
same range and no guard, and told to skip what the first run skipped. What they did is written
to docs/survived.json; with ``--record`` a picture is drawn from such a file and nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runner.command.demo import skip_override

ROOT = Path(__file__).parent.parent
SETTINGS = (
    "model=nano",
    "data=python",
    "model.precision=fp32",
    "steps=120",
    "batch.global_size=16",
    "batch.micro_size=8",
    "eval.every=0",
    "checkpoint.every=20",
    "track.every=20",
)
POISON = (985, 1035)
BLUE, PALE, RED, ORANGE = "#1f5fa8", "#9cc3ee", "#c0392b", "#e08214"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="draw this record, train nothing")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "survived.svg")
    options = parser.parse_args()
    if options.record:
        record = json.loads(options.record.read_text())
    else:
        record = _train()
        text = json.dumps(record, indent=None, separators=(",", ":"))
        options.picture.with_suffix(".json").write_text(text.replace("],[", "],\n[") + "\n")
    if record["healed"]["digest"] != record["told"]["digest"]:
        sys.exit("the two runs ended with different states")
    draw(record, options.picture)
    return 0


def _train() -> dict[str, Any]:
    poison = f"faults=[poison@samples={POISON[0]}-{POISON[1]}]"
    with tempfile.TemporaryDirectory(prefix="holdfast-picture-") as folder:
        healed = _run(Path(folder) / "healed", poison)
        unguarded = _run(Path(folder) / "unguarded", poison, "guard=off")
        skipping = _run(Path(folder) / "told", skip_override(healed["skipped"]))
    return {
        "settings": SETTINGS,
        "poisoned": POISON,
        "healed": healed,
        "unguarded": unguarded,
        "told": skipping,
    }


def _run(out: Path, *settings: str) -> dict[str, Any]:
    """Train to the end; the lines of metrics and journal that the picture shows."""
    command = ["-m", "runner", "launch", "--nproc", "2", "--restarts", "0", f"out={out}"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    subprocess.run([sys.executable, *command, *SETTINGS, *settings], env=environment, check=True)
    summary = json.loads((out / "summary.json").read_text())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    journal = [json.loads(line) for line in (out / "journal.jsonl").read_text().splitlines()]
    return {
        "digest": summary["state_digest"],
        "skipped": summary["skipped"],
        "rollbacks": [
            {"from": line["step"], "to": line["detail"]["to_step"]}
            for line in journal
            if line["kind"] == "rollback"
        ],
        "steps": [[line["step"], line["loss"], line["action"]] for line in metrics],
    }


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the losses of the three runs, discarded attempts and the rollback."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    # The same record gives the same file.
    rcParams.update({"svg.hashsalt": "holdfast", "font.size": 11})
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    skipping, healed, unguarded = (
        record[name]["steps"] for name in ("told", "healed", "unguarded")
    )
    bad = [row for row in healed if row[2] != "apply"]
    losses = [row[1] for row in skipping]
    top, bottom = max(losses), min(losses)
    axes.plot(*_applied(skipping), color=PALE, lw=7, label="told never to read the range")
    axes.plot(*_applied(healed), color=BLUE, lw=1.6, label="met the range, left its samples out")
    axes.plot(
        *_applied(unguarded), color=RED, lw=1.6, ls=(0, (4, 2)), label="the same without guard"
    )
    lost = next(row[0] for row in unguarded if row[1] is None or not math.isfinite(row[1]))
    axes.plot([lost, skipping[-1][0]], [top, top], color=RED, lw=1.6, ls=(0, (4, 2)))
    axes.annotate(
        f"without guard: NaN from step {lost} to the end",
        ((lost + skipping[-1][0]) / 2, top), (0, 5), textcoords="offset points",
        ha="center", color=RED,
    )  # fmt: skip
    # Several attempts at one step lie above each other.
    height = 0.055 * (top - bottom)
    mark = top - 0.12 * (top - bottom)
    at = [row[0] for row in bad]
    heights = [mark - height * at[:place].count(step) for place, step in enumerate(at)]
    axes.scatter(
        at, heights, marker="x", color=ORANGE, s=40, zorder=4,
        label=f"an attempt that was not applied ({len(bad)})",
    )  # fmt: skip
    lowest = min(heights)
    for rollback in record["healed"]["rollbacks"]:
        arrow_y = lowest - 1.4 * height
        axes.annotate(
            "", (rollback["to"], arrow_y), (rollback["from"], arrow_y),
            arrowprops={"arrowstyle": "-|>", "color": ORANGE, "lw": 1.6},
        )  # fmt: skip
        axes.annotate(
            f"back to the proven\ncheckpoint of step {rollback['to']}",
            (rollback["to"], arrow_y), (-6, 0), textcoords="offset points",
            ha="right", va="center", color=ORANGE,
        )  # fmt: skip
    first, last = record["poisoned"]
    digest = record["healed"]["digest"][:16]
    axes.set_title(
        f"{last - first + 1} poisoned samples, survived: both guarded runs end with state {digest}",
        fontsize=11.5, loc="left",
    )  # fmt: skip
    axes.set_xlabel("step (nano model, Python source as bytes, 2 ranks on a CPU)")
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_ylim(bottom - 0.06 * (top - bottom), top + 0.14 * (top - bottom))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center right", frameon=False, bbox_to_anchor=(1, 0.56))
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def _applied(rows: list[list[Any]]) -> tuple[list[int], list[float]]:
    """Step and loss of the lines that count: the last applied one of each step."""
    kept = {
        step: loss
        for step, loss, action in rows
        if action == "apply" and loss is not None and math.isfinite(loss)
    }
    steps = sorted(kept)
    return steps, [kept[step] for step in steps]


if __name__ == "__main__":
    sys.exit(main())
