"""Prints a table of drills: when a fault was noticed, which rank was named, when training resumed.

Each row is a real run of two ranks under ``runner launch``, broken once, and held against the
same run left in peace: both must end with the same state.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from runner.fault.spec import ENDINGS, POINTS
from runner.system.json_lines import read_lines
from scripts.bench.provenance import head

RANKS = 2
# A tiny model's step takes 0.03 s; a start several seconds.
SETTINGS = """
model=tiny data=synthetic data.workers=0 eval.every=20 eval.samples=8 steps=60 schedule.warmup=5
checkpoint.every=10 checkpoint.clean_after=5 checkpoint.keep=9 guard.min_history=10
guard.remedy=discard track.every=1000 watchdog.floor_seconds=3 watchdog.slow_seconds=20
"""
# Three steps' worth of positions and a bit: enough bad steps to force a rollback.
POISON = "poison@samples=700-790"
# 30 is saved at; the poison is met at 22.
STEPS = {"save": 30, "rollback": 22}
TITLES = ("fault", "at", "rank", "noticed", "training again", "named", "same end")
DRILLS = {f"{e}:{p}:{r}": (e, p, r) for e in ENDINGS for p in POINTS for r in range(RANKS)}


@dataclass(frozen=True)
class Row:
    """One drill; seconds count from the fault, None if it did not happen."""

    ending: str
    point: str
    rank: int
    noticed: float | None
    again: float | None
    named: list[int] | None
    is_same: bool
    is_healed: bool

    def cells(self) -> list[str]:
        named = "-" if self.named is None else ",".join(map(str, self.named))
        times = ["-" if value is None else f"{value:.1f} s" for value in (self.noticed, self.again)]
        end = ("yes" if self.is_same else "NO") if self.is_healed else "DID NOT END"
        return [self.ending, self.point, str(self.rank), *times, named, end]


def main() -> int:
    """Run the drills; returns 1 if one of them did not recover."""
    options = _options()
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="holdfast-drill-") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[Row] = []
        peace: dict[str, str] = {}
        for name in options.only or _usual(full=options.full):
            ending, point, rank = DRILLS[name]
            faults = [POISON] if point == "rollback" else []
            out = folder / ("poisoned" if faults else "clean")
            if out.name not in peace:
                if not _run(out, faults):
                    sys.exit(f"the run without a fault did not end well: {out}.log")
                peace[out.name] = _digest(out)
            rows.append(_drill(folder, ending, point, rank, faults, peace[out.name]))
            console.print("  ".join(rows[-1].cells()), style="dim")
            if options.json:  # after each, so that a crash does not lose earlier rows
                record = head(["bash scripts/drill.sh", *sys.argv[1:]])
                record["rows"] = [asdict(row) for row in rows]
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    _print(console, rows)
    return 0 if all(row.is_same and row.is_healed for row in rows) else 1


def _print(console: Console, rows: list[Row]) -> None:
    """Print every row, then a summary for each ending."""
    table = Table(*TITLES)
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    for ending in dict.fromkeys(row.ending for row in rows):
        here = [row for row in rows if row.ending == ending]
        healed = sum(row.is_same and row.is_healed for row in here)
        console.print(
            f"{ending}: {healed} of {len(here)} healed with the same end, "
            f"noticed after {_range([row.noticed for row in here])}, "
            f"training again after {_range([row.again for row in here])}"
        )


def _range(seconds: list[float | None]) -> str:
    known = [value for value in seconds if value is not None]
    if not known:
        return "-"
    return f"{min(known):.1f} to {max(known):.1f} s (median {statistics.median(known):.1f} s)"


def _usual(*, full: bool) -> Iterator[str]:
    for name, (ending, point, rank) in DRILLS.items():
        in_turn = rank == POINTS.index(point) % RANKS
        if full or point == "fetch" or (ending == "kill" and in_turn):
            yield name


def _drill(
    folder: Path, ending: str, point: str, rank: int, faults: list[str], expected: str
) -> Row:
    fault = f"{ending}@step={STEPS.get(point, 27)},rank={rank},at={point}"
    out = folder / f"{ending}-{point}-{rank}"
    is_done = _run(out, [fault, *faults])
    journal, _ = read_lines(out / "journal.jsonl")
    struck = [path.stat().st_mtime for path in (out / "faults").glob(f"{ending}-*")]
    crashes = [line for line in journal if line["kind"] == "crash"]
    starts = [line["time"] for line in journal if line["kind"] == "start"]
    # The first rank writes the journal: of its own death the next start tells, from the cause
    # that its neighbours wrote down.
    causes = [path.stat().st_mtime for path in (out / "incidents").glob("*/cause.json")]
    noticed = causes + [line["time"] for line in crashes]
    return Row(
        ending=ending,
        point=point,
        rank=rank,
        noticed=min(noticed) - struck[0] if noticed and struck else None,
        again=starts[1] - struck[0] if len(starts) > 1 and struck else None,
        named=crashes[0]["ranks"] if crashes else None,
        is_same=_digest(out) == expected,
        is_healed=bool(struck) and is_done,
    )


def _run(out: Path, faults: list[str]) -> bool:
    """Whether the run succeeded; its output is in a file beside ``out``."""
    command = [sys.executable, "-m", "runner", "launch", "--nproc", str(RANKS), "--restarts", "3"]
    command += ["--pause", "0.1", f"out={out}", *SETTINGS.split(), f"faults=[{','.join(faults)}]"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.run(command, stdout=log, stderr=log, env=env).returncode == 0


def _digest(out: Path) -> str:
    """Empty where the run left none."""
    file = out / "summary.json"
    return str(json.loads(file.read_text())["state_digest"]) if file.exists() else ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every fault at every point")
    parser.add_argument(
        "--only",
        action="append",
        choices=DRILLS,
        metavar="ENDING:POINT:RANK",
        help="one row, such as kill:save:1; several times for several",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--keep", metavar="DIR", help="leave runs and logs there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
