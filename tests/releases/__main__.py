"""Keeps a run of this version: python -m tests.releases

A release is made once and never again: it is what the version really wrote.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from runner.system.version import __version__
from tests.run import finish

FOLDER = Path(__file__).parent
SETTINGS = (
    "data=synthetic", "data.samples=400", "data.seq_len=8", "data.workers=0", "model.dim=8",
    "model.layers=1", "model.heads=2", "model.ffn_dim=8", "batch.global_size=4",
    "batch.micro_size=4", "schedule.total=12", "checkpoint.clean_after=2", "checkpoint.every=4",
    "checkpoint.keep=1", "checkpoint.memory_every=0", "compute.precision=fp32", "eval.every=0",
    "track.report_minutes=null", "track.read=false", "explain=off", "parallel=single",
)  # fmt: skip
STEPS, ALL = 8, 12
# What resuming needs; the rest is for people.
KEPT = ("config.yaml", "journal.jsonl", "metrics.jsonl", "ring.jsonl", "run_id", "summary.json")


def main() -> int:
    """Make the folder of this version; 1 if it is there."""
    place = FOLDER / __version__
    if place.exists():
        print(f"{place} is there: a release is kept once")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        finish(out, *SETTINGS, f"steps={STEPS}", ranks=0)
        losses = [
            line["loss"]
            for line in finish(Path(folder) / "whole", *SETTINGS, f"steps={ALL}", ranks=0).metrics()
        ]
        for name in (*KEPT, "ring", "incarnation"):
            of = out / name
            if of.is_dir():
                shutil.copytree(of, place / name)
            elif of.exists():
                place.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(_plain(of.read_text(), folder))
        for file in place.rglob("*"):
            if file.is_file() and file.suffix in ("", ".json") and file.parent.name != "ring":
                file.write_text(_plain(file.read_text(), folder))
    (place / "losses.json").write_text(json.dumps(losses) + "\n")
    return 0


def _plain(text: str, folder: str) -> str:
    """Without the names of this machine."""
    return text.replace(socket.gethostname(), "host").replace(folder, "runs")


if __name__ == "__main__":
    sys.exit(main())
