"""Measures what each part of the guard is worth, by real training on the same poisoned data.

    python scripts/ablation.py --work DIR [--seeds 0,1] [--steps 150]

A nano model reads Python source as bytes. In three stretches of the sample order the text is
replaced by random bytes, as if a binary file were in the corpus: the gate sees finite losses
that are far too high. Every arm reads the same file from the same initial weights, and differs in
how it reacts. Prints a Markdown table: held-out loss at the end (of the clean text) and
wasted steps, with the range over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import runner.session.actors
import runner.train.state
from runner.__main__ import main as runner_main
from runner.data.cursor import SampleStream
from runner.data.permutation import held_out
from runner.policy.decision.judge import Baseline, Verdict
from runner.policy.decision.signals import Limits
from runner.policy.schedule import RateCut
from runner.train.guard import Guard
from runner.train.state import TrainState
from runner.train.step import StepInfo

BATCH, SEQ_LEN, VOCAB, HELD_OUT = 16, 128, 256, 0.01
# Batches of the stream (not samples) that are poisoned, as shares of the run, and how many.
STRETCHES, LENGTH = (0.45, 0.7, 0.9), 6

NO_ROLLBACK = ("guard.persist=1000", "guard.persist_window=1000", "guard.drift_nats=1e9")
ARMS: dict[str, tuple[str, ...]] = {
    "clean data, no guard": ("guard=off", "optim.clip=1.0"),
    "no guard, no clipping": ("guard=off", "optim.clip=0"),
    "clipping only": ("guard=off", "optim.clip=1.0"),
    "rate cut only": ("optim.clip=1.0",),
    "skip the step only": (*NO_ROLLBACK, "optim.clip=1.0"),
    "rollback without skip": ("guard.skip=false", "guard.persist=1", "optim.clip=1.0"),
    "rollback and skip": ("optim.clip=1.0",),
}


class OpenBaseline(Baseline):
    """Judges as usual, but its gate is open for every finite step."""

    @property
    def limits(self) -> Limits:
        return Limits()

    @property
    def judged_limits(self) -> Limits:
        return super().limits


class RateCutGuard(Guard):
    """Applies every finite step; after a bad one it halves the rate for a hundred updates."""

    def handle(self, info: StepInfo, state: TrainState) -> Verdict | None:
        baseline, updates = state.baseline, state.updates
        assert isinstance(baseline, OpenBaseline)
        cuts = self._journal.history.cuts
        in_force = any(cut.start <= updates < cut.stop for cut in cuts)
        if baseline.judged_limits.exceeded(info.signals) and not in_force:
            cuts.append(RateCut(start=updates + 1, stop=updates + 101, factor=0.5))
        return super().handle(info, state)


def train_with_rate_cut_only(overrides: Sequence[str]) -> int:
    """Train in this process with the two classes above instead of the runner's."""
    runner.train.state.Baseline = OpenBaseline  # type: ignore[misc]
    runner.session.actors.Guard = RateCutGuard  # type: ignore[misc]
    # Every step is judged before the next, because this baseline cannot predict its limits.
    return runner_main([*overrides, "guard.sync=true"])


@dataclass(frozen=True)
class Outcome:
    """The results of one run."""

    held_out: float
    num_wasted: int
    halted_at: int | None


def write_corpus(folder: Path, *, seed: int, steps: int, poisoned: bool) -> Path:
    """Python's standard library as bytes; the samples of three stretches are random bytes."""
    path = folder / f"corpus-{seed}-{'poisoned' if poisoned else 'clean'}.npy"
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in sources)[: 2 << 20]
    tokens = np.frombuffer(text, dtype=np.uint8).astype(np.uint16)
    num_samples = (len(tokens) - 1) // SEQ_LEN
    stream = SampleStream(
        num_samples=num_samples, seed=seed, held_out_share=HELD_OUT, global_size=BATCH
    )
    if poisoned:
        draw = np.random.default_rng(seed)
        for share in STRETCHES:
            first = int(share * steps) * BATCH
            indices = stream.indices(np.arange(first, first + LENGTH * BATCH))
            for index in indices[~held_out(indices, share=HELD_OUT)]:
                place = slice(index * SEQ_LEN, (index + 1) * SEQ_LEN)
                tokens[place] = draw.integers(0, VOCAB, SEQ_LEN)
    np.save(path, tokens)
    return path


def run(arm: str, seed: int, options: argparse.Namespace) -> Outcome:
    """Run one arm on one seed, in its own process."""
    work = Path(options.work)
    corpus = write_corpus(work, seed=seed, steps=options.steps, poisoned="clean" not in arm)
    out = work / f"{arm.replace(' ', '-').replace(',', '')}-{seed}"
    overrides = [
        "model=nano", "parallel=single", "data=tokens", f"data.path={corpus}",
        f"data.vocab_size={VOCAB}", f"data.seq_len={SEQ_LEN}", f"data.held_out={HELD_OUT}",
        "data.workers=0", f"batch.global_size={BATCH}", f"batch.micro_size={BATCH}",
        f"steps={options.steps}", f"seed={seed}", f"out={out}", "checkpoint.every=20",
        "checkpoint.clean_after=5", "eval.every=10", "eval.samples=128", "schedule=constant",
        "optim.lr=2e-3", "track.every=1000", *ARMS[arm],
    ]  # fmt: skip
    start = ["-m", "runner"]
    if arm == "rate cut only":
        start = [__file__, "--rate-cut-only"]
        overrides += NO_ROLLBACK
    done = subprocess.run(
        [sys.executable, *start, *overrides], capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 3):
        raise SystemExit(f"{arm}, seed {seed}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return outcome(out, halted=done.returncode == 3)


def outcome(out: Path, *, halted: bool) -> Outcome:
    """The results of a run, from its files."""
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        held_out=summary["eval_loss"],
        num_wasted=len(lines) - summary["steps"],
        halted_at=summary["steps"] if halted else None,
    )


def row(arm: str, outcomes: Sequence[Outcome]) -> str:
    """One line of the table."""
    losses = [o.held_out for o in outcomes]
    spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
    halted = [str(o.halted_at) for o in outcomes if o.halted_at is not None]
    note = f", halted at step {' and '.join(halted)}" if halted else ""
    wasted = ", ".join(str(o.num_wasted) for o in outcomes)
    return f"| {arm} | {statistics.fmean(losses):.3f}{spread} | {wasted}{note} |"


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "--rate-cut-only":
        return train_with_rate_cut_only(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", required=True, help="an empty folder for corpora and runs")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args(arguments)
    Path(options.work).mkdir(parents=True)
    print(
        "| arm | held-out loss, mean (range) | wasted steps, by seed |", "|---|---|---|", sep="\n"
    )
    for arm in ARMS:
        outcomes = [run(arm, int(seed), options) for seed in options.seeds.split(",")]
        print(row(arm, outcomes), flush=True)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # as runner.__main__: a process group may be open
