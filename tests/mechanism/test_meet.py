"""Ranks find each other, or say within the time limit why not. Real processes and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from runner.dist.launcher import Place
from runner.dist.meet import call_roll, difference
from runner.error import StartError

ROOT = Path(__file__).parents[2]


def place(rank: int, world_size: int) -> Place:
    return Place(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(
    rank: int, world_size: int, port: int, host: str = "127.0.0.1"
) -> subprocess.Popen[str]:
    variables = {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": host, "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT,
    }  # fmt: skip
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "runner", "out=/nonexistent/never", "data=synthetic"),
            *("model=tiny", "parallel.start_seconds=3"),
        ],
        env=os.environ | {name: str(value) for name, value in variables.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    texts = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 1 for process in processes), texts
    assert all("Traceback" not in text for text in texts), texts
    return texts


def test_absent_ranks_are_named() -> None:
    port = free_port()
    began = time.monotonic()
    first, other = said([started(rank, 4, port) for rank in (0, 2)])
    assert "2 of 4 ranks are absent after parallel.start_seconds=3: rank 1, 3" in first
    assert time.monotonic() - began < 40
    assert not other.strip() or "absent" in other, "rank 0 has said it for all"


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_meeting_point_that_is_not_there(host: str) -> None:
    port = free_port()
    process = started(1, 2, port, host)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    told = [line for line in text.splitlines() if "cannot reach the meeting point" in line]
    assert told and f"{host}:{port}" in told[0] and "parallel.start_seconds=3" in told[0], text
    assert "Traceback" not in text


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
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
    assert len(text.splitlines()) == 1 and "cannot reach the meeting point" in text, text
    assert "another program's" in text, text


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = started(0, 2, server.getsockname()[1])
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 1, text
    assert len(text.splitlines()) == 1 and "cannot open the meeting point" in text, text
    assert "choose another MASTER_PORT" in text, text


def roll(
    store: HashStore, world_size: int, versions: Sequence[str], only: Sequence[int] | None = None
) -> dict[int, list[int] | str]:
    """What each rank is told: the ranks of its node, or why not."""
    results: dict[int, list[int] | str] = {}

    def answer(rank: int) -> None:
        facts = {"rank": rank, "versions": {"torch": versions[rank]}}
        try:
            _, local = call_roll(store, place(rank, world_size), facts, seconds=2)
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


def test_rank_zero_is_absent() -> None:
    store = HashStore()
    began = time.monotonic()
    told = roll_for(store, seconds=0.5)
    assert "rank 0 is absent" in told and time.monotonic() - began < 15


def roll_for(store: HashStore, seconds: float) -> str:
    with pytest.raises(StartError) as caught:
        call_roll(store, place(1, 2), {"versions": {}}, seconds=seconds)
    return str(caught.value)


def test_differences_are_told_by_field_and_rank() -> None:
    told = [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}, {"a": 1, "b": "x"}]
    assert difference(told) == "a: rank 1: 2; the others: 1"
    assert difference(json.loads(json.dumps(told[:1] * 3))) == ""
