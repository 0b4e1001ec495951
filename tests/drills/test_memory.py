"""Snapshots in memory: quicker and nearer, and never another end.

A rollback and a restart use them; damaged, lost or of another world size, the disk is used.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from runner.command.ring import ring_command
from tests.conftest import MEMORY_DIR
from tests.drills.compare import assert_every_sample_once, assert_same_end, assert_same_run
from tests.drills.conftest import POISON
from tests.rows import full
from tests.run import Result, finish, train

# In the foreground, so that it does not depend on the machine what was proven in time.
SURE = "checkpoint.background=false"
NEAR = ("checkpoint.every=20", "checkpoint.memory_every=5", SURE)
KILLED = "faults=[kill@step=38,rank=1]"
QUICK = ("watchdog.floor_seconds=3",)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory of this test alone."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv(MEMORY_DIR, str(folder))
    return folder


def snapshots(shared: Path) -> list[Path]:
    return sorted(shared.rglob("slot-*.json"))


def started_at(run: Result) -> tuple[int, str | None]:
    last: dict[str, Any] = run.journal("start")[-1]
    return last["step"], last["detail"]["tier"]


def test_a_rollback_passes_over_what_is_damaged_on_one_rank(
    tmp_path: Path, poisoned: Result
) -> None:
    fault = POISON.replace("]", ",corrupt_snapshots@step=22,rank=1]")
    run = finish(tmp_path / "run", fault, SURE, "checkpoint.memory_every=5", "checkpoint.keep=9")
    damaged = run.journal("checkpoint_damaged")
    assert damaged and all("rank-00001" in line["reason"] for line in damaged), run.tail
    assert "in memory" in damaged[0]["reason"]
    [line] = run.journal("rollback")
    assert (line["detail"]["to_step"], line["detail"]["tier"]) == (10, "disk"), run.tail
    assert_same_end(run, poisoned)


@pytest.mark.twin
def test_a_killed_rank_goes_on_from_memory(tmp_path: Path, shared: Path, clean: Result) -> None:
    run = finish(tmp_path / "run", *NEAR, *QUICK, KILLED, restarts=1)
    assert started_at(run) == (35, "memory"), run.tail
    assert "resuming at step 35 of 60 from memory" in run.text
    assert_same_run(run, clean)
    assert_every_sample_once(run)
    assert list(shared.rglob("*.bin")) == []


@pytest.mark.twin
@pytest.mark.parametrize("lost", [full(False), True])
def test_a_restart_after_a_rollback_to_memory(
    tmp_path: Path, shared: Path, poisoned: Result, lost: bool
) -> None:
    """The checkpoint that the run went back to was never on disk, and may be gone."""
    out, settings = tmp_path / "run", (*NEAR, "checkpoint.every=40", *QUICK)
    fault = POISON.replace("]", ",kill@step=24,rank=0]")
    killed = train(out, fault, *settings)
    [line] = killed.journal("rollback")
    assert (line["detail"]["to_step"], line["detail"]["tier"]) == (15, "memory"), killed.tail
    if lost:
        empty(shared)
    run = finish(out, fault, *settings)
    assert started_at(run) == ((0, None) if lost else (20, "memory")), run.tail
    assert len(run.journal("rollback")) == 1
    assert_same_end(run, poisoned)
    assert_every_sample_once(run)


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize("what", ["lost", "fewer ranks"])
def test_where_they_are_of_no_use_the_disk_is_used(
    tmp_path: Path, shared: Path, clean: Result, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    killed = train(out, *NEAR, *QUICK, KILLED)
    assert killed.code != 0 and len(snapshots(shared)) >= 4, killed.tail
    assert ring_command([str(out)]) == 0
    listed = capsys.readouterr().out
    assert "in this node's memory: serial" in listed and "step 35, 2 of 2 ranks" in listed
    if what == "lost":
        empty(shared)
        assert ring_command([str(out)]) == 0 and "memory" not in capsys.readouterr().out
    run = finish(out, *NEAR, *QUICK, KILLED, ranks=2 if what == "lost" else 1)
    assert started_at(run) == (20, "disk"), run.tail
    assert_every_sample_once(run)
    if what == "lost":
        assert_same_run(run, clean)
    else:
        assert "cannot be used: they are of 2 ranks, and there are 1 now" in run.text, run.tail
    assert list(shared.rglob("*.bin")) == []


@pytest.mark.twin
@pytest.mark.full
def test_with_zero(tmp_path: Path, shared: Path, clean_bf16: Result) -> None:
    """DeepSpeed's flat partitions, cut elsewhere; on two ranks its end is that of fsdp."""
    run = finish(tmp_path / "run", "parallel=zero2", *NEAR, *QUICK, KILLED, restarts=1)
    assert started_at(run) == (35, "memory"), run.tail
    assert run.digest == clean_bf16.digest


NODES_APART = """
import os, sys
from runner.__main__ import run
rank = os.environ["RANK"]
os.environ["HOLDFAST_MEMORY_DIR"] = os.path.join(os.environ["NODES"], rank)
os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
run()
"""


@pytest.mark.twin
def test_a_lost_nodes_snapshots_come_back_from_its_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean: Result
) -> None:
    """Two nodes of one rank each, as far as shared memory goes; one of them is started anew."""
    program, nodes = tmp_path / "program.py", tmp_path / "nodes"
    program.write_text(NODES_APART)
    for rank in "01":
        (nodes / rank).mkdir(parents=True)
    monkeypatch.setenv("NODES", str(nodes))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    settings = (*NEAR, *QUICK, KILLED, "checkpoint.memory_mirror=true")
    killed = train(tmp_path / "run", *settings, program=program)
    assert killed.code != 0 and "and 2 of another node's" in killed.text, killed.tail
    own = {path.parent.name for path in snapshots(nodes / "1")}
    assert own == {"000001-rank-00001", "000001-peer-00000"}, killed.tail
    empty(nodes / "1")
    run = finish(tmp_path / "run", *settings, program=program)
    assert started_at(run) == (35, "memory"), run.tail
    assert_same_run(run, clean)
    assert list(nodes.rglob("*.bin")) == []


def empty(shared: Path) -> None:
    """As a node that was started anew."""
    for folder in shared.iterdir():
        shutil.rmtree(folder)
