"""P5: another number of ranks or another engine goes on with the same samples and rates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.drills.compare import FP32_NOISE, assert_every_sample_once, in_order, same_rates
from tests.run import Result, finish

UP_TO_60 = "schedule.total=60"


@pytest.fixture(scope="module")
def half(runs: Path) -> Result:
    """The first 30 steps, sharded over 2 ranks."""
    return finish(runs / "half", "steps=30", UP_TO_60)


@pytest.mark.parametrize(
    ("ranks", "engine"),
    [
        pytest.param(0, "parallel=single", marks=pytest.mark.full),
        (3, "parallel=fsdp"),
        pytest.param(4, "parallel=hsdp parallel.shard_size=2", marks=pytest.mark.full),
        pytest.param(1, "parallel=fsdp", marks=pytest.mark.full),
        pytest.param(2, "parallel=ddp", marks=pytest.mark.full),
        pytest.param(3, "parallel=ddp batch.micro_size=4", marks=pytest.mark.full),
        pytest.param(4, "parallel=fsdp", marks=pytest.mark.full),
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


@pytest.mark.full
def test_another_engine_with_every_command(tmp_path: Path, clean: Result) -> None:
    out = tmp_path / "run"
    for steps, ranks, engine in [
        (15, 2, "parallel=fsdp"),
        (27, 2, "parallel=ddp"),
        (41, 4, "parallel=hsdp parallel.shard_size=2"),
        (60, 0, "parallel=single"),
    ]:
        run = finish(out, f"steps={steps}", UP_TO_60, *engine.split(), ranks=ranks)
        assert run.summary["steps"] == steps
    assert_follows(run, clean)
    assert len(run.metrics()) == 60, "no step was done twice"


def assert_follows(run: Result, clean: Result) -> None:
    """The same samples, batch and rate at each step; losses apart by rounding only."""
    assert_every_sample_once(run)
    assert same_rates(run, clean), run.tail
    for line, same in zip(in_order(run), in_order(clean), strict=True):
        assert line["samples"] == same["samples"] and line["tokens"] == same["tokens"]
        assert abs(line["loss"] - same["loss"]) < FP32_NOISE, f"{line}\n{same}\n{run.tail}"
    last = run.summary["final_loss"]
    assert abs(last - clean.summary["final_loss"]) < FP32_NOISE
