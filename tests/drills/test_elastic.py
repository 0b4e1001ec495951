"""P5: another number of ranks or another engine goes on with the same samples and rates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.drills.compare import FP32_NOISE, assert_every_sample_once, in_order, same_rates
from tests.rows import full
from tests.run import Result, finish

UP_TO_60 = "schedule.total=60"


@pytest.fixture(scope="module")
def half(runs: Path) -> Result:
    """The first 30 steps, sharded over 2 ranks."""
    return finish(runs / "half", "steps=30", UP_TO_60)


@pytest.mark.parametrize(
    ("ranks", "engine"),
    [
        full(0, "parallel=single"),
        (3, "parallel=fsdp"),
        full(4, "parallel=hsdp parallel.shard_size=2"),
        full(1, "parallel=fsdp"),
        full(2, "parallel=ddp"),
        full(3, "parallel=ddp batch.micro_size=4"),
        full(4, "parallel=fsdp"),
    ],
)
def test_half_on_two_ranks_half_on_others(
    tmp_path: Path, half: Result, clean: Result, ranks: int, engine: str
) -> None:
    out = tmp_path / "run"
    shutil.copytree(half.out, out)
    other = finish(out, "steps=60", UP_TO_60, *engine.split(), ranks=ranks)
    assert [line["detail"]["world_size"] for line in other.journal("start")] == [2, ranks or 1]
    assert_follows(other, clean)
    first_half = [line for line in other.metrics() if line["step"] <= 30]
    assert first_half == half.metrics(), "what was done stands"


def assert_follows(run: Result, clean: Result) -> None:
    """The same samples, batch and rate at each step; losses apart by rounding only."""
    assert_every_sample_once(run)
    assert same_rates(run, clean), run.tail
    for line, same in zip(in_order(run), in_order(clean), strict=True):
        assert line["samples"] == same["samples"] and line["tokens"] == same["tokens"]
        assert abs(line["loss"] - same["loss"]) < FP32_NOISE, f"{line}\n{same}\n{run.tail}"
    last = run.summary["final_loss"]
    assert abs(last - clean.summary["final_loss"]) < FP32_NOISE
