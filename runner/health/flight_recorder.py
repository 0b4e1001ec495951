"""Compares the flight recorders of all ranks: where did they first diverge?

Pure. Entries are those of :func:`runner.health.collective_trace.collectives`: the collectives
that a rank entered, in order, numbered by ``seq`` within each process group.

The host enters gloo's collectives and waits in them. It only launches NCCL's: the device
reaches them later, and each host runs on, to a different place, until its launch queue is
full. So only NCCL's first number that is unfinished on any rank counts.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.distributed.env import is_nccl
from runner.health.rank_report import own_line
from runner.system.units import name_ranks

Entry = Mapping[str, Any]
_LEGACY = "nccl"  # the only one whose recorder may know that a device has begun

# Collectives in which every rank must contribute the same amount.
_SAME_SIZES = (
    "all_reduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "all_gather",
    "all_gather_base",
    "all_gather_into_tensor_coalesced",
    "barrier",
)
_KINDS = ("operation", "shape", "absent", "device", "network")  # the surest sign first


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first collective that not all ranks went through alike.

    ``kind`` is ``operation``, ``shape``, ``absent``, ``device`` (a rank's device has not reached
    what the others wait in) or ``network`` (all are in it, or it cannot be identified);
    ``ranks`` are the ranks that differ: all if no side has a majority, none if that is unknown.
    """

    kind: str
    ranks: tuple[int, ...]
    group: str
    seq: int
    message: str


def is_launched(group: str) -> bool:
    """Whether the hosts only launch the collectives of this group (``0/nccl``), and run on."""
    return is_nccl(group.partition("/")[2])


def waits_in(entries: Sequence[Entry]) -> Entry | None:
    """The collective that a rank waits in: the first NCCL collective that its device is in.

    Without NCCL collectives it is the newest one, if that is unfinished.
    """
    launched = [e for e in entries if is_launched(str(e["group"])) and not e["finished"]]
    begun = [entry for entry in launched if entry["state"] == "started"]
    if begun or launched:
        return (begun or launched)[0]
    newest = next((e for e in reversed(entries) if not is_launched(str(e["group"]))), None)
    return newest if newest is not None and not newest["finished"] else None


def first_divergence(recorded: Mapping[int, Sequence[Entry]]) -> Divergence | None:
    """The first divergence; None when all ranks agree.

    Args:
        recorded: each rank's entries, oldest first. A rank without a record is left out.
    """
    divergences = []
    # One pass over all entries: with many ranks, each rank is in a few of many groups.
    by_group: dict[str, dict[int, dict[int, Entry]]] = {}
    for rank, entries in recorded.items():
        for entry in entries:
            by_rank = by_group.setdefault(str(entry["group"]), {})
            by_rank.setdefault(rank, {})[int(entry["seq"])] = entry
    for group, members in sorted(by_group.items()):
        # A rank that entered nothing in the whole-world group counts as missing from it.
        if group.partition("/")[0] == "0":
            members = {rank: members.get(rank, {}) for rank in recorded}
        divergence = _in_group(group, members)
        if divergence is not None:
            divergences.append(divergence)
    waiting = {rank: waits_in(entries) for rank, entries in recorded.items()}
    return min(
        divergences,
        key=lambda d: (
            _waits_elsewhere(d, waiting),
            _KINDS.index(d.kind),
            -sum(_is_in(d, entry) for entry in waiting.values()),
            d.group,
        ),
        default=None,
    )


def _is_in(point: Divergence, entry: Entry | None) -> bool:
    return entry is not None and (entry["group"], entry["seq"]) == (point.group, point.seq)


def _waits_elsewhere(point: Divergence, waiting: Mapping[int, Entry | None]) -> bool:
    """Whether the late ranks themselves wait in another group."""
    if point.kind not in ("absent", "device"):
        return False
    places = [waiting.get(rank) for rank in point.ranks]
    return bool(places) and all(e is not None and e["group"] != point.group for e in places)


def _in_group(group: str, members: Mapping[int, Mapping[int, Entry]]) -> Divergence | None:
    if len(members) < 2:
        return None
    # The recorder is a ring buffer: what one rank has dropped cannot be compared.
    first = max((min(seqs) for seqs in members.values() if seqs), default=0)
    last = max((max(seqs) for seqs in members.values() if seqs), default=-1)
    # Not a range: the numbers come from a file and may be anything.
    for seq in sorted({seq for seqs in members.values() for seq in seqs if first <= seq <= last}):
        entered = {rank: seqs[seq] for rank, seqs in members.items() if seq in seqs}
        absent = tuple(rank for rank in members if rank not in entered)
        divergence = _at(group, seq, entered, absent)
        if divergence is not None:
            kind, ranks, message = divergence
            return Divergence(kind=kind, ranks=ranks, group=group, seq=seq, message=message)
    return None


def _at(
    group: str, seq: int, entered: Mapping[int, Entry], absent: tuple[int, ...]
) -> tuple[str, tuple[int, ...], str] | None:
    """Kind, ranks and message of a divergence in one collective."""
    ops = {rank: str(entry["op"]) for rank, entry in entered.items()}
    if len(set(ops.values())) > 1:
        return "operation", _odd(ops), _each(seq, entered)
    shapes = {rank: f"{entry['sizes']} {entry['dtypes']}" for rank, entry in entered.items()}
    if len(set(shapes.values())) > 1 and next(iter(ops.values())).lstrip("_") in _SAME_SIZES:
        return "shape", _odd(shapes), _each(seq, entered)
    waiting = {rank: entry for rank, entry in entered.items() if not entry["finished"]}
    if not waiting:
        return None
    where = _each(seq, waiting)
    if not absent:
        return _on_devices(group, entered, where) if is_launched(group) else None
    if is_launched(group) and len(absent) > len(waiting):
        unknown = "alone entered what the others never did, and which of them diverged is unknown"
        return "absent", (), f"{name_ranks(waiting)} {unknown}: {where}"
    missing = f"{name_ranks(absent)} never entered what the others wait in: {where}"
    return "absent", absent, missing


def _on_devices(
    group: str, inside: Mapping[int, Entry], waiting: str
) -> tuple[str, tuple[int, ...], str]:
    """Find the device that is behind, where all hosts launched the same.

    Whether a device has begun is recorded only with TORCH_NCCL_ENABLE_TIMING=1, which
    ``debug=nccl`` and ``debug=collectives`` set; nccl2 never records it.
    """
    over = [rank for rank, entry in inside.items() if entry["finished"]]
    begun = [rank for rank, entry in inside.items() if entry["state"] == "started"]
    not_begun = tuple(r for r, e in inside.items() if not e["finished"] and e["state"] != "started")
    done = f"; on {name_ranks(over)} it is done" if over else ""
    if begun and not_begun and len(not_begun) <= len(begun) + len(over):
        behind = (
            f"the device of {name_ranks(not_begun)} has not reached what the others wait in: it "
            f"hangs in a kernel before it, or is slow: {waiting}"
        )
        return "device", not_begun, behind
    if not not_begun:
        why = (
            "the devices are in one collective and none makes progress: the network between them, "
            "or a peer's device"
        )
    elif begun:
        why = (
            f"the device of {name_ranks(begun)} waits in what most have not reached; whose device "
            "blocks them is unknown"
        )
    else:
        timing = "TORCH_NCCL_ENABLE_TIMING=1 (debug=nccl sets it)"
        if group.partition("/")[2] != _LEGACY:
            timing = f"TORCH_DIST_USE_NCCL2=0 and {timing}"
        why = (
            "every host has launched it, the devices do not get through: a device that hangs "
            f"before it and a network that is down cannot be distinguished without {timing}"
        )
    return "network", (), f"{why}: {waiting}{done}"


def _odd(values: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks outside the majority; all ranks when there is no majority."""
    counts = Counter(values.values()).most_common()
    if counts[0][1] * 2 <= len(values):
        return tuple(sorted(values))
    return tuple(sorted(rank for rank, value in values.items() if value != counts[0][0]))


def _each(seq: int, entered: Mapping[int, Entry]) -> str:
    """List what each rank entered; ranks that did the same are grouped."""
    groups: dict[str, list[int]] = {}
    for rank, entry in sorted(entered.items()):
        shape = ", ".join(
            f"{str(dtype).lower()}{list(size)}"
            for dtype, size in zip(entry["dtypes"], entry["sizes"], strict=False)
        )
        text = f"{entry['op']} #{seq} ({shape}) at {entry['line'] or 'an unknown line'}"
        groups.setdefault(text, []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} entered {text}" for text, ranks in groups.items())


# Reads the dumps of torch's flight recorders, which are pickles; accepts plain values only.


MOST_ENTRIES = 400  # entries of each recorder
_BEFORE = 50  # how many of these are from before the first unfinished one


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
