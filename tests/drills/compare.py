"""What it means that two runs are the same run, and that every sample was used once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data.cursor import SampleStream, held_out
from tests.run import Result, finish, metrics_step, read_lines, skip_override, start

# The defaults of runner/config/schema.py and tests/run.py's TINY.
SAMPLES, SEED, HELD_OUT, BATCH = 100_000, 0, 0.01, 32


def assert_same_end(run: Result, other: Result) -> None:
    """The same weights, moments and update counts, by the same steps on the same samples."""
    assert run.counted() == other.counted(), differing(run, other) + run.tail
    assert run.digest == other.digest, run.tail
    assert statistics(run) == statistics(other), run.tail


def assert_same_run(run: Result, other: Result) -> None:
    """:func:`assert_same_end`, and every line of the metrics alike."""
    assert run.metrics() == other.metrics(), differing(run, other) + run.tail
    assert_same_end(run, other)
    for key in ("steps", "cursor", "final_loss", "skipped", "samples_used", "discarded_steps"):
        assert run.summary[key] == other.summary[key], f"{key}\n{run.tail}"


def statistics(run: Result) -> dict[str, Any]:
    """What the guard takes as normal at the end; not when the last bad step was."""
    manifests = (run.out / "ring").glob("*-step-*/manifest.json")
    newest = max(path for path in manifests if not path.parent.is_symlink())  # one is put there
    manifest = json.loads(newest.read_text())
    assert manifest["step"] == run.summary["steps"], run.tail
    return manifest["train_state"]["baseline"] | {"clean_streak": None}


def differing(run: Result, other: Result) -> str:
    """The first step that differs, in both runs."""
    one, two = run.counted(), other.counted()
    for step in sorted(one.keys() | two.keys()):
        if one.get(step) != two.get(step):
            return f"first difference: {one.get(step)}\nbut: {two.get(step)}\n"
    return "the steps that count are equal\n"


def assert_every_sample_once(run: Result, *, samples: int = SAMPLES, batch: int = BATCH) -> None:
    """Each training sample before the end is in exactly one step that counts, or skipped."""
    cursor = run.summary["cursor"]
    stream = SampleStream.of_one(
        num_samples=samples, seed=SEED, held_out_share=HELD_OUT, global_size=batch
    )
    positions = np.arange(cursor, dtype=np.int64)
    readable = ~held_out(stream.indices(positions), share=HELD_OUT)
    for first, stop in run.summary["skipped"]:
        readable[first:stop] = False
    used = np.zeros(cursor, dtype=np.int64)
    for step, line in run.counted().items():
        first, stop = line["samples"]
        count = int(readable[first:stop].sum())
        assert count == batch, f"step {step} read {count} samples of {first}-{stop}\n{run.tail}"
        used[first:stop] += readable[first:stop]
    wrong = positions[used != readable]
    assert not len(wrong), f"not used exactly once: {wrong[:20]}\n{run.tail}"
    assert len(run.counted()) == run.summary["steps"]
    assert run.summary["samples_used"] == int(used.sum())


# By how much losses differ, in nats, where ranks and engines change, because sums round otherwise:
# ten times the largest deviation measured over 60 steps (7.5e-8; in BF16, which ZeRO has, 2.1e-4).
FP32_NOISE, BF16_NOISE = 1e-6, 3e-3


def noise(run: Result) -> float:
    """How far losses of such a run may lie apart."""
    return BF16_NOISE if "precision: bf16" in (run.out / "config.yaml").read_text() else FP32_NOISE


def assert_follows(run: Result, other: Result, *, within: float | None = None) -> None:
    """The same samples at the same rates; losses as different sums round."""
    within = noise(other) if within is None else within
    for mine, theirs in zip(run.metrics(), other.metrics(), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=within), mine
        assert (mine["cursor"], mine["lr"]) == (theirs["cursor"], theirs["lr"])


def assert_goes_on(run: Result, clean: Result) -> None:
    """The same samples, batch and rate at each step of a run in FP32, whose ranks have changed."""
    assert run.code == 0, run.tail
    assert_every_sample_once(run)
    for line, same in zip(in_order(run), in_order(clean), strict=True):
        for name in ("samples", "tokens", "lr"):
            assert line[name] == same[name], f"{line}\n{same}\n{run.tail}"
        assert abs(line["loss"] - same["loss"]) < FP32_NOISE, f"{line}\n{same}\n{run.tail}"
    assert abs(run.summary["final_loss"] - clean.summary["final_loss"]) < FP32_NOISE


def in_order(run: Result) -> list[dict[str, Any]]:
    return [line for _, line in sorted(run.counted().items())]


# What is broken, and what the run must end like


def assert_as_if_never_there(
    folder: Path, how: Sequence[str], bad: str, *, ranks: int = 2
) -> Result:
    """A run with bad samples ends as the one that was told never to read what it skipped."""
    poisoned = finish(folder / "poisoned", *how, bad, ranks=ranks)
    assert poisoned.journal("rollback"), poisoned.tail
    skip = skip_override(poisoned.summary["skipped"])
    never = finish(folder / "never", *how, skip, ranks=ranks)
    assert not never.journal("discard"), never.tail
    assert_same_end(poisoned, never)
    return poisoned


def assert_killed_is_as_not(
    folder: Path, how: Sequence[str], *, at: int, ranks: int = 2, gone: Path | None = None
) -> Result:
    """All of a run is killed once it is at step ``at``; the same command goes on.

    Args:
        gone: a folder that was needed at the first start only.

    Returns:
        the undisturbed run.
    """
    whole = finish(folder / "whole", *how, ranks=ranks)
    killed = start(folder / "killed", *how, ranks=ranks)
    killed.until(lambda out: metrics_step(out) >= at)
    killed.kill()
    if gone is not None:
        shutil.rmtree(gone)
    assert_same_run(finish(folder / "killed", *how, ranks=ranks), whole)
    return whole


def in_turns(out: Path, how: Sequence[str], *turns: tuple[int, int]) -> Result:
    """A run on changing numbers of ranks: (up to which step, ranks)."""
    for steps, ranks in turns:
        run = finish(out, *how, f"steps={steps}", ranks=ranks)
    return run


def logged_by(out: Path) -> dict[int, tuple[list[int], float]]:
    """By step: a loop's batches and its own number "read", as they were applied at last."""
    lines = [line for line in read_lines(out / "metrics.jsonl") if line["action"] == "apply"]
    return {line["step"]: (line["samples"], line["read"]) for line in lines}
