"""Asks torch's flight recorders of this process which collectives it entered, within a limit.

gloo and NCCL have separate recorders. NCCL's asks the device how far each collective
is, which may wait for a driver lock that a hung device never releases: it is asked in a
thread, with a time limit. From torch 2.14 on "nccl" makes another backend. In 2.15 a hook records
its collectives: each such backend has a recorder of its own, known by the backend's name. 2.14
has the hook and attaches it to no group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from runner.health.flight_recorder import entries_of
from runner.system.process import in_thread

_SECONDS = 3.0
_RECORDED_BY_HOOK = ("nccl2", "nccl-lazy")

_Dump = Callable[[], bytes]


def has_nccl() -> bool:
    """Whether there is an NCCL recorder, which may not answer."""
    return bool(_nccl_dumps())


def collectives(*, seconds: float = _SECONDS) -> tuple[list[dict[str, Any]], str]:
    """The entries of this process's flight recorders that matter, oldest first.

    Each has ``group`` (name, and its backend), ``seq`` (collective sequence number in the group),
    ``op``, ``sizes``, ``dtypes``, ``state`` (scheduled, started or completed), ``finished``,
    ``line``.

    Returns:
        The entries, and a sentence that names a recorder which did not answer ("": all answered).
    """
    if not dist.is_initialized():
        return [], ""
    entries = _entries(_default_dump)
    dumps = _nccl_dumps()
    if not dumps:
        return entries, ""
    answer = in_thread(lambda: [e for dump in dumps for e in _entries(dump)], "recorders")
    if not wait([answer], seconds).done or answer.exception():
        return entries, f"NCCL's flight recorder did not answer within {seconds:g} s"
    known = {(entry["group"], entry["seq"], entry["op"]) for entry in entries}
    more = [e for e in answer.result() if (e["group"], e["seq"], e["op"]) not in known]
    return entries + more, ""


def _default_dump() -> bytes:
    private: Any = torch._C._distributed_c10d
    dumped: bytes = private._dump_fr_trace(True, True, False)
    return dumped


def _nccl_dumps() -> Sequence[_Dump]:
    """Dump NCCL's recorders; empty without NCCL."""
    private: Any = torch._C._distributed_c10d
    dumps: list[_Dump] = []
    if hasattr(private, "_dump_nccl_trace"):
        dumps.append(lambda: private._dump_nccl_trace(True, True, False))
    # A C++ function gives its signature only in its docstring.
    knows_backends = "backend" in (getattr(private._dump_fr_trace, "__doc__", None) or "")
    if knows_backends and dist.is_nccl_available():
        by_name = partial(private._dump_fr_trace, True, True, False)
        dumps += [partial(by_name, name) for name in _RECORDED_BY_HOOK]
    return dumps


def _entries(dump: _Dump) -> list[dict[str, Any]]:
    """Call a private interface of torch: a report without it is better than none."""
    try:
        return entries_of(dump())
    except Exception:
        return []
