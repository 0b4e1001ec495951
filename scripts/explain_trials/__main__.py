"""Runs the trials, layout by layout, and makes the page. See the package."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.explain_trials import healthy, outcome, page
from scripts.explain_trials.layouts import ALIKE, LAYOUTS
from scripts.explain_trials.outcome import Outcome
from scripts.explain_trials.unseen import Trials, append, read_rows

ROWS = Path("docs/records/explaining-trials.jsonl")
PAGE = Path("docs/records/explaining-trials.md")
_BEGUN = ".begun"  # suffix of the file with the trial under way, should it end the process
_MOST_STARTS = 4  # of one layout, where a trial ends the process


def worker(name: str, options: argparse.Namespace) -> None:
    """On one rank: all trials of a layout that the file does not have yet."""
    from runner.config.compose import compose
    from runner.distributed.env import place_from
    from runner.session.group import join
    from runner.session.session import open_run
    from scripts.explain_trials.bed import Bed
    from scripts.explain_trials.kinds import draw
    from scripts.explain_trials.tamper import noisy_embeddings

    layout, begun = LAYOUTS[name], Path(f"{options.rows}{_BEGUN}")
    known = {row.key for row in outcome.read(options.rows)}
    place = place_from(os.environ)
    if layout.noise:
        noisy_embeddings(layout.noise, seed=1 + place.rank)
    config = compose([*ALIKE, *layout.settings, f"seed={options.seed}", f"out={options.out}"])
    with join(config, place) as group:
        run = open_run(config, group)
        bed = Bed(run, layout, name)
        scene = bed.scene
        for number in range(options.first, options.first + options.rounds):
            dice = random.Random(f"{options.seed}/{name}/{number}")
            for trial in draw(scene, dice):
                key = f"{name}/{options.seed}/{number}/{trial.kind}"
                if key in known or not _is_wanted(trial.kind, options.kinds):
                    continue
                if group.is_first:
                    begun.unlink(missing_ok=True)
                    outcome.append(begun, [bed.outcome(trial, key, said=outcome.ENDED)])
                row = bed.try_one(trial, key)
                if group.is_first:
                    outcome.append(options.rows, [row])
                    print(_line(row), flush=True)
        run.ring.drain()
    os._exit(0)  # without waiting for what a trial left behind


def _line(row: Outcome) -> str:
    mark = "ok" if row.is_right or row.is_healthy else "NOT RIGHT"
    if row.wrong_ranks or row.wrong_modules or row.wrong_samples:
        mark = "WRONG NAME"
    whole = "whole" if row.is_complete else f"{row.detail}"
    return f"{row.layout}: {row.kind}: {row.said}: {mark} {whole} {row.seconds} s"


def run_layout(name: str, options: argparse.Namespace) -> None:
    """Start the ranks of one layout; again where a trial has ended them."""
    begun = Path(f"{options.rows}{_BEGUN}")
    for _ in range(_MOST_STARTS):
        memory = Path("/dev/shm")
        folder = tempfile.mkdtemp(prefix="trials-", dir=memory if memory.is_dir() else None)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += [f"--nproc-per-node={LAYOUTS[name].ranks}", "-m", "scripts.explain_trials"]
        words += ["worker", "--name", name, "--out", folder, "--kinds", options.kinds]
        words += ["--rows", str(options.rows), "--seed", str(options.seed)]
        words += ["--rounds", str(options.rounds), "--first", str(options.first)]
        try:
            done = subprocess.run(words, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if done.returncode == 0:
            begun.unlink(missing_ok=True)
            return
        known = {row.key for row in outcome.read(options.rows)}
        outcome.append(options.rows, [row for row in outcome.read(begun) if row.key not in known])
    print(f"{name}: given up after {_MOST_STARTS} starts", file=sys.stderr)


def run_unseen(options: argparse.Namespace) -> None:
    """Whole runs of kinds that no rule was tuned on, and undisturbed ones."""
    from tests.unseen_kinds import drawn, healthy

    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    known = {row.key for row in read_rows(options.rows)}
    with tempfile.TemporaryDirectory(prefix="unseen-", dir="/dev/shm") as folder:
        trials = Trials(Path(folder), commit, options.keep)
        for one in (*drawn(options.seed), *healthy(options.seed)):
            key = f"{options.seed}/{one.name}"
            if key not in known and _is_wanted(f"{one.group}/{one.name}", options.kinds):
                row = trials.try_one(one, key)
                append(options.rows, row)
                print(row, flush=True)


def _is_wanted(name: str, words: str) -> bool:
    wanted = [word for word in words.split(";") if word]
    return not wanted or any(word in name for word in wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "page", "healthy", "unseen", "worker"))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--rounds", type=int, default=1, help="trials of each kind and layout")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="layouts: whole name, or parts a;b")
    parser.add_argument("--kinds", default="", help="kinds whose name contains one of a;b")
    parser.add_argument("--runs", type=int, default=100, help="healthy ones")
    parser.add_argument("--keep", type=Path, help="folder for unseen runs that are not right")
    parser.add_argument("--name", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rows = options.rows.resolve()
    if options.what == "worker":
        worker(options.name, options)
    elif options.what == "run":
        whole = [options.only] if options.only in LAYOUTS else LAYOUTS
        for name in whole:
            if _is_wanted(name, options.only):
                run_layout(name, options)
    elif options.what == "unseen":
        options.rows = options.rows.with_suffix(".unseen.jsonl")
        run_unseen(options)
    elif options.what == "healthy":
        healthy.run_all(options.rows.with_suffix(".healthy.jsonl"), options.runs)
    else:
        undisturbed = healthy.read(options.rows.with_suffix(".healthy.jsonl"))
        whole = read_rows(options.rows.with_suffix(".unseen.jsonl"))
        options.page.write_text(page.text(outcome.read(options.rows), undisturbed, whole))


if __name__ == "__main__":
    main()
