"""Proves every script with a planted defect, and every sound one; prints what was named first.

    python -m tests.prove_resume.table [--only TEXT] [--out FILE] [--minutes N] [--real]
    python -m tests.prove_resume.table --page

``--real`` starts each process anew, as a user's are; else they are forked from one that has torch
imported, which takes a tenth of the time. A case that differs from what was planted is a failure.
With ``--out`` cases are left out that the file has, so that a table may take several sittings of
``--minutes``. ``--page`` only writes the numbers of docs/records/prove-resume.jsonl into
docs/prove_resume.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from runner.prove import starts
from runner.prove.drive import Plan, prove
from runner.prove.verdict import Verdict
from tests import warm
from tests.full import clean_commit
from tests.prove_resume.cases import NAMED, PLANTED, SOUND_CASES, STEPS, TRAINERS, Case

DOCS = Path(__file__).parents[2] / "docs"
PAGE, RECORD = DOCS / "prove_resume.md", DOCS / "records" / "prove-resume.jsonl"
PAGES = (PAGE, RECORD.with_suffix(".md"))
COLUMNS = {
    "plain": "bare loop",
    "ddp": "DDP",
    "launches_itself": "DDP, own torchrun",
    "fsdp2": "FSDP2",
    "sharded": "FSDP1, ZeRO",
    "hf_trainer": "HF Trainer",
    "lightning_script": "Lightning",
    "accelerate_script": "Accelerate",
    "fabric_script": "Fabric",
    "gan": "GAN",
    "wild": "other loops",
}


def named(verdict: Verdict) -> str:
    """The kind of the first finding, ``equal`` or ``undecided``."""
    if verdict.first:
        return verdict.first.kind
    return "equal" if verdict.is_equal else "undecided"


def begin(
    command: Sequence[str], *, is_asked_to_stop: Callable[[], bool], **options: Any
) -> subprocess.Popen[Any]:
    """Start the words of prove-resume's shell, forked if they are a Python program's."""
    folder, *words = command[3:]
    if words[0] != sys.executable:
        return subprocess.Popen(command, **options)
    trains = any(Path(word).stem in TRAINERS for word in words)
    kind = warm.TrainersPopen if trains else warm.WarmPopen
    return kind(words, cwd=folder, stdin=subprocess.DEVNULL, **options)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Have prove-resume's starts forked from processes that have torch imported."""
    with mock.patch.object(starts, "Job", partial(starts.Job, popen=begin)):
        yield


def verdict_of(case: Case, home: Path, **settings: Any) -> Verdict:
    """Prove one case in an empty working directory."""
    plan = Plan(
        command=tuple(case.command(Path("out"))),
        out_argument="out",
        limit_seconds=120,
        **{"steps": STEPS, "kills": case.kills, **settings},
    )
    return prove(plan, environment=os.environ | case.environment, home=home)


def row_of(case: Case, verdict: Verdict, commit: str | None) -> dict[str, Any]:
    """A line of the record.

    Args:
        commit: whose files were run; None if some differed.
    """
    kind = named(verdict)
    return {
        "case": str(case),
        "right": kind in case.named,
        "named": kind,
        "commit": commit,
        "start": verdict.resumes[-1].start if verdict.resumes else None,
        "since": dict(verdict.resumes[-1].since) if verdict.resumes else {},
        "seconds": round(verdict.seconds, 1),
        "text": verdict.text().splitlines()[: 2 if verdict.first or verdict.reason else 1],
    }


def run(cases: Sequence[Case], out: Path | None, minutes: float) -> list[Mapping[str, Any]]:
    """Prove each that ``out`` lacks; prints and appends as it goes, begins none after a time."""
    rows, commit, end = [], clean_commit(), time.monotonic() + 60 * minutes
    done = {row["case"] for row in read(out)} if out and out.exists() else set[str]()
    for case in cases:
        if str(case) in done or time.monotonic() > end:
            continue
        with tempfile.TemporaryDirectory(prefix="prove-home-") as home:
            row = row_of(case, verdict_of(case, Path(home)), commit)
        rows.append(row)
        mark = "  " if row["right"] else "NO"
        line = f"{mark} {row['case']:42} {row['named']:18} {row['seconds']:6.1f} s"
        print(f"{line}  {row['text'][0]}", flush=True)
        if out:
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return rows


def read(path: Path) -> list[dict[str, Any]]:
    """The last row of each case."""
    rows = map(json.loads, path.read_text().splitlines())
    return [*{row["case"]: row for row in rows}.values()]


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The two numbers that count."""
    sound = [row for row in rows if row["case"].endswith("-sound")]
    planted = [row for row in rows if row not in sound]
    right = sum(row["right"] for row in planted)
    alarms = sum(row["named"] not in ("equal", "undecided") for row in sound)
    unclear = sum(row["named"] == "undecided" for row in sound)
    told = f"{alarms} false alarm{'s' * (alarms != 1)} in {len(sound)} sound scripts"
    told += f", {unclear} of them not judged" if unclear else ""
    return f"{right} of {len(planted)} planted mistakes named first, {told}"


def commits(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many cases were run at which commit."""
    count = Counter(row.get("commit") or "an earlier state" for row in rows)
    told = ", ".join(f"{number} at {commit}" for commit, number in count.most_common())
    return f"{len(rows)} of {len(PLANTED) + len(SOUND_CASES)} cases were run: {told}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each mistake, a column for each kind of script; ``named / planted``."""
    by_name = {str(case): case for case in (*PLANTED, *SOUND_CASES)}
    cells: dict[tuple[str, str], list[bool]] = {}
    for row in rows:
        case = by_name[row["case"]]
        cells.setdefault((case.defect, case.script), []).append(row["right"])
    scripts = [name for name in COLUMNS if any(name == script for _, script in cells)]
    defects = [name for name in NAMED if any(name == defect for defect, _ in cells)]
    lines = ["| mistake | " + " | ".join(COLUMNS[name] for name in scripts) + " |"]
    lines.append("|---" * (1 + len(scripts)) + "|")
    for defect in (*defects, ""):
        told = [cells.get((defect, script), []) for script in scripts]
        shown = [f"{sum(cell)} / {len(cell)}" if cell else "" for cell in told]
        words = f"`{defect}`" if defect else "**sound: equal / scripts**"
        lines.append(f"| {words} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def page_of(page: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page with the numbers of these rows."""
    for pattern, text in (
        (r"\d+ of \d+ planted mistakes named first, .*(?=\.\n)", summary(rows)),
        (r"\d+ of \d+ cases were run: .*(?=; each)", commits(rows)),
        (r"(?s:\| mistake \|.*?(?=\n\n))", table(rows)),
    ):
        page = re.sub(pattern, lambda _, text=text: text, page)
    return page


def main() -> int:
    """Prove the chosen cases; 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="a part of the case's name")
    parser.add_argument("--out", type=Path, help="append a JSON line a case")
    parser.add_argument("--real", action="store_true", help="start every process anew")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case later")
    parser.add_argument("--page", action="store_true", help="only write the record's numbers")
    arguments = parser.parse_args()
    if arguments.page:
        for page in PAGES:
            page.write_text(page_of(page.read_text(), read(RECORD)))
        return 0
    chosen = [
        case
        for case in (*PLANTED, *SOUND_CASES)
        if not arguments.only or any(text in str(case) for text in arguments.only)
    ]
    with contextlib.ExitStack() as stack:
        if not arguments.real:
            stack.callback(warm.close)
            stack.enter_context(forked())
        done = run(chosen, arguments.out, arguments.minutes)
    print(summary(done))
    return 0 if all(row["right"] for row in done) else 1


if __name__ == "__main__":
    sys.exit(main())
