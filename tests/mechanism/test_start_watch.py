"""A rank that dies between the rendezvous and the lease is noticed on the other nodes too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from runner.distributed.env import RankEnv
from runner.health import rank_monitor
from runner.health.rank_monitor import StartWatch
from runner.system.process import host_name, own_process, pid_namespace
from tests import warm
from tests.mechanism.test_meet import free_port
from tests.mechanism.test_witness import endings, watched
from tests.rows import full
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """Of a group, with beats that come quickly."""
    monkeypatch.setattr(rank_monitor, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(rank_monitor, "_SILENT_LOOKS", 50)
    yield TCPStore(
        "127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def watch_of(store: Store, rank: int, *, num_nodes: int = 3, per_node: int = 1) -> StartWatch:
    place = RankEnv(
        rank=rank,
        world_size=num_nodes * per_node,
        local_rank=rank % per_node,
        local_world_size=per_node,
    )
    return StartWatch(PrefixStore("holdfast/1", store), place)


def test_a_silent_node_is_named_on_all_others(store: TCPStore) -> None:
    alive = [watch_of(store, rank) for rank in (0, 1)]
    for one in alive:
        one.start()
    until(lambda: all(one.problem for one in alive))
    assert alive[0].problem == alive[1].problem
    assert "the node of rank 2 has been silent for" in alive[0].problem


def test_a_death_that_is_told_reaches_all_leaders(store: TCPStore) -> None:
    leaders = [watch_of(store, rank, per_node=2) for rank in (0, 2, 4)]
    for one in leaders:
        one.start()
    watch_of(store, 5, per_node=2).tell("rank 4: killed")
    watch_of(store, 3, per_node=2).tell("rank 2: ended with exit code 1")
    until(lambda: all(one.problem for one in leaders))
    assert {one.problem for one in leaders} == {"rank 4: killed"}, "the first is the cause"


def test_a_node_that_has_begun_is_not_silent(store: TCPStore) -> None:
    both = [watch_of(store, rank, num_nodes=2) for rank in (0, 1)]
    for one in both:
        one.start()
    beat = PrefixStore("start", PrefixStore("holdfast/1", store))
    until(lambda: beat.check(["beat/1"]))
    both[1].stop()
    until(lambda: bytes(beat.get("beat/1")) == b"over")
    before = int(bytes(beat.get("beat/0")))
    until(lambda: int(bytes(beat.get("beat/0"))) > before + 60)
    assert not both[0].problem
    both[0].stop()
    until(lambda: bytes(beat.get("beat/0")) == b"over")


def test_one_node_alone_asks_nobody(store: TCPStore) -> None:
    one = watch_of(store, 0, num_nodes=1, per_node=4)
    one.start()
    one.tell("rank 1: killed")
    one.stop()
    assert store.num_keys() <= 1 and not one.problem, "torch's own key"


def test_a_lost_store_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_monitor, "_BEAT_SECONDS", 0.02)
    port = free_port()
    program = (
        "import sys, time\nfrom torch.distributed import TCPStore\n"
        f"store = TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False)\n"
        "print('here', flush=True); time.sleep(1000)"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None and host.stdout.readline() == "here\n"
        client = TCPStore("127.0.0.1", port, None, False)
        one = watch_of(client, 0)
        one.start()
        until(lambda: client.check(["holdfast/1/start/beat/0"]))
    finally:
        host.kill()
        host.wait()
    until(lambda: bool(one.problem))
    assert "lost the rendezvous store" in one.problem


def test_a_neighbour_that_dies_ends_this_rank_and_is_told(
    tmp_path: Path, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, said = endings(monkeypatch)
    neighbour = subprocess.Popen(["sleep", "1000"])
    try:
        process = own_process() | {"pid": neighbour.pid}
        peer = {"rank": 1, "process": process, "pids": pid_namespace()}
        one = watched(tmp_path, has_agent=False)
        place = RankEnv(rank=0, world_size=4, local_rank=0, local_world_size=2)
        one._place = one._start._place = place
        one.start()
        one.watch_start(PrefixStore("holdfast/1", store), [peer])
        neighbour.send_signal(signal.SIGKILL)
        until(lambda: bool(codes))
    finally:
        neighbour.kill()
        neighbour.wait()
    one.end()
    assert codes == [1]
    assert said == [
        f"the start has failed: rank 1 on {host_name()}: killed by SIGKILL, after the rendezvous"
    ]
    other = watch_of(store, 2, num_nodes=2, per_node=2)
    other.start()
    until(lambda: bool(other.problem))
    assert "rank 1 on" in other.problem


@pytest.mark.parametrize(
    ("per_node", "looks", "words"),
    [
        # Never silent for so long, however busy the machine: the neighbour tells. Always in one
        # process: test_a_neighbour_that_dies_ends_this_rank_and_is_told.
        full(2, 200, "SIGKILL"),
        (1, 8, "has been silent for"),
    ],
)
def test_no_collective_breaks_and_the_other_node_ends(
    per_node: int, looks: int, words: str, tmp_path: Path
) -> None:
    """Two launchers, as on two nodes; the last rank dies, the others sit where nothing returns."""
    port, dies = free_port(), 2 * per_node - 1
    launchers = []
    for node in range(2):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
            *(f"--nproc-per-node={per_node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
            *("-m", "tests.dies_in_start", f"out={tmp_path / 'run'}", "model=tiny"),
            *("data=synthetic", "parallel.timeout_seconds=3000", "steps=20"),
        ]
        launchers.append(
            warm.WarmPopen(
                command,
                env=os.environ | {"DIES": str(dies), "LOOKS": str(looks), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    try:
        outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
    assert [launcher.returncode for launcher in launchers] == [1, 1]
    assert "the start has failed: " in outputs[0] and words in outputs[0], outputs[0]
    assert f"rank {dies}" in outputs[0]
