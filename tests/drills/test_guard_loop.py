"""The guard in a script of somebody's own, on two ranks and with real kills."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.rows import full
from tests.run import read_lines
from tests.script_run import finished


def run(out: Path, layout: str, *todo: str, **how: Any) -> Any:
    """What the script leaves, by the name of what was to do."""
    finished("guarded_script.py", out, str(out), layout, *todo, **how)
    return json.loads((out / f"{layout}.json").read_text())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "sampler"])
def test_one_rank_sees_nan_and_none_has_a_trace_of_it(tmp_path: Path, layout: str) -> None:
    ends = run(tmp_path, layout, "poison", "told", "break")
    assert ends["poison"] == ends["told"] == ends["break"]
    assert ends["poison"]["skipped"] == [[6, 7], [20, 21], [28, 32]]
    lines = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    [back] = [line for line in lines if line["kind"] == "rollback"]
    assert back["ranks"] == [1]


@pytest.mark.parametrize("layout", ["fsdp", full("ddp"), full("sampler"), full("micro")])
def test_read_late_on_two_ranks_and_killed(tmp_path: Path, layout: str) -> None:
    kill_at = "43" if layout == "micro" else "26"  # late enough for a checkpoint to be whole
    ends = run(tmp_path, layout, "poison", "told", restarts=1, LATE="1", KILL_AT=kill_at)
    assert ends["poison"] == ends["told"]
    lines = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in lines) == 2
    bad = [line for line in lines if line["kind"] in ("discard", "rollback")]
    assert bad and all(line["ranks"] == [1] for line in bad)


def test_nan_in_the_loss_of_an_early_batch_of_one_rank_discards_the_step_on_all(
    tmp_path: Path,
) -> None:
    ends = run(tmp_path, "micro", "poison", "told")
    assert ends["poison"] == ends["told"]
    assert [6, 8] in ends["poison"]["skipped"]
    lines = read_lines(tmp_path / "micro-poison" / "journal.jsonl")
    bad = [line for line in lines if line["kind"] in ("discard", "rollback")]
    assert [line["ranks"] for line in bad] == [[1]] * 3
    assert [line["sample_ids"] for line in bad] == [["batch 6"], ["batch 20"], ["batch 30"]]


@pytest.mark.parametrize(
    ("layout", "late"), [("micro", {"LATE": "1"}), full("micro", {}), full("windows", {})]
)
def test_a_stop_within_a_slow_step_leaves_no_trace(
    tmp_path: Path, layout: str, late: dict[str, str]
) -> None:
    """P15: rank 1 is asked to stop while it computes the first batch of the seventh update."""
    ends = run(tmp_path, layout, "poison", "told", restarts=1, STOP_AT="14", **late)
    assert ends["poison"] == ends["told"] and ends["poison"]["skipped"]
    lines = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    [stopped] = [line for line in lines if line["kind"] == "preempted"]
    assert stopped["reason"] == "asked to stop (rank 1: SIGTERM); saved at step 6"
    starts = [line["step"] for line in lines if line["kind"] == "start"]
    assert starts == [0, 6]


@pytest.mark.parametrize(
    ("layout", "stop_at", "disk"),
    [
        ("fsdp", "5", "slow"),
        full("ddp", "14", "slow"),
        full("micro", "14", "slow"),
        full("fsdp", "14", "no memory"),
        full("windows", "26", "no memory"),
    ],
)
def test_a_stop_whose_disk_is_too_slow(
    tmp_path: Path, layout: str, stop_at: str, disk: str
) -> None:
    """The next start goes on from memory, also if nothing but the beginning is on the disk."""
    how = {"STOP_AT": stop_at, "SLOW_DISK": disk}
    ends = run(tmp_path, layout, "poison", "told", restarts=1, **how)
    assert ends["poison"] == ends["told"] and ends["poison"]["skipped"]
    lines = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    [stopped] = [line for line in lines if line["kind"] == "preempted"]
    assert "could not be saved in preempt.grace_seconds" in stopped["reason"]
    _, *again = [
        (line["step"], line["detail"]["tier"]) for line in lines if line["kind"] == "start"
    ]
    assert again == [(8, "disk") if disk == "no memory" else (stopped["step"], "memory")]
    assert not [line for line in lines if line["kind"] == "crash"], "it was told"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["ddp", "sampler"])
def test_on_three_ranks_buckets_are_as_before_the_restart(tmp_path: Path, layout: str) -> None:
    ends = run(tmp_path, layout, "poison", "told", ranks=3, restarts=1, KILL_AT="26")
    assert ends["poison"] == ends["told"]
    starts = read_lines(tmp_path / f"{layout}-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in starts) == 2


def static() -> tuple[str, ...]:
    """A rendezvous in which all attempts share a store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return ("--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}")


def test_a_killed_rank_and_a_restart_change_nothing(tmp_path: Path) -> None:
    ends = run(tmp_path, "fsdp", "poison", "told", restarts=1, rendezvous=static(), KILL_AT="26")
    assert ends["poison"] == ends["told"]
    starts = read_lines(tmp_path / "fsdp-poison" / "journal.jsonl")
    assert sum(line["kind"] == "start" for line in starts) == 2
