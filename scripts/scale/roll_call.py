"""The roll call with many ranks: real store, real sockets, real code; a thread for each rank."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from runner.distributed import rendezvous
from runner.distributed.env import RankEnv
from runner.run_dir.build_info import versions
from runner.system.process import own_process

# Without the thread in which a rank waits: one less for each.
CALL = rendezvous.call_roll
RANKS_PER_NODE = 8
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_FLAGS, _IS_UP, _IS_RUNNING = 0x8914, 0x1, 0x40  # SIOCSIFFLAGS, IFF_UP, IFF_RUNNING
_STACK_BYTES = 1 << 19
_THREADS_A_PROCESS = 1024
# A thread that waits for the interpreter's lock wakes up at this interval. With a thousand of them
# in a process the usual 5 ms are most of what the simulator would measure.
_SWITCH_SECONDS = 1.0


def in_child(work: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    """Run ``work`` in a forked process; returns its id and where its JSON comes from."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    os.close(read)
    code = 0
    try:
        result = work()
    except BaseException as error:
        result, code = {"error": f"{type(error).__name__}: {error}"}, 1
        traceback.print_exc()
    with os.fdopen(write, "w") as pipe:
        json.dump(result, pipe)
    os._exit(code)


def result_of(child: tuple[int, int]) -> dict[str, Any]:
    """What a forked process says in the end."""
    with os.fdopen(child[1]) as pipe:
        text = pipe.read()
    os.waitpid(child[0], 0)
    result: dict[str, Any] = json.loads(text) if text else {"error": "died without a word"}
    return result


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Clients:
    """Ranks of this process, each a thread with a connection of its own."""

    def __init__(self, world_size: int, port: int, seconds: float) -> None:
        self._world_size, self._port, self._seconds = world_size, port, seconds
        self._facts = {"process": own_process(), "versions": versions()}
        self._failures: list[str] = []
        self._connected: list[float] = []  # when, by rank; likewise all below
        self._done: list[float] = []
        self._connect_cpu: list[float] = []
        self._call_cpu: list[float] = []

    def run(self, first: int, count: int) -> dict[str, Any]:
        """The ranks from ``first`` on, from their first connection until all are told."""
        threading.stack_size(_STACK_BYTES)
        sys.setswitchinterval(_SWITCH_SECONDS)
        threads = [
            threading.Thread(target=self._rank, args=(rank,))
            for rank in range(first, first + count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {
            "connected": max(self._connected, default=0.0),
            "done": max(self._done, default=0.0),
            "num_done": len(self._done),
            "failures": self._failures[:3],
            "cpu_seconds": _cpu_seconds(),
            "connect_cpu_seconds": sum(self._connect_cpu),
            "call_cpu_seconds": sum(self._call_cpu),
            "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    def _rank(self, rank: int) -> None:
        try:
            cpu = time.thread_time()
            store = TCPStore(
                "127.0.0.1", self._port, self._world_size, False,
                timeout=timedelta(seconds=self._seconds), wait_for_workers=False,
            )  # fmt: skip
            self._connected.append(time.time())
            connected_cpu = time.thread_time()
            self._connect_cpu.append(connected_cpu - cpu)
            self._call(store, rank)
            self._done.append(time.time())
            self._call_cpu.append(time.thread_time() - connected_cpu)
        except Exception as error:
            self._failures.append(f"rank {rank}: {type(error).__name__}: {str(error)[:300]}")

    def _call(self, store: TCPStore, rank: int) -> None:
        local_rank = rank % RANKS_PER_NODE
        leader = rank - local_rank
        size = min(RANKS_PER_NODE, self._world_size - leader)
        place = RankEnv(
            rank=rank, world_size=self._world_size, local_rank=local_rank, local_world_size=size
        )
        _, near = CALL(store, place, {"rank": rank, **self._facts}, seconds=self._seconds)
        if [one["rank"] for one in near] != list(range(leader, leader + size)):
            self._failures.append(f"rank {rank}: was told of {near}")


def own_network() -> bool:
    """A network of this process's own, with nothing but a loopback: no name server to wait for.

    torch looks up the name of each connection. Needs root; False where it cannot be had.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK) != 0:
        return False
    with socket.socket() as any_socket:
        up = struct.pack("16sH14s", b"lo", _IS_UP | _IS_RUNNING, b"")
        fcntl.ioctl(any_socket, _SET_FLAGS, up)
    return True


def loopback_bytes() -> int:
    """That were sent over this network's loopback, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


def measure(world_size: int, *, seconds: float) -> dict[str, Any]:
    """See :func:`_measure`; in a process, and where that can be a network, of its own."""
    return result_of(in_child(lambda: _measure(world_size, seconds=seconds)))


def _measure(world_size: int, *, seconds: float) -> dict[str, Any]:
    """Seconds until the last of ``world_size`` ranks has been told, from the first connection."""
    is_alone = own_network()
    over_read, over_write = os.pipe()
    port_read, port_write = os.pipe()

    def serve() -> dict[str, Any]:
        os.close(over_write)
        store = TCPStore(
            "127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=False,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        os.write(port_write, f"{store.port}\n".encode())
        os.read(over_read, 1)
        return {
            "cpu_seconds": _cpu_seconds(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }

    server = in_child(serve)
    port = int(os.read(port_read, 20))
    began = time.time()
    # Rank 0 has a process of its own: what it costs is what stands in the table.
    shares = [(0, 1)] + [
        (at, min(_THREADS_A_PROCESS, world_size - at))
        for at in range(1, world_size, _THREADS_A_PROCESS)
    ]
    children = []
    for first, count in shares:
        children.append(
            in_child(lambda f=first, c=count: _Clients(world_size, port, seconds).run(f, c))
        )
    results = [result_of(child) for child in children]
    os.close(over_write)
    serving = result_of(server)
    for end in (over_read, port_read, port_write):
        os.close(end)
    sent = loopback_bytes() if is_alone else None
    failures = [text for one in results for text in one.get("failures", [one.get("error", "")])]

    def sum_of(name: str) -> float:
        return sum(one.get(name, 0.0) for one in results)

    of_ranks = sum_of("connect_cpu_seconds") + sum_of("call_cpu_seconds")
    return {
        "seconds": max(one.get("done", 0.0) for one in results) - began,
        "connect_seconds": max(one.get("connected", 0.0) for one in results) - began,
        "rank_0_seconds": results[0].get("done", 0.0) - began,
        "bytes": sent,
        "num_told": sum_of("num_done"),
        "rank_0_cpu_seconds": results[0].get("cpu_seconds"),
        "server_cpu_seconds": serving.get("cpu_seconds"),
        "server_mib": serving.get("max_rss_mib"),
        "all_ranks_cpu_seconds": of_ranks,
        "connect_cpu_seconds": sum_of("connect_cpu_seconds"),
        # Of processes and threads to begin, wait and end: no cost of a rank.
        "simulator_cpu_seconds": sum_of("cpu_seconds") - of_ranks,
        "failures": failures[:3],
    }


if __name__ == "__main__":
    for size in map(int, sys.argv[1:]):
        print(size, json.dumps(measure(size, seconds=120.0)), flush=True)
