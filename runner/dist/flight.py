"""Compares the flight recorders of all ranks: where did they first do different things?

Pure. Entries are those of :func:`runner.dist.evidence.collectives`: the collectives that a
rank entered, in order, numbered by ``seq`` within each process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]

# Collectives in which every rank must hand over as much as the others.
_SAME_SIZES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "barrier")
_KINDS = ("operation", "shape", "absent")  # the surest sign first


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first collective that not all ranks entered alike.

    ``kind`` is ``operation``, ``shape`` or ``absent``; ``ranks`` are the odd ones out, or all
    when no side has a majority.
    """

    kind: str
    ranks: tuple[int, ...]
    group: str
    seq: int
    words: str


def first_divergence(recorded: Mapping[int, Sequence[Entry]]) -> Divergence | None:
    """What went apart, by rank; None when nothing did.

    Args:
        recorded: rank to its entries, oldest first. A rank that could not tell is left out.
    """
    found = []
    for group in sorted({str(e["group"]) for entries in recorded.values() for e in entries}):
        by_rank = {
            rank: {int(e["seq"]): e for e in entries if e["group"] == group}
            for rank, entries in recorded.items()
        }
        members = {rank: seqs for rank, seqs in by_rank.items() if seqs}
        # A rank that never entered anything in the whole-world group is missing from it too.
        if group.partition("/")[0] == "0":
            members = by_rank
        divergence = _in_group(group, members)
        if divergence is not None:
            found.append(divergence)
    return min(found, key=lambda d: (_KINDS.index(d.kind), d.group), default=None)


def _in_group(group: str, members: Mapping[int, Mapping[int, Entry]]) -> Divergence | None:
    if len(members) < 2:
        return None
    # The recorder is a ring: what one rank has forgotten cannot be compared.
    first = max((min(seqs) for seqs in members.values() if seqs), default=0)
    last = max((max(seqs) for seqs in members.values() if seqs), default=-1)
    # Not a range: what a file says of its numbers may be anything.
    for seq in sorted({seq for seqs in members.values() for seq in seqs if first <= seq <= last}):
        here = {rank: seqs[seq] for rank, seqs in members.items() if seq in seqs}
        absent = tuple(rank for rank in members if rank not in here)
        divergence = _at(group, seq, here, absent)
        if divergence is not None:
            return divergence
    return None


def _at(
    group: str, seq: int, here: Mapping[int, Entry], absent: tuple[int, ...]
) -> Divergence | None:
    ops = {rank: str(entry["op"]) for rank, entry in here.items()}
    if len(set(ops.values())) > 1:
        return Divergence(
            kind="operation", ranks=_odd(ops), group=group, seq=seq, words=_each(seq, here)
        )
    shapes = {rank: f"{entry['sizes']} {entry['dtypes']}" for rank, entry in here.items()}
    if len(set(shapes.values())) > 1 and next(iter(ops.values())).lstrip("_") in _SAME_SIZES:
        return Divergence(
            kind="shape", ranks=_odd(shapes), group=group, seq=seq, words=_each(seq, here)
        )
    waiting = {rank: entry for rank, entry in here.items() if not entry["finished"]}
    if absent and waiting:
        names = ", ".join(map(str, absent))
        return Divergence(
            kind="absent",
            ranks=absent,
            group=group,
            seq=seq,
            words=f"rank {names} never entered what the others wait in: {_each(seq, waiting)}",
        )
    return None


def _odd(values: Mapping[int, str]) -> tuple[int, ...]:
    """The ranks outside the majority; all of them when there is none."""
    counts = Counter(values.values()).most_common()
    if counts[0][1] * 2 <= len(values):
        return tuple(sorted(values))
    return tuple(sorted(rank for rank, value in values.items() if value != counts[0][0]))


def _each(seq: int, here: Mapping[int, Entry]) -> str:
    """What each rank entered; ranks that did the same are named together."""
    words: dict[str, list[int]] = {}
    for rank, entry in sorted(here.items()):
        shape = ", ".join(
            f"{str(dtype).lower()}{list(size)}"
            for dtype, size in zip(entry["dtypes"], entry["sizes"], strict=False)
        )
        text = f"{entry['op']} #{seq} ({shape}) at {entry['line'] or 'an unknown line'}"
        words.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank {', '.join(map(str, ranks))} entered {text}" for text, ranks in words.items()
    )
