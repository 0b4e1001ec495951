"""A save, as rank 0 and as one rank that proves or loads it see it: real code, real files.

Each rank's index is written as its tier would write it, for a llama of 8 or 70 billion parameters;
the bytes themselves are left out, as their cost does not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from runner.checkpoint.disk.directory import CheckpointDirectory
from runner.checkpoint.disk.index import Layout, collect_indexes, write_index
from runner.checkpoint.disk.shards import Indexes, files_needed
from runner.checkpoint.manifest import MOST_LISTED_RANKS, FileFacts, Manifest

T = TypeVar("T")
_NO_DIGEST = hashlib.sha256(b"").hexdigest()
Shapes = dict[str, tuple[int, ...]]


def llama(size: str) -> Shapes:
    """The tensors of a checkpoint: weights and both moments."""
    dim, ffn, layers, kv = {
        "tiny": (256, 512, 4, 64),
        "8b": (4096, 14336, 32, 1024),
        "70b": (8192, 28672, 80, 1024),
    }[size]
    vocab = 128_256
    shapes: Shapes = {"embedding": (vocab, dim), "head": (vocab, dim), "norm": (dim,)}
    for at in range(layers):
        block = {
            "query": (dim, dim), "key": (kv, dim), "value": (kv, dim), "output": (dim, dim),
            "gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn),
            "attention_norm": (dim,), "ffn_norm": (dim,),
        }  # fmt: skip
        shapes |= {f"blocks.{at}.{name}.weight": shape for name, shape in block.items()}
    kinds = ("param", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}


def shares(shapes: Shapes, world_size: int, rank: int) -> Iterator[tuple[str, int, int]]:
    """(name, start, count) of one rank's shards as FSDP2 deals rows out."""
    for name, shape in shapes.items():
        row = 1
        for length in shape[1:]:
            row *= length
        each = -(-shape[0] // world_size)
        first, stop = min(shape[0], rank * each), min(shape[0], (rank + 1) * each)
        if first < stop:
            yield name, first * row, (stop - first) * row


def write_indexes(folder: Path, shapes: Shapes, world_size: int) -> None:
    """Every rank's; not timed. Not synced either: nobody pulls the plug."""
    names = sorted(shapes)  # a tensor's number is its place among them
    rows = np.array([shapes[name][0] for name in names], np.int64)
    row = np.array([math.prod(shapes[name][1:]) for name in names], np.int64)
    each = -(-rows // world_size)
    folder.mkdir(parents=True)
    sync, os.fsync = os.fsync, lambda descriptor: None
    try:
        for rank in range(world_size):
            # As :func:`shares`, for all tensors at once.
            first, stop = np.minimum(rows, rank * each), np.minimum(rows, (rank + 1) * each)
            table = np.stack([np.arange(len(names)), first * row, (stop - first) * row], axis=1)
            own = table[first < stop]
            facts = FileFacts(num_bytes=4 * int(own[:, 2].sum()), sha256=_NO_DIGEST)
            write_index(folder, rank, facts, own)
    finally:
        os.fsync = sync


class Timed:
    """Seconds, seconds of CPU, and how long another thread was held up at most.

    That thread looks a thousand times a second: what it uses itself is taken off.
    """

    def __init__(self) -> None:
        self.told: dict[str, dict[str, float]] = {}

    def of(self, label: str, work: Callable[[], T]) -> T:
        longest, own_cpu, is_over = [0.0], [0.0], threading.Event()

        def tick() -> None:
            last = time.perf_counter()
            while not is_over.is_set():
                time.sleep(0.001)
                now = time.perf_counter()
                longest[0], last = max(longest[0], now - last - 0.001), now
                own_cpu[0] = time.thread_time()

        ticker = threading.Thread(target=tick)
        ticker.start()
        began, cpu = time.perf_counter(), time.process_time()
        try:
            return work()
        finally:
            self.told[label] = {
                "seconds": round(time.perf_counter() - began, 3),
                "cpu_seconds": round(time.process_time() - cpu - own_cpu[0], 3),
                "held_seconds": round(longest[0], 3),
            }
            is_over.set()
            ticker.join()


def measure(world_size: int, *, size: str) -> dict[str, Any]:
    """Commit, then what one rank reads to prove its share and to load its own."""
    assert world_size > MOST_LISTED_RANKS, "up to there a save writes no indexes"
    shapes, timed = llama(size), Timed()
    with tempfile.TemporaryDirectory(prefix="holdfast-scale-") as scratch:
        store = CheckpointDirectory(Path(scratch) / "ring")
        folder = store.writing_folder(1)
        write_indexes(folder, shapes, world_size)
        index_bytes = sum(path.stat().st_size for path in folder.iterdir())

        def commit() -> Layout:
            layout, files = collect_indexes(folder, list(shapes), world_size)
            store.commit(_manifest(shapes, world_size, layout.runs, files))
            return layout

        layout = timed.of("commit", commit)
        [path] = [path for path in store.folder.iterdir() if "step" in path.name]
        entry = timed.of("read", lambda: store.read(path))
        rank = world_size // 2
        wanted = list(shares(shapes, world_size, rank))
        indexes = Indexes(entry)

        def look_up() -> int:
            needed = files_needed(entry, wanted)
            for name, start, count in wanted:
                indexes.pieces(name, start, start + count)
            return len(needed)

        num_needed = timed.of("find own", look_up)
        # What the saves after the first cost: the layout is known.
        timed.of(
            "collect again",
            lambda: collect_indexes(path, list(shapes), world_size, known=layout),
        )
        manifest_bytes = (path / "manifest.json").stat().st_size
        shutil.rmtree(path)
    return {
        "model": size,
        "tensors": len(shapes),
        "pieces": int((index_bytes - 56 * world_size) / 20),
        "manifest_bytes": manifest_bytes,
        "index_bytes_of_all": index_bytes,
        "files_a_rank_needs": num_needed,
        **timed.told,
    }


def _manifest(
    shapes: Shapes, world_size: int, runs: Mapping[str, Any], files: Mapping[str, FileFacts]
) -> Manifest:
    return Manifest(
        serial=1, step=1, cursor=1, world_size=world_size, config_digest="0" * 16,
        data_fingerprint="0" * 16, metrics_bytes=0, journal_lines=0, train_state={},
        update_counts={}, shapes=shapes, pieces={}, files=files, runs=runs,
    )  # fmt: skip


if __name__ == "__main__":
    import json
    import sys

    for size in sys.argv[1].split(","):
        for world in map(int, sys.argv[2:]):
            print(world, json.dumps(measure(world, size=size)), flush=True)
