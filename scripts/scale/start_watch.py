"""What it costs the store that each node shows that it lives while the ranks connect.

The leaders of all nodes are threads with a connection each, of the real
:class:`~runner.health.start_watch.StartWatch`; after a while one node falls silent.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from runner.distributed.env import RankEnv
from runner.health.start_watch import StartWatch
from scripts.scale.roll_call import RANKS_PER_NODE, in_child, own_network, result_of

_SECONDS = 8.0
_STACK_BYTES = 1 << 19


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(world_size: int) -> dict[str, Any]:
    """The store's share of a core, and how long it takes until all nodes know of a death."""
    return result_of(in_child(lambda: _measure(world_size)))


def _measure(world_size: int) -> dict[str, Any]:
    own_network()
    over_read, over_write = os.pipe()
    port_read, port_write = os.pipe()

    def serve() -> dict[str, Any]:
        os.close(over_write)
        store = TCPStore(
            "127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        os.write(port_write, f"{store.port}\n".encode())
        os.read(over_read, 1)
        return {}

    server = in_child(serve)
    port = int(os.read(port_read, 20))
    leaders = result_of(in_child(lambda: _lead(world_size, port, server[0])))
    os.close(over_write)
    result_of(server)
    return leaders


def _lead(world_size: int, port: int, server: int) -> dict[str, Any]:
    threading.stack_size(_STACK_BYTES)
    per_node = min(RANKS_PER_NODE, world_size)
    store = TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=60))
    room = PrefixStore("holdfast/1", store)
    watches = [
        StartWatch(
            room,
            RankEnv(rank=rank, world_size=world_size, local_rank=0, local_world_size=per_node),
        )
        for rank in range(0, world_size, per_node)
    ]
    for watch in watches:
        watch.start()
    beats = PrefixStore("start", room)
    while not beats.check([f"beat/{rank}" for rank in range(0, world_size, per_node)]):
        time.sleep(0.1)
    cpu, began = _cpu_seconds(server), time.monotonic()
    time.sleep(_SECONDS)
    share = (_cpu_seconds(server) - cpu) / (time.monotonic() - began)
    watches[len(watches) // 2].tell("rank 1: killed")
    posted = time.monotonic()
    while not all(watch.problem for watch in watches) and time.monotonic() < posted + 60:
        time.sleep(0.05)
    return {
        "nodes": len(watches),
        "server_share_of_a_core": round(share, 4),
        "told_all_seconds": round(time.monotonic() - posted, 2),
        "num_told": sum("rank 1" in watch.problem for watch in watches),
    }


if __name__ == "__main__":
    import json
    import sys

    for size in map(int, sys.argv[1:]):
        print(size, json.dumps(measure(size)), flush=True)
