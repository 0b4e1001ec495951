"""A rank that computes wrongly in silence is found within two audits, and named where it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import train

SMALL = ("steps=20", "model.dim=32", "model.heads=2", "batch.global_size=6", "data.seq_len=32")
EVERY = 5


@pytest.mark.parametrize(
    ("ranks", "rank", "settings"),
    [
        (3, 1, ["parallel=fsdp"]),
        pytest.param(3, 2, ["parallel=ddp", "model.dropout=0.1"], marks=pytest.mark.full),
        pytest.param(3, 0, ["parallel=zero2", "batch.micro_size=1"], marks=pytest.mark.full),
        pytest.param(3, 0, ["parallel=zero3", "guard.sync=false"], marks=pytest.mark.full),
        pytest.param(4, 3, ["parallel=hsdp", "parallel.shard_size=2"], marks=pytest.mark.full),
    ],
)
def test_a_silent_fault_is_found_and_named(
    tmp_path: Path, ranks: int, rank: int, settings: list[str]
) -> None:
    words = [*SMALL, *settings, "batch.global_size=12", f"debug.audit_every={EVERY}"]
    hit = train(tmp_path / "hit", *words, f"faults=[wrong@step=7,rank={rank}]", ranks=ranks)
    assert hit.code == 0, hit.tail
    (line,) = hit.journal("audit")
    assert line["step"] == 10 and line["ranks"] == [rank], line
    assert "all ranks agreed at step 5" in line["reason"]


@pytest.mark.parametrize(
    ("ranks", "rank", "settings"),
    [
        (3, 2, ["parallel=fsdp"]),
        pytest.param(3, 0, ["parallel=ddp", "batch.micro_size=2"], marks=pytest.mark.full),
        pytest.param(3, 1, ["parallel=zero1", "batch.micro_size=2"], marks=pytest.mark.full),
        pytest.param(3, 1, ["parallel=zero3", "guard.sync=false"], marks=pytest.mark.full),
        pytest.param(4, 1, ["parallel=hsdp", "parallel.shard_size=2"], marks=pytest.mark.full),
        pytest.param(
            3, 1, ["parallel=fsdp", "model.activation_checkpointing=true"], marks=pytest.mark.full
        ),
    ],
)
def test_a_silent_fault_in_the_gradient_of_one_weight_is_found_and_named(
    tmp_path: Path, ranks: int, rank: int, settings: list[str]
) -> None:
    """Neither the loss nor the gradient that leaves the blocks shows it."""
    words = [*SMALL, *settings, "batch.global_size=12", f"debug.audit_every={EVERY}"]
    wrong = f"faults=[wrong_grad@step=7,rank={rank},module=blocks.0.ffn.down]"
    hit = train(tmp_path / "hit", *words, wrong, ranks=ranks)
    assert hit.code == 0, hit.tail
    (line,) = hit.journal("audit")
    assert line["step"] == 10 and line["ranks"] == [rank], line
    assert "in the gradients of blocks.0.ffn.down.weight:" in line["reason"]
    assert not hit.journal("discard")


@pytest.mark.full
def test_of_two_ranks_nobody_is_named(tmp_path: Path) -> None:
    hit = train(tmp_path / "hit", *SMALL, "debug.audit_every=5", "faults=[wrong@step=7,rank=1]")
    (line,) = hit.journal("audit")
    assert line["step"] == 10 and "it is unknown which one is wrong" in line["reason"], line


@pytest.mark.full
@pytest.mark.parametrize("settings", [["parallel=fsdp"], ["parallel=zero1"]], ids=str)
def test_an_audit_changes_nothing(tmp_path: Path, settings: list[str]) -> None:
    without = train(tmp_path / "without", *SMALL, *settings, "debug.audit_every=0")
    seen = train(tmp_path / "with", *SMALL, *settings, "debug.audit_every=5", "model.dropout=0.0")
    assert without.code == seen.code == 0, seen.tail
    assert seen.digest == without.digest and seen.counted() == without.counted()
    assert not seen.journal("audit")
