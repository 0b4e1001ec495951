"""How well ``holdfast read`` names made curves, and how silent it is on recorded ones.

python -m scripts.read_curves [--seeds N] [--first SEED] [--real DIR ...]: a table by signature;
for each folder of recorded curves, how many files show what.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np

from runner.backtest.column import FURTHER
from runner.backtest.read import read_columns
from runner.backtest.table import Names
from runner.command.read import curve_of
from runner.reading.read import read
from tests.made_curves import HEALTHY, TROUBLED


def made(seeds: range) -> None:
    """Recall by signature, precision over all, false ones on healthy curves."""
    right = told = false = num_made = 0
    print("| made | recognised | what else was told |\n|---|---|---|")
    for name, make in TROUBLED.items():
        expected, found = name.partition("/")[0], 0
        others: Counter[str] = Counter()
        for seed in seeds:
            names = [one.signature for one in read(make(np.random.default_rng(seed)).curve())]
            found += expected in names
            told += len(names)
            others.update(one for one in names if one != expected)
        right += found
        num_made += len(seeds)
        print(f"| {name} | {found} of {len(seeds)} | {_words(others)} |")
    for name, make in HEALTHY.items():
        others = Counter()
        loud = 0
        for seed in seeds:
            names = [one.signature for one in read(make(np.random.default_rng(seed)).curve())]
            others.update(names)
            loud += bool(names)
        told += sum(others.values())
        false += loud
        print(
            f"| healthy: {name} | silent {len(seeds) - loud} of {len(seeds)} | {_words(others)} |"
        )
    num_healthy = len(seeds) * len(HEALTHY)
    print(
        f"\nrecall {100 * right / num_made:.1f} % of {num_made}, precision "
        f"{100 * right / told:.1f} % of {told} told, {false} of {num_healthy} healthy not silent"
    )


def recorded(folder: Path) -> None:
    """What the files of one folder show."""
    shown: Counter[str] = Counter()
    silent = number = 0
    names = Names(further=dict.fromkeys(FURTHER))
    for path in sorted(path for path in folder.rglob("*.csv") if path.is_file()):
        found = read(curve_of(read_columns(str(path), names)))
        number += 1
        silent += not found
        shown.update(one.signature for one in found)
        for one in found:
            print(f"  {path.name}: {one.signature}: {one.evidence}")
    print(f"{folder.name}: {silent} of {number} silent; {_words(shown)}")


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--real", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    made(range(options.first, options.first + options.seeds))
    for folder in options.real:
        recorded(folder)


if __name__ == "__main__":
    main()
