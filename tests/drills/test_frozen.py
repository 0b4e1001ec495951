"""Parameters that are not trained: on every engine, in every checkpoint, from engine to engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runner.checkpoint.disk.directory import CheckpointDirectory, Entry
from tests.drills.compare import assert_every_sample_once
from tests.rows import full
from tests.run import TWO_LAYERS, Result, finish, train
from tests.stored import read_range

# The input, a matrix, and norms: ZeRO-3 keeps those gathered. What is tied stays tied.
FROZEN = (
    TWO_LAYERS,
    "compute.precision=bf16",
    "compute.frozen=[embedding,blocks.0.attention.query,ffn_norm]",
    "schedule.total=60",
)
ENGINES = ["fsdp", *(full(engine) for engine in ("ddp", "zero1", "zero2", "zero3"))]
# Without it ZeRO-3 would keep all of this small model gathered.
SMALL = "stage3_param_persistence_threshold:1500"
ZERO3 = f"parallel.deepspeed={{zero_optimization:{{{SMALL}}}}}"
FAULTS = "faults=[nan_grad@step=7,rank=1,poison@samples=600-700]"
BF16_NOISE = 0.02


def newest(run: Result) -> Entry:
    return CheckpointDirectory(run.out / "ring").entries()[0][-1]


def tensors(entry: Entry) -> dict[str, torch.Tensor]:
    return {
        name: read_range(entry, name, 0, int(torch.Size(shape).numel()))
        for name, shape in entry.manifest.shapes.items()
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The state before the first update."""
    run = finish(
        tmp_path_factory.mktemp("begun") / "run", *FROZEN, "steps=5", "checkpoint.keep=9", ranks=0
    )
    first = CheckpointDirectory(run.out / "ring").entries()[0][0]
    assert first.record.step == 0
    return tensors(first)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return finish(tmp_path_factory.mktemp("trained") / "run", *FROZEN, FAULTS, "steps=40")


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
def test_they_keep_their_bits_through_nan_and_rollback(
    tmp_path: Path, begun: dict[str, torch.Tensor], trained: Result, engine: str
) -> None:
    told = [ZERO3] if engine == "zero3" else []
    run = finish(tmp_path / "run", *FROZEN, FAULTS, "steps=40", f"parallel={engine}", *told)
    assert run.journal("discard") and run.journal("rollback"), run.tail
    entry = newest(run)
    after = tensors(entry)
    assert after.keys() == begun.keys()
    kept = {name for name in begun if torch.equal(begun[name], after[name])}
    assert kept == {
        "param/embedding.weight",
        "param/blocks.0.attention.query.weight",
        "param/blocks.0.ffn_norm.weight",
        "param/blocks.1.ffn_norm.weight",
    }
    assert not any(name.replace("param", "exp_avg") in after for name in kept)
    # The rollback went through a checkpoint; and two ranks give every engine the same bits.
    assert run.digest == trained.digest, run.tail
    assert_every_sample_once(run)


@pytest.mark.full
def test_any_engine_reads_what_another_wrote(tmp_path: Path) -> None:
    """A chain: each takes up the run where the one before left it, and changes no bit of it."""
    out = tmp_path / "run"
    before = finish(out, *FROZEN, "steps=20")
    steps = 20
    for engine, ranks in [("zero3", 3), ("zero1", 2), ("ddp", 3), ("zero2", 1), ("fsdp", 2)]:
        command = [*FROZEN, f"parallel={engine}"]
        loaded = finish(out, *command, f"steps={steps}", ranks=ranks)
        assert loaded.digest == before.digest, f"{engine}\n{loaded.tail}"
        steps += 8
        before = finish(out, *command, f"steps={steps}", ranks=ranks)
    whole = finish(tmp_path / "whole", *FROZEN, "steps=60")
    for step, line in before.counted().items():
        assert abs(line["loss"] - whole.counted()[step]["loss"]) < BF16_NOISE, f"step {step}"


@pytest.mark.parametrize("parallel", ["single", full("zero2")])
@pytest.mark.parametrize("pattern", ["nothing_is_called_so", "weight"])
def test_a_pattern_that_cannot_be_meant_ends_the_command(
    tmp_path: Path, parallel: str, pattern: str
) -> None:
    run = train(tmp_path / "run", f"parallel={parallel}", f"compute.frozen=[{pattern}]", ranks=0)
    assert run.code == 2 and "compute.frozen" in run.text and "Traceback" not in run.text, run.tail


def test_a_run_does_not_thaw_by_mistake(tmp_path: Path) -> None:
    out = tmp_path / "run"
    begun = finish(out, *FROZEN, "steps=5", ranks=0)
    assert " of them trained), " in begun.text, begun.tail
    run = train(out, "schedule.total=60", "steps=10", ranks=0)
    assert run.code == 2 and "compute.frozen" in run.text, run.tail
