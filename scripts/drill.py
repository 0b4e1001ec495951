"""Prints a table of drills: when a fault was noticed, which rank was named, when training resumed.

Each row is a real run of two ranks under ``runner launch``, broken once, and held against the
same run left in peace: both must end with the same state.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runner.fault.spec import ENDINGS, POINTS
from runner.system.json_lines import read_lines

RANKS = 2
# A tiny model's step takes 0.03 s; a start several seconds.
SETTINGS = """
model=tiny data=synthetic data.workers=0 eval.every=20 eval.samples=8 steps=60 schedule.warmup=5
checkpoint.every=10 checkpoint.clean_after=5 checkpoint.keep=9 guard.min_history=10
guard.remedy=discard track.every=1000 watchdog.floor_seconds=3 watchdog.slow_seconds=20
watchdog.settle_seconds=2
"""
# Three steps' worth of positions and a bit: enough bad steps to force a rollback.
POISON = "poison@samples=700-790"
# 30 is saved at; the poison is met at 22.
STEPS = {"save": 30, "rollback": 22}
TITLES = ("fault", "at", "rank", "noticed", "training again", "named", "same end")


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
        end = "yes" if self.is_same else "NO"
        return [
            *(self.ending, self.point, str(self.rank)),
            *(_seconds(self.noticed), _seconds(self.again), named),
            end if self.is_healed else "DID NOT END",
        ]


def main() -> int:
    """Run the drills; returns 1 if one of them did not recover."""
    options = _options()
    console = Console(soft_wrap=True)
    if options.table:
        _print(console, _read(options.table))
        return 0
    with tempfile.TemporaryDirectory(prefix="holdfast-drill-") as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        undisturbed: dict[str, str] = {}
        for ending, point, rank in _drills(full=options.full, only=options.only):
            extra = POISON if point == "rollback" else ""
            if extra not in undisturbed:
                undisturbed[extra] = _undisturbed(
                    folder / ("poisoned" if extra else "clean"), extra
                )
            rows.append(_drill(folder, ending, point, rank, extra, undisturbed[extra]))
            if options.json:  # after each, so that a crash does not lose earlier rows
                _store(options.json, rows)
            console.print("  ".join(rows[-1].cells()), style="dim")
    _print(console, rows)
    return 0 if all(row.is_same and row.is_healed for row in rows) else 1


def _print(console: Console, rows: list[Row]) -> None:
    """Print every row, then a summary for each ending."""
    table = Table()
    for title in TITLES:
        table.add_column(title)
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
    known_seconds = [value for value in seconds if value is not None]
    if not known_seconds:
        return "-"
    low, high, median = min(known_seconds), max(known_seconds), statistics.median(known_seconds)
    return f"{low:.1f} to {high:.1f} s (median {median:.1f} s)"


def _store(path: Path, rows: list[Row]) -> None:
    machine = {
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "torch": version("torch"),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    record = {"machine": machine, "ranks": RANKS, "settings": SETTINGS.split()}
    text = json.dumps(record | {"rows": [asdict(row) for row in rows]}, indent=1)
    path.write_text(text + "\n")


def _read(path: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def _undisturbed(out: Path, extra: str) -> str:
    if not _run(out, [extra] if extra else []):
        sys.exit(f"the run without a fault did not end well: {out}.log")
    digest = _digest(out)
    assert digest is not None
    return digest


def _drills(*, full: bool, only: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    if only:
        yield from (_named(text) for text in only)
        return
    for ending in ENDINGS:
        for number, point in enumerate(POINTS):
            for rank in range(RANKS):
                if full or point == "fetch" or (ending == "kill" and rank == number % RANKS):
                    yield ending, point, rank


def _named(text: str) -> tuple[str, str, int]:
    """``kill:save:1``: ending, point, rank."""
    ending, point, rank = (*text.split(":"), "", "")[:3]
    if ending not in ENDINGS or point not in POINTS or rank not in map(str, range(RANKS)):
        sys.exit(
            f"--only {text}: ENDING:POINT:RANK, of {', '.join(ENDINGS)}; {', '.join(POINTS)}; "
            f"0 to {RANKS - 1}"
        )
    return ending, point, int(rank)


def _drill(folder: Path, ending: str, point: str, rank: int, extra: str, expected: str) -> Row:
    fault = f"{ending}@step={STEPS.get(point, 27)},rank={rank},at={point}"
    out = folder / f"{ending}-{point}-{rank}"
    is_done = _run(out, [fault, *([extra] if extra else [])])
    journal, _ = read_lines(out / "journal.jsonl")
    struck = [path.stat().st_mtime for path in (out / "faults").glob(f"{ending}-*")]
    crashes = [line for line in journal if line["kind"] == "crash"]
    starts = [line["time"] for line in journal if line["kind"] == "start"]
    # The first rank writes the journal: of its own death the next start tells, from the cause
    # that its neighbours wrote down.
    causes = [path.stat().st_mtime for path in (out / "incidents").glob("*/cause.json")]
    noticed_times = causes + [line["time"] for line in crashes]
    return Row(
        ending=ending,
        point=point,
        rank=rank,
        noticed=min(noticed_times) - struck[0] if noticed_times and struck else None,
        again=starts[1] - struck[0] if len(starts) > 1 and struck else None,
        named=crashes[0]["ranks"] if crashes else None,
        is_same=_digest(out) == expected,
        is_healed=bool(struck) and is_done,
    )


def _run(out: Path, faults: list[str]) -> bool:
    """Whether the run succeeded; its output is in a file beside ``out``."""
    launcher = ["launch", "--nproc", str(RANKS), "--restarts", "3", "--pause", "0.1"]
    overrides = [f"out={out}", *SETTINGS.split(), f"faults=[{','.join(faults)}]"]
    with out.with_suffix(".log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-m", "runner", *launcher, *overrides],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    return done.returncode == 0


def _digest(out: Path) -> str | None:
    if not (out / "summary.json").exists():
        return None
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return str(summary["state_digest"])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every fault at every point")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="ENDING:POINT:RANK",
        help="one row, such as kill:save:1; several times for several",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print rows of an earlier run")
    parser.add_argument("--keep", metavar="DIR", help="leave runs and logs there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
