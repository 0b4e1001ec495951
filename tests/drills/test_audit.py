"""A rank that computes wrongly in silence is found within two audits, and named where it can be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rows import full
from tests.run import train

SMALL = ("steps=20", "model.dim=32", "model.heads=2", "batch.global_size=6", "data.seq_len=32")
EVERY = 5


SILENT, IN_ONE_WEIGHT = "wrong@step=7", "wrong_grad@step=7,module=blocks.0.ffn.down"


@pytest.mark.parametrize(
    ("fault", "ranks", "rank", "settings"),
    [
        (SILENT, 3, 1, ["parallel=fsdp"]),
        (IN_ONE_WEIGHT, 3, 2, ["parallel=fsdp"]),
        full(SILENT, 3, 2, ["parallel=ddp", "model.dropout=0.1"]),
        full(SILENT, 3, 0, ["parallel=zero2", "batch.micro_size=1"]),
        full(SILENT, 3, 0, ["parallel=zero3", "guard.sync=false"]),
        full(SILENT, 4, 3, ["parallel=hsdp", "parallel.shard_size=2"]),
        full(IN_ONE_WEIGHT, 3, 0, ["parallel=ddp", "batch.micro_size=2"]),
        full(IN_ONE_WEIGHT, 3, 1, ["parallel=zero1", "batch.micro_size=2"]),
        full(IN_ONE_WEIGHT, 3, 1, ["parallel=zero3", "guard.sync=false"]),
        full(IN_ONE_WEIGHT, 4, 1, ["parallel=hsdp", "parallel.shard_size=2"]),
        full(IN_ONE_WEIGHT, 3, 1, ["parallel=fsdp", "compute.recompute=blocks"]),
    ],
)
def test_a_silent_fault_is_found_and_named(
    tmp_path: Path, fault: str, ranks: int, rank: int, settings: list[str]
) -> None:
    """One in the gradient of one weight shows neither in the loss nor in what leaves the blocks."""
    words = [*SMALL, *settings, "batch.global_size=12", f"debug.audit_every={EVERY}"]
    hit = train(tmp_path / "hit", *words, f"faults=[{fault},rank={rank}]", ranks=ranks)
    assert hit.code == 0, hit.tail
    (line,) = hit.journal("audit")
    assert line["step"] == 10 and line["ranks"] == [rank], line
    if fault is SILENT:
        assert "all ranks agreed at step 5" in line["reason"]
    else:
        assert "in the gradients of blocks.0.ffn.down.weight:" in line["reason"]
        assert not hit.journal("discard")


@pytest.mark.twin
@pytest.mark.full  # always by the replica check: test_crash.py
def test_a_copy_of_the_weights_that_differs_is_no_device(tmp_path: Path) -> None:
    """The run goes back to before the last audit in which all agreed."""
    words = (*SMALL, "parallel=ddp", "batch.global_size=12", "checkpoint.every=5")
    words = (*words, "checkpoint.clean_after=3", f"debug.audit_every={EVERY}")
    quiet = "debug.replica_check_every=0"
    hit = train(
        tmp_path / "hit", *words, quiet, "faults=[flip_bit@step=7,rank=1]", ranks=3, restarts=1
    )
    assert hit.code == 0 and not hit.journal("audit"), hit.tail
    (line,) = hit.journal("replica_mismatch")
    assert (line["step"], line["ranks"]) == (10, [1]) and "it was equal at step 5" in line["reason"]
    assert hit.journal("start")[1]["step"] == 5, hit.tail
    clean = train(tmp_path / "clean", *words, quiet, ranks=3)
    assert hit.digest == clean.digest


OFTEN = "checkpoint.clean_after=3"


@pytest.mark.parametrize(
    ("rank", "fault", "settings"),
    [
        # Between the start and the first audit, so that only the start's weights can tell.
        # An evaluation comes before its audit.
        (1, "wrong@step=3", ["eval.every=1"]),
        full(0, "wrong@step=13", ["checkpoint.every=5", OFTEN]),
        # No audit falls on a checkpoint.
        full(1, "wrong@step=18", ["checkpoint.every=7", OFTEN]),
        full(0, IN_ONE_WEIGHT, ["parallel=zero2"]),
        full(1, IN_ONE_WEIGHT, ["parallel=ddp"]),
        full(0, "wrong@step=7", ["guard.sync=false", "model.dropout=0.1"]),
    ],
)
def test_of_two_ranks_the_one_that_has_changed_is_named(
    tmp_path: Path, rank: int, fault: str, settings: list[str]
) -> None:
    """Computed again with the weights of a checkpoint from when both agreed."""
    words = [*SMALL, "debug.audit_every=5", *settings]
    clean = train(tmp_path / "clean", *words)
    assert clean.code == 0 and not clean.journal("audit"), clean.tail
    hit = train(tmp_path / "hit", *words, f"faults=[{fault},rank={rank}]")
    assert hit.code == 0, hit.tail
    (line,) = hit.journal("audit")
    first = int(fault.partition("step=")[2].partition(",")[0])
    assert line["step"] <= first + 10 and line["ranks"] == [rank], line
    # The newest that is on disk by then.
    told = re.search(r"with the weights of the checkpoint of step (\d+) it no", line["reason"])
    assert told is not None and int(told[1]) < first, line


@pytest.mark.full
@pytest.mark.parametrize("settings", [["parallel=fsdp"], ["parallel=zero1"]], ids=str)
def test_an_audit_changes_nothing(tmp_path: Path, settings: list[str]) -> None:
    without = train(tmp_path / "without", *SMALL, *settings, "debug.audit_every=0")
    seen = train(tmp_path / "with", *SMALL, *settings, "debug.audit_every=5", "model.dropout=0.0")
    assert without.code == seen.code == 0, seen.tail
    assert seen.digest == without.digest and seen.counted() == without.counted()
    assert not seen.journal("audit")
