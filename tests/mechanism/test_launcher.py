"""Rank, world and job, as torchrun and Slurm tell them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from runner.distributed.env import JobEnv, first_host, launch_from, place_from, rendezvous_endpoint
from runner.system.error import ConfigError
from runner.system.process import is_alive, own_process

# As a real srun -N2 with two tasks a node sets them, on the second node.
SRUN = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]",
}


def test_srun_tells_the_place() -> None:
    place = place_from(SRUN)
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (3, 4, 1, 2)
    uneven = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert place_from(uneven).local_world_size == 1


def test_torchrun_inside_of_a_step_comes_first() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert place_from(SRUN | torchrun).rank == 1
    assert rendezvous_endpoint(SRUN | torchrun) is None, "torchrun names it itself"


def test_a_batch_script_is_one_process() -> None:
    batch = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    assert place_from(batch).world_size == 1 and rendezvous_endpoint(batch) is None


@pytest.mark.parametrize("missing", ["SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID"])
def test_half_of_srun_is_refused(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        place_from({key: value for key, value in SRUN.items() if key != missing})


def test_tasks_per_node_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE=2x2"):
        place_from(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2x2"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node[07-08]", "node07"),
        ("gpu-[3,9]-x,login", "gpu-3-x"),
        ("a,b[1-2]", "a"),
        ("", ""),
    ],
)
def test_the_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_where_tasks_meet() -> None:
    host, port = rendezvous_endpoint(SRUN) or ("", 0)
    assert host == "node07" and 20_000 <= port < 40_000
    assert rendezvous_endpoint(SRUN | {"SLURM_STEP_ID": "1"}) != (host, port), (
        "another step, elsewhere"
    )
    told = SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "5000"}
    assert rendezvous_endpoint(told) == ("head", 5000)


def launch(**variables: str) -> JobEnv:
    return launch_from(variables)


def replaces(new: JobEnv, old: JobEnv) -> bool:
    return new.supersedes(old.job, old.order, old.step, old.agents)


def test_who_replaces_whom() -> None:
    first = launch(SLURM_JOB_ID="7", SLURM_STEP_ID="0", TORCHELASTIC_RUN_ID="a")
    requeued = launch(
        SLURM_JOB_ID="7", SLURM_STEP_ID="0", TORCHELASTIC_RUN_ID="a", SLURM_RESTART_COUNT="1"
    )
    other_step = launch(SLURM_JOB_ID="7", SLURM_STEP_ID="1", TORCHELASTIC_RUN_ID="b")
    other_job = launch(SLURM_JOB_ID="8", SLURM_STEP_ID="0", TORCHELASTIC_RUN_ID="a")
    assert replaces(requeued, first) and not replaces(first, requeued)
    assert not replaces(first, first), "another torchrun, which was given the same --rdzv-id"
    assert not replaces(other_step, first), "two steps of one job may both be alive"
    assert not replaces(other_job, first)
    supervised = [launch(HOLDFAST_LAUNCH_ID="x", HOLDFAST_ATTEMPT=str(n)) for n in (1, 2)]
    assert replaces(supervised[1], supervised[0]) and not replaces(*supervised)


@pytest.mark.parametrize(
    ("now", "replaced"),
    [
        (("a", "b"), True),
        (("b", "c"), True),  # a's node is gone, c's has come
        (("c", "d"), False),
        ((), False),
    ],
)
def test_torchruns_own_restart_has_an_agent_of_before(now: tuple[str, ...], replaced: bool) -> None:
    """Whatever nodes come and go; a second torchrun of the same name has none."""
    before = replace(launch(TORCHELASTIC_RUN_ID="x"), agents=("a", "b"))
    assert replaces(replace(before, agents=now), before) is replaced
    assert not replaces(replace(before, agents=now), replace(before, agents=())), "unknown"


def test_a_launch_without_a_name_replaces_nobody() -> None:
    alone = launch()
    assert alone.job is None and not replaces(alone, alone) and not alone.has_agent
    named = replace(alone, agents=("a",))
    assert not replaces(named, named)
    static = launch(TORCHELASTIC_RUN_ID="none", RANK="0")
    assert static.job is None and static.has_agent


def test_the_end_of_the_time() -> None:
    assert launch().end_time is None
    assert launch(SLURM_JOB_END_TIME="1700000000").end_time == 1.7e9
    assert launch(HOLDFAST_END_TIME="1700000000").end_time == 1.7e9
    assert launch(SLURM_JOB_END_TIME="NONE").end_time is None


def test_processes_are_told_apart() -> None:
    own = own_process()
    assert is_alive(own)
    assert is_alive(own | {"host": "elsewhere"}) is None
    assert is_alive(own | {"boot": "another"}) is None
    assert is_alive(own | {"started": "1"}) is False, "the number is used again"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert is_alive(own | {"pid": child.pid}) is False
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert is_alive(own | {"pid": zombie.pid}) is False, "dead, not reaped"
    zombie.wait()
