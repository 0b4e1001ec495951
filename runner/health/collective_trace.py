"""Asks torch's flight recorders of this process which collectives it entered, within a limit.

gloo and NCCL record into recorders of their own. NCCL's asks the device how far each collective
is, which may wait for a lock of the driver that a hung device never gives back: it is asked in a
thread, and given up.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from runner.health.flight_recorder import NCCL
from runner.health.rank_report import own_line

MOST_ENTRIES = 400  # of each recorder
_BEFORE = 50  # of these, so many from before the first unfinished one
_SECONDS = 3.0

_Dump = Callable[[], bytes]


class _PlainValues(pickle.Unpickler):
    """torch hands its own dump over as a pickle, in memory; it holds plain values only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight recorder dump")


def has_nccl() -> bool:
    """Whether there is a recorder that may not answer."""
    return _nccl_dump() is not None


def collectives(*, seconds: float = _SECONDS) -> tuple[list[dict[str, Any]], str]:
    """The entries of this process's flight recorders that matter, oldest first.

    Each has ``group`` (name, and its backend), ``seq`` (collective sequence number in the group),
    ``op``, ``sizes``, ``dtypes``, ``state`` (scheduled, started or completed), ``finished``,
    ``line``.

    Returns:
        The entries, empty when there are none; and in words, which recorder did not answer.
    """
    if not dist.is_initialized():
        return [], ""
    found = _entries(_default_dump)
    dump = _nccl_dump()
    if dump is None:
        return found, ""
    told: list[list[dict[str, Any]]] = []
    asked = threading.Thread(target=lambda: told.append(_entries(dump)), daemon=True)
    asked.start()
    asked.join(seconds)
    if not told:
        return found, f"NCCL's flight recorder did not answer within {seconds:g} s"
    known = {(entry["group"], entry["seq"], entry["op"]) for entry in found}
    more = [e for e in told[0] if (e["group"], e["seq"], e["op"]) not in known]
    return found + more, ""


def _default_dump() -> bytes:
    private: Any = torch._C._distributed_c10d
    dumped: bytes = private._dump_fr_trace(True, True, False)
    return dumped


def _nccl_dump() -> _Dump | None:
    """By its own name, or in newer versions of torch by the backend's; None: no NCCL in here."""
    private: Any = torch._C._distributed_c10d
    if hasattr(private, "_dump_nccl_trace"):
        return lambda: private._dump_nccl_trace(True, True, False)
    # A function of C++ tells its signature in its docstring alone.
    knows_backends = "backend" in (getattr(private._dump_fr_trace, "__doc__", None) or "")
    if not knows_backends or not dist.is_nccl_available():
        return None
    return lambda: private._dump_fr_trace(True, True, False, NCCL)


def _entries(dump: _Dump) -> list[dict[str, Any]]:
    """A private interface: a report without it is better than none."""
    try:
        dumped = _PlainValues(io.BytesIO(dump())).load()
        entries = [plain_entry(e) for e in dumped.get("entries", []) if not e["is_p2p"]]
    except Exception:
        return []
    return _that_matter(entries)


def _that_matter(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest ones, but not later than from the first unfinished one on.

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
        # A group with a backend for each device counts in each of them from one.
        "group": f"{group}/{backend}" if backend else group,
        "seq": int(entry["collective_seq_id"]),
        "op": op,
        "sizes": [list(size) for size in entry["input_sizes"]],
        "dtypes": list(entry["input_dtypes"]),
        "state": "completed" if is_over else str(entry["state"]),
        "finished": is_over,
        "line": own_line(frames),
    }
