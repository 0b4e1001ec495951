"""Puts known faults back into copies of the tree, and counts which of them drawn cases find.

A fault counts as found where a drawn case fails twice with it and passes without it. The faults
are patches in tests/swarm/mutants, each the reverse of the lines that mended it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from scripts.bench.provenance import commit
from scripts.swarm import swarm
from scripts.swarm.case import read
from tests.mutants import ROOT, copy_tree

MUTANTS = Path("tests/swarm/mutants")
_RECORD = ROOT / "docs/records/swarm-proof.jsonl"


def put_in(patch: Path, tree: Path) -> None:
    """
    Raises:
        SystemExit: the patch does not fit the code any more.
    """
    command = ["patch", "-p1", "--forward", "--silent", "-i", str(patch.resolve())]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{patch.name}: does not fit, make it anew from its mend: {done.stdout[-500:]}")


def _search(tree: Path, seed: int, minutes: float, jobs: int) -> list[Path]:
    """Draw in a tree until a case fails; returns the files of those that did."""
    keep = tree / "found"
    command = [
        *(sys.executable, "-m", "scripts.swarm", "--seed", str(seed), "--minutes", str(minutes)),
        *("--jobs", str(jobs), "--keep", str(keep), "--whole", "--first"),
    ]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    subprocess.run(command, cwd=tree, env=environment, check=False, stdout=subprocess.DEVNULL)
    return sorted(keep.glob("*.json"), key=lambda file: int(file.stem))


def _is_found(patch: Path, seed: int, minutes: float, jobs: int) -> tuple[int, str]:
    """The number of drawn cases up to the one that found it, and what it says; or 0."""
    limit = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="swarm-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        put_in(patch, tree)
        first = seed
        while (left := limit - time.monotonic()) > 0:
            files = _search(tree, first, left / 60, jobs)
            for file in files:
                if not _fails_here(file):
                    row = json.loads(file.read_text())
                    return row["seed"] - seed + 1, row["wrong"][0]
                first = max(first, int(file.stem) + 1)
                file.unlink()
    return 0, ""


def _fails_here(file: Path) -> bool:
    """Whether it fails without the fault as well."""
    with swarm.bench() as bench:
        return bool(bench.failures(read(file)))


def prove(
    names: Sequence[str], seed: int, minutes: float, jobs: int, say: Callable[[str], None]
) -> int:
    """Look for each mutant for so many minutes; returns an exit code."""
    tree = commit()
    patches = sorted(ROOT.glob(f"{MUTANTS}/*.patch"))
    wanted = [one for one in patches if not names or one.stem in names]
    count = 0
    for patch in wanted:
        began = time.monotonic()
        cases, words = _is_found(patch, seed, minutes, jobs)
        count += cases > 0
        row = {
            **{"mutant": patch.stem, "found_by_case": cases, "wrong": words[:300], "seed": seed},
            "seconds": round(time.monotonic() - began),
            "commit": tree,
            "date": datetime.now(UTC).date().isoformat(),
        }
        say(json.dumps(row))
        with _RECORD.open("a") as file:
            file.write(json.dumps(row) + "\n")
    say(f"{count} of {len(wanted)} found")
    return 0 if count == len(wanted) else 1
