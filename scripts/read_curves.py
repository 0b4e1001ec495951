"""How well ``holdfast read`` names made curves, and how silent it is on recorded ones.

    python -m scripts.read_curves --seeds 40 --first 9000 --rows 1000000 --real CURVES/healthy

Prints a table by signature; for each folder of recorded curves that is given, or single file, how
many show what; and how long a file of so many rows takes. 0 when recall and precision on made
curves are 90 % or more, at most 5 % of the healthy ones (made, and those of ``--real``, which are
taken for healthy; ``--troubled`` ones are not) show anything, and the long file takes 30 s of
processor time or less.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from runner.command.read import curve_of
from runner.tools.backtest.column import FURTHER
from runner.tools.backtest.read import read_columns
from runner.tools.backtest.table import Names
from runner.tools.reading.read import read
from scripts.bench.process import ROOT, environment
from tests.made_curves import HEALTHY, TROUBLED, healthy

_LEAST, _MOST_FALSE, _MOST_SECONDS = 0.9, 0.05, 30.0


def read_made(seeds: range) -> bool:
    """Recall by signature, precision over all, false ones on healthy curves."""
    num_right = num_signatures = num_loud = num_made = 0
    print("| made | recognised | what else was told |\n|---|---|---|")
    for name, make in TROUBLED.items():
        expected, recognised = name.partition("/")[0], 0
        others: Counter[str] = Counter()
        for seed in seeds:
            names = [one.signature for one in read(make(np.random.default_rng(seed)).curve())]
            recognised += expected in names
            num_signatures += len(names)
            others.update(one for one in names if one != expected)
        num_right += recognised
        num_made += len(seeds)
        print(f"| {name} | {recognised} of {len(seeds)} | {_counted(others)} |")
    for name, make in HEALTHY.items():
        others = Counter()
        loud = 0
        for seed in seeds:
            names = [one.signature for one in read(make(np.random.default_rng(seed)).curve())]
            others.update(names)
            loud += bool(names)
        num_signatures += sum(others.values())
        num_loud += loud
        silent = len(seeds) - loud
        print(f"| healthy: {name} | silent {silent} of {len(seeds)} | {_counted(others)} |")
    num_healthy = len(seeds) * len(HEALTHY)
    recall, precision = num_right / num_made, num_right / max(num_signatures, 1)
    print(
        f"\nRecall: {100 * recall:.1f} % of {num_made}. Precision: {100 * precision:.1f} % of "
        f"{num_signatures} reports. Healthy curves with a report: {num_loud} of {num_healthy}."
    )
    return min(recall, precision) >= _LEAST and num_loud <= _MOST_FALSE * num_healthy


def read_recorded(folder: Path) -> tuple[int, int]:
    """Print what a file, or the files of a folder, show; how many show nothing, and how many."""
    shown: Counter[str] = Counter()
    names = Names(further=dict.fromkeys(FURTHER))
    paths = sorted(folder.rglob("*.csv")) if folder.is_dir() else [folder]
    silent = 0
    for path in paths:
        findings = read(curve_of(read_columns(str(path), names)))
        silent += not findings
        shown.update(one.signature for one in findings)
        for one in findings:
            print(f"  {path.name}: {one.signature}: {one.evidence}")
    print(f"{folder.name}: {silent} of {len(paths)} silent; {_counted(shown)}")
    return silent, len(paths)


def read_long(num_rows: int) -> bool:
    """Time the command on a CSV file of a healthy curve; its start and parsing included."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.csv"
        path.write_text(healthy(np.random.default_rng(1), rows=num_rows, noise=0.02).csv())
        began, before = time.monotonic(), _children_seconds()
        done = subprocess.run(
            [sys.executable, "-m", "runner", "read", str(path), "--json"],
            cwd=ROOT, env=environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        elapsed, computed = time.monotonic() - began, _children_seconds() - before
    names = [one["signature"] for one in json.loads(done.stdout)["signatures"]]
    print(
        f"{num_rows:,} rows: {computed:.1f} s of processor time, {elapsed:.1f} s in all; "
        f"{_counted(Counter(names))}"
    )
    return computed <= _MOST_SECONDS


def _children_seconds() -> float:
    """Processor time of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "-"


def main() -> int:
    """Read all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=0, help="of a long file; 0: none")
    parser.add_argument("--real", type=Path, nargs="*", default=[], metavar="CURVES")
    parser.add_argument("--troubled", type=Path, nargs="*", default=[], metavar="CURVES")
    options = parser.parse_args()
    holds = read_made(range(options.first, options.first + options.seeds))
    counts = [read_recorded(folder) for folder in options.real]
    num_silent, num_real = (
        (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    )
    holds = holds and num_real - num_silent <= _MOST_FALSE * num_real
    for folder in options.troubled:
        read_recorded(folder)
    if options.rows:
        holds = read_long(options.rows) and holds
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
