"""What reading a checkpoint from a shared disk takes where all ranks of many nodes begin at once.

    python -m scripts.restart_reads 1024 16384

A model of a parallel file system: SERVERS that serve one request after another, files dealt
to them at random, a link for each node. Each rank reads a block, then the next. A restart is over
with its last rank. What a rank reads is what :class:`runner.checkpoint.disk.tier.DiskTier` has it
read: its share to verify, and then its state, of which what its own node has verified is in memory.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

SERVERS, SERVER_BYTES, LINK_BYTES = 64, 4e9, 25e9  # a second
LATENCY = 0.5e-3  # seconds a request
OPENS = 50_000  # a second, of all files
BLOCK = 4 << 20
RANKS_A_NODE = 8
STATE = 12 * 8.03e9  # bytes: a llama of 8 billion parameters, with both moments
TENSORS, MOST_OPEN = 873, 64
UNITS = 4  # the tensors are read as if they were so many, so that this ends

Request = tuple[int, float]  # file, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How ranks read: ``spread`` seconds over which nodes begin, and in which order of files."""

    name: str
    spread: float = 0.0
    by_file: bool = False  # one file after another, from the own one on
    own_part: bool = False  # a copy reads its part alone; the copies exchange them


WAYS = (
    Way(name="each copy reads all, tensor by tensor"),
    Way(name="the same, nodes begin within 1 s", spread=1.0),
    Way(name="the same, nodes begin within 10 s", spread=10.0),
    Way(name="each copy reads all, file by file from its own on", by_file=True),
    Way(name="each copy reads its part", own_part=True),
    Way(name="the same, nodes begin within 1 s", own_part=True, spread=1.0),
)


def reads(way: Way, rank: int, shards: int, copies: int) -> Iterator[Request]:
    """The requests of one rank after the check, in order, without what its node has verified."""
    if way.own_part:
        return
    copy, shard = divmod(rank, shards)
    part = STATE / shards / copies
    node = rank // RANKS_A_NODE
    files = [at * shards + shard for at in range(copies)]
    if way.by_file:
        files = files[copy:] + files[:copy]
    far = [file for file in files if file // RANKS_A_NODE != node]
    if way.by_file:
        yield from ((file, part) for file in far)
    else:
        yield from ((file, part / UNITS) for _ in range(UNITS) for file in far)


def blocks(requests: Iterator[Request]) -> Iterator[Request]:
    """The same, a block at a time."""
    for file, size in requests:
        while size > 0:
            yield file, min(size, BLOCK)
            size -= BLOCK


class Disk:
    """Servers and links, each with the time from which on it is free."""

    def __init__(self, ranks: int) -> None:
        draw = random.Random(0)
        self.server = [draw.randrange(SERVERS) for _ in range(ranks)]
        self.free = [0.0] * SERVERS
        self.link = [0.0] * (ranks // RANKS_A_NODE)
        self.bytes = 0.0

    def run(self, begin: list[float], work: list[Iterator[Request]]) -> float:
        """When the last rank has read all of its own."""
        queue = [(at, rank) for rank, at in enumerate(begin)]
        heapq.heapify(queue)
        last = 0.0
        while queue:
            now, rank = heapq.heappop(queue)
            request = next(work[rank], None)
            if request is None:
                last = max(last, now)
                continue
            file, size = request
            server, node = self.server[file], rank // RANKS_A_NODE
            served = max(now + LATENCY, self.free[server]) + size / SERVER_BYTES
            self.free[server] = served
            self.link[node] = max(served - size / LINK_BYTES, self.link[node]) + size / LINK_BYTES
            self.bytes += size
            heapq.heappush(queue, (self.link[node], rank))
        return last


def opens(way: Way, ranks: int, copies: int) -> int:
    """Of all ranks: to note times of change, to verify two files, to read indexes and data."""
    files = 1 if way.own_part else copies
    data = files * (TENSORS if files > MOST_OPEN and not way.by_file else 1)
    return ranks * (2 * files + 2 + files + data)


def main(sizes: list[int]) -> None:
    print("| ranks | layout | way | read, GB | last rank, s | opened, million | s |")
    for ranks in sizes:
        for name, shards in (("fsdp", ranks), ("hsdp, shards of 64", 64)):
            copies = ranks // shards
            for way in WAYS:
                if copies == 1 and (way.by_file or not way.own_part):
                    continue  # the same as its own part
                draw = random.Random(1)
                nodes = [way.spread * draw.random() for _ in range(ranks // RANKS_A_NODE)]
                disk = Disk(ranks)
                own = [blocks(iter([(rank, STATE / ranks)])) for rank in range(ranks)]
                met = disk.run([nodes[rank // RANKS_A_NODE] for rank in range(ranks)], own)
                work = [blocks(reads(way, rank, shards, copies)) for rank in range(ranks)]
                last = disk.run([met] * ranks, work)
                count = opens(way, ranks, copies)
                print(
                    f"| {ranks:,} | {name} | {way.name} | {disk.bytes / 1e9:,.0f} | {last:.2f} |"
                    f" {count / 1e6:,.3g} | {count / OPENS:,.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
