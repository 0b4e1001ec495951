"""Asks torch's flight recorders of this process which collectives it entered, within a limit.

gloo and NCCL record into recorders of their own. NCCL's asks the device how far each collective
is, which may wait for a lock of the driver that a hung device never gives back: it is asked in a
thread, and given up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runner.health.flight_recorder import NCCL
from runner.health.trace_dump import entries_of

_SECONDS = 3.0

_Dump = Callable[[], bytes]


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
    answers: list[list[dict[str, Any]]] = []
    asked = threading.Thread(target=lambda: answers.append(_entries(dump)), daemon=True)
    asked.start()
    asked.join(seconds)
    if not answers:
        return found, f"NCCL's flight recorder did not answer within {seconds:g} s"
    known = {(entry["group"], entry["seq"], entry["op"]) for entry in found}
    more = [e for e in answers[0] if (e["group"], e["seq"], e["op"]) not in known]
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
        return entries_of(dump())
    except Exception:
        return []
