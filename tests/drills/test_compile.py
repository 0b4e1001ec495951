"""compute.compile: the blocks as graphs, the guard around them, and exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.compare import assert_same_run
from tests.run import Result, finish, train

# The first step of a rank may compile for a minute while the other one waits.
COMPILED = ("compute.compile=true", "steps=40", "schedule.total=60", "parallel.timeout_seconds=300")
# Fused kernels round differently: nats per token.
NOISE = 0.02


@pytest.fixture(scope="module")
def compiled(runs: Path) -> Result:
    return train(runs / "compiled", *COMPILED, timeout=280)


@pytest.mark.full
def test_losses_are_those_of_the_uncompiled_model(compiled: Result, clean: Result) -> None:
    assert compiled.code == 0, compiled.tail
    plain = clean.counted()
    for step, line in compiled.counted().items():
        assert abs(line["loss"] - plain[step]["loss"]) < NOISE, (step, compiled.tail)
    assert len(compiled.counted()) == 40
    assert compiled.digest != clean.digest, "it was compiled"


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize("sync", ["true", "false"])
def test_killed_it_ends_the_same(tmp_path: Path, compiled: Result, sync: str) -> None:
    told = [*COMPILED, f"guard.sync={sync}", "faults=[kill@step=25,rank=1]"]
    assert train(tmp_path / "run", *told, timeout=280).code != 0
    assert_same_run(finish(tmp_path / "run", *told), compiled)


@pytest.mark.full
def test_a_nan_is_seen_and_discarded(tmp_path: Path) -> None:
    """The probe's hook stands outside of the graphs."""
    hit = finish(tmp_path / "hit", *COMPILED, "faults=[nan_grad@step=20,rank=1]")
    [line] = hit.journal("discard")
    assert (line["step"], line["ranks"]) == (20, [1]) and line["sample_ids"], hit.tail
