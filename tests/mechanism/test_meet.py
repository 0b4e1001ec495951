"""Ranks find each other, or say within the time limit why not. Real processes and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from runner.config.schema import RunConfig
from runner.distributed import rendezvous
from runner.distributed.env import RankEnv
from runner.distributed.rendezvous import _absent, allow_connections, difference, wait_for_ranks
from runner.session.group import refuse_untried
from runner.system.error import ConfigError, StartError
from tests import warm
from tests.programs import python
from tests.rows import full

ROOT = Path(__file__).parents[2]


def place(rank: int, world_size: int) -> RankEnv:
    return RankEnv(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(
    rank: int, world_size: int, port: int, host: str = "127.0.0.1"
) -> subprocess.Popen[str]:
    variables = {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": host, "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return warm.WarmPopen(
        [
            *(sys.executable, "-m", "runner", "out=/nonexistent/never", "data=synthetic"),
            *("model=tiny", "parallel.start_seconds=2"),
        ],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=warm.ROOT,
    )


def said(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    texts = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 1 for process in processes), texts
    assert all("Traceback" not in text for text in texts), texts
    return texts


@pytest.mark.parametrize("prefixes", [(), ("torchelastic", "worker")])
def test_a_restart_forgets_that_nccls_monitors_were_asked_to_end(prefixes: Sequence[str]) -> None:
    """torchrun keeps its store over restarts, and they look into it without a prefix."""
    root = HashStore()
    store: Store = root
    for prefix in prefixes:
        store = PrefixStore(prefix, store)
    root.set("exception_dump", "1")
    wait_for_ranks(store, place(0, 1), {"versions": {}}, seconds=5)
    assert not root.check(["exception_dump"])


def test_absent_ranks_are_named() -> None:
    port = free_port()
    first, other = said([started(rank, 4, port) for rank in (0, 2)])
    assert "2 of 4 ranks are absent after parallel.start_seconds=2: ranks 1 and 3" in first
    assert not other.strip() or "absent" in other, "rank 0 has said it for all"


@pytest.mark.parametrize("host", ["127.0.0.1", full("no-such-host.invalid")])
def test_a_meeting_point_that_is_not_there(host: str) -> None:
    port = free_port()
    process = started(1, 2, port, host)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    told = [line for line in text.splitlines() if "cannot reach the rendezvous store" in line]
    assert told and f"{host}:{port}" in told[0] and "parallel.start_seconds=2" in told[0], text
    assert "Traceback" not in text


@pytest.mark.parametrize("answer", [None, full(b"HTTP/1.1 400 Bad Request\r\n\r\n")])
def test_a_meeting_point_that_is_something_else(answer: bytes | None) -> None:
    """A proxy, or another program on the port: it takes the call, and says nothing or nonsense."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        calls: list[socket.socket] = []

        def serve() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    calls.append(server.accept()[0])
                    if answer is not None:
                        calls[-1].sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        process = started(1, 2, server.getsockname()[1])
        try:
            text = process.communicate(timeout=60)[0]
        finally:
            process.kill()
            over.set()
    assert process.returncode == 1, text
    assert len(text.splitlines()) == 1 and "cannot reach the rendezvous store" in text, text
    assert "another program's" in text, text


@pytest.mark.full
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = started(0, 2, server.getsockname()[1])
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 1, text
    assert len(text.splitlines()) == 1 and "cannot open the rendezvous store" in text, text
    assert "choose another MASTER_PORT" in text, text


def roll(
    store: Store, world_size: int, versions: Sequence[str], only: Sequence[int] | None = None
) -> dict[int, list[int] | str]:
    """What each rank is told: the ranks of its node, or why not."""
    results: dict[int, list[int] | str] = {}

    def answer(rank: int) -> None:
        facts = {"rank": rank, "versions": {"torch": versions[rank]}}
        try:
            _, local = wait_for_ranks(store, place(rank, world_size), facts, seconds=60)
            results[rank] = [int(told["rank"]) for told in local]
        except StartError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in only or range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_everybody_is_told_who_is_near() -> None:
    assert roll(HashStore(), 3, ["1"] * 3) == {rank: [0, 1, 2] for rank in range(3)}


def test_other_versions_are_named_on_all_ranks() -> None:
    for told in roll(HashStore(), 3, ["2.13", "2.13", "2.11"]).values():
        assert told == "ranks have different versions: torch: rank 2: 2.11; the others: 2.13"


def test_what_an_earlier_round_left_in_the_store_is_not_taken_for_this_one() -> None:
    """torchrun keeps one store over its restarts."""
    store = HashStore()
    roll(store, 2, ["old", "old"])
    late: dict[int, list[int] | str] = {}
    follower = threading.Thread(target=lambda: late.update(roll(store, 2, ["new"] * 2, [1])))
    follower.start()
    time.sleep(0.5)  # it has met only what the dead rank 0 left behind
    assert not late
    late.update(roll(store, 2, ["new"] * 2, [0]))
    follower.join()
    assert late == {0: [0, 1], 1: [0, 1]}


class Counting(Store):
    """A store that counts what it is asked. One that C++ calls as any other."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = HashStore()
        self.calls: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.calls["set"] += 1
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.calls["get"] += 1
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        self.calls["add"] += 1
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self.calls["check"] += 1
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        self.calls["wait"] += 1
        self._inner.wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls["multi_get"] += 1
        return self._inner.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.calls["multi_set"] += 1
        self._inner.multi_set(keys, values)  # type: ignore[attr-defined]


@pytest.mark.parametrize("world_size", [8, 64, 256])
def test_nobody_asks_again_and_again(world_size: int) -> None:
    """Seven calls of the store on each rank, however long rank 0 lets them wait."""
    store = Counting()
    followers = threading.Thread(
        target=lambda: roll(store, world_size, ["1"] * world_size, range(1, world_size))
    )
    followers.start()
    while store.calls["wait"] < world_size - 1:  # all of them wait for rank 0
        time.sleep(0.01)
    roll(store, world_size, ["1"] * world_size, [0])
    followers.join()
    assert store.calls.total() <= 8 * world_size + 8, store.calls


def test_the_absent_are_found_by_halves() -> None:
    """Rank 0 may not ask for each rank by itself: one of 16,384 may be absent."""
    store = Counting()
    for rank in range(1024):
        if rank not in (3, 700):
            store.set(f"here/{rank}", "{}")
    assert _absent(store, range(1024)) == [3, 700]
    assert store.calls["check"] <= 2 * 2 * 10 + 1


def test_the_store_may_have_a_connection_a_rank() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        allow_connections(100, os.getpid())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512, "enough"
        allow_connections(1024, os.getpid())
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1024 + 200
        with pytest.raises(StartError, match="raise ulimit -Hn"):
            allow_connections(hard, os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_ranks_than_were_tried_are_refused() -> None:
    config = RunConfig()
    most = config.parallel.max_ranks
    refuse_untried(config.parallel, place(0, most))
    with pytest.raises(
        ConfigError, match=rf"parallel\.max_ranks={most}: there are {most + 1} ranks"
    ):
        refuse_untried(config.parallel, place(3, most + 1))
    config.parallel.max_ranks = most + 1
    refuse_untried(config.parallel, place(3, most + 1))


MESH = """
import os, sys, threading
from datetime import timedelta
from pathlib import Path
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo
from runner.distributed.rendezvous import spare_connections
n = int(sys.argv[1])
spare_connections(int(sys.argv[2]))
store, groups = HashStore(), [None] * n
before = len(os.listdir("/proc/self/fd"))
def work(rank):
    limit = timedelta(seconds=300)
    groups[rank] = ProcessGroupGloo(PrefixStore("g", store), rank, n, timeout=limit)
    groups[rank].allreduce([torch.ones(4)]).wait()
    groups[rank]._allgather_base(torch.empty(n), torch.ones(1)).wait()
    groups[rank].barrier().wait()
threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print((len(os.listdir("/proc/self/fd")) - before) / n, flush=True)
os._exit(0)
"""


def test_many_ranks_are_not_connected_all_with_all() -> None:
    """By descriptors a rank, after the collectives that the runner uses over gloo."""

    def descriptors(num: int, world_size: int) -> float:
        words = ("-c", MESH, str(num), str(world_size))
        told = python(*words, timeout=600, check=True)
        return float(told.stdout.splitlines()[-1])  # gloo of torch 2.10 has lines before

    assert descriptors(24, 64) >= 24
    assert descriptors(24, 65) <= 16  # 4 and twice the logarithm of 24


def test_rank_zero_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_FOLLOWER_SECONDS", 0.5)
    store = HashStore()
    assert "rank 0 is absent" in roll_for(store, seconds=0.5)


def roll_for(store: Store, seconds: float) -> str:
    with pytest.raises(StartError) as caught:
        wait_for_ranks(store, place(1, 2), {"versions": {}}, seconds=seconds)
    return str(caught.value)


def test_differences_are_told_by_field_and_rank() -> None:
    told = [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}, {"a": 1, "b": "x"}]
    assert difference(told) == "a: rank 1: 2; the others: 1"
    assert difference(json.loads(json.dumps(told[:1] * 3))) == ""
