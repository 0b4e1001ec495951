"""Makes small real trainings, healthy and with one thing wrong, and reads them.

python -m scripts.read_trainings [--seeds N] [--keep DIR]: a byte model of 0.03 M parameters on the
pages in docs/, 400 to 600 steps in FP32, without the guard: a few seconds each on one core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from runner.command.read import curve_of
from runner.tools.backtest.column import FURTHER
from runner.tools.backtest.read import read_columns
from runner.tools.backtest.table import Names
from runner.tools.reading.read import read

ROOT = Path(__file__).resolve().parent.parent
ALIKE = (
    "model=tiny", "model.precision=fp32", "parallel=single", "parallel.device=cpu", "data=text",
    f"data.path={ROOT / 'docs'}", "data.suffixes=[.md]", "data.workers=0", "data.seq_len=64",
    "batch.global_size=16", "batch.micro_size=16", "steps=400", "eval.every=25",
    "eval.samples=32", "schedule.warmup=10", "checkpoint.every=600", "track.every=1000",
    "guard=off", "optim.lr=3e-3",
)  # fmt: skip
# Settings by kind, and the signature that is right; none of what is healthy.
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "cosine": ((), ""),
    "constant": (("schedule=constant",), ""),
    "wsd": (("schedule=wsd",), ""),
    "linear": (("schedule=linear",), ""),
    "batch of 4": (("batch.global_size=4", "batch.micro_size=4"), ""),
    "no warm-up": (("schedule.warmup=0",), ""),
    "rate 0.3": (("optim.lr=0.3",), "rate_too_high"),
    "rate 0.1, constant": (("optim.lr=0.1", "schedule=constant"), "rate_too_high"),
    "rate 3e-6": (("optim.lr=3e-6",), "rate_too_low"),
    "rate 1e-5": (("optim.lr=1e-5",), "rate_too_low"),
    "warm-up of 4000": (
        ("optim.lr=1e-3", "schedule.warmup=4000", "schedule.total=5000"),
        "warmup_too_long",
    ),
    "floor at 30 %": (
        ("schedule=linear", "schedule.total=120", "schedule.floor=0.001"),
        "floor_early",
    ),
    "12 KB of text": (
        ("data.path=SMALL", "optim.lr=5e-3", "schedule=constant", "steps=600", "data.held_out=0.2"),
        "overfitting",
    ),
    "a loud range": (("faults=[spike@samples=3200-3231,scale=50]",), "spike"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    print("| training | right | what was told |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        small = folder / "small.md"
        small.write_bytes((ROOT / "docs" / "configuration.md").read_bytes()[:12_000])
        for kind, (settings, expected) in KINDS.items():
            shown = []
            for seed in range(options.seeds):
                out = folder / f"{''.join(c if c.isalnum() else '-' for c in kind)}-{seed}"
                changed = [setting.replace("SMALL", str(small)) for setting in settings]
                shown.append(_signatures(out, [*ALIKE, *changed, f"seed={seed}"]))
            right = sum(expected in names if expected else not names for names in shown)
            cell = "; ".join(", ".join(names) or "-" for names in shown)
            print(f"| {kind} | {right} of {options.seeds} | {cell} |", flush=True)


def _signatures(out: Path, settings: list[str]) -> list[str]:
    if not (out / "summary.json").exists():
        command = [sys.executable, "-m", "runner", f"out={out}", *settings]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, check=True, capture_output=True, env=environment)
    columns = read_columns(str(out), Names(further=dict.fromkeys(FURTHER)))
    return [finding.signature for finding in read(curve_of(columns))]


if __name__ == "__main__":
    main()
