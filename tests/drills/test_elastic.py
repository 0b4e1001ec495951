"""P5: another number of ranks or another engine goes on with the same samples and rates."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.drills.compare import assert_goes_on
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
    assert_goes_on(other, clean)
    first_half = [line for line in other.metrics() if line["step"] <= 30]
    assert first_half == half.metrics(), "what was done stands"
