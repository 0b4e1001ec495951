"""Reads the dumps of torch's flight recorders, which are pickles; accepts plain values only."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.health.rank_report import own_line
from runner.system.files import read_bounded

MOST_ENTRIES = 400  # entries of each recorder
_BEFORE = 50  # how many of these are from before the first unfinished one
_DUMP_BYTES = 1 << 28


class _PlainValues(pickle.Unpickler):
    """Unpickles plain values only: torch returns its own dump as a pickle, in memory."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder dump")


def entries_of(dumped: bytes) -> list[dict[str, Any]]:
    """The entries that matter, oldest first; see :mod:`runner.health.collective_trace`.

    Raises:
        Exception: of any kind; the dump is damaged, or holds something else.
    """
    dump = _PlainValues(io.BytesIO(dumped)).load()
    return _that_matter([plain_entry(e) for e in dump.get("entries", []) if not e["is_p2p"]])


def read_dumps(folder: Path, prefix: str) -> dict[int, list[dict[str, Any]]]:
    """Read the entries of each rank from the files ``prefix`` + rank that are readable."""
    by_rank = {}
    for path in sorted(folder.glob(f"{prefix}*")):
        rank = path.name.removeprefix(prefix)
        if rank.isdecimal():
            try:
                by_rank[int(rank)] = entries_of(read_bounded(path, _DUMP_BYTES))
            except Exception:  # half written by a process that died; the other ranks' dumps suffice
                continue
    return by_rank


def _that_matter(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the newest entries, and all from the first unfinished one on.

    The host launches NCCL's collectives far ahead of a device that hangs in one of them.
    """
    newest = max(0, len(entries) - MOST_ENTRIES)
    unfinished = (n for n, entry in enumerate(entries) if not entry["finished"])
    first = min(newest, max(0, next(unfinished, newest) - _BEFORE))
    return list(entries[first : first + MOST_ENTRIES])


def plain_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of a dump in the form of :func:`collectives`."""
    frames = [
        {"file": f["filename"], "line": f["line"], "function": f["name"]}
        for f in reversed(entry.get("frames", []))
    ]
    name = str(entry["profiling_name"])  # nccl:all_reduce
    backend, _, op = name.rpartition(":")
    group = str(entry["process_group"][0])
    is_over = bool(entry["retired"]) or entry["state"] == "completed"
    return {
        # A group with a backend for each device numbers each backend from one.
        "group": f"{group}/{backend}" if backend else group,
        "seq": int(entry["collective_seq_id"]),
        "op": op,
        "sizes": [list(size) for size in entry["input_sizes"]],
        "dtypes": list(entry["input_dtypes"]),
        "state": "completed" if is_over else str(entry["state"]),
        "finished": is_over,
        "line": own_line(frames),
    }
