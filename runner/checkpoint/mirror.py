"""Copies of each rank's snapshots in the memory of another node, and back again.

Over a process group of its own, so that a thread may use it while training uses the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.checkpoint.memory import Memory
from runner.checkpoint.node import NodeFolder
from runner.checkpoint.note import Note, read_note, write_note
from runner.checkpoint.region import Region
from runner.error import CorruptCheckpoint

KEPT = 2  # of each rank: one is whole while the other is received
_CHUNK = 1 << 26  # elements sent at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A snapshot that can be had on every rank.

    ``holders``: for each rank that has lost it, the rank on whose node a copy lies.
    """

    serial: int
    step: int
    cursor: int
    holders: Mapping[int, int]


def peers(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Each rank's peer, which keeps its copies: on the next node, at the same place there."""
    found = {}
    for at, ranks in enumerate(nodes):
        there = nodes[(at + 1) % len(nodes)]
        for place, rank in enumerate(ranks):
            found[rank] = there[place % len(there)]
    return found


def on_every_rank(told: Sequence[Mapping[str, Any]]) -> list[Found]:
    """What every rank has, or can get back.

    Args:
        told: by rank: ``layout`` of its slots, ``own`` [serial, step, cursor] rows, and the
            ``copies`` [owner, layout, serial, step, cursor] on its node.
    """
    own = [{tuple(row) for row in said["own"]} for said in told]
    holders: list[dict[tuple[int, ...], int]] = [{} for _ in told]
    for holder, said in enumerate(told):
        for owner, layout, *row in said["copies"]:
            if 0 <= owner < len(told) and layout == told[owner]["layout"]:
                holders[owner].setdefault(tuple(row), holder)
    anywhere = set().union(*own, *holders)
    return [
        Found(
            serial=row[0],
            step=row[1],
            cursor=row[2],
            holders={r: holders[r][row] for r in range(len(told)) if row not in own[r]},
        )
        for row in sorted(anywhere)
        if all(row in own[r] or row in holders[r] for r in range(len(told)))
    ]


class Mirror:
    """
    Args:
        nodes: the ranks of each node.
        sizes: of a slot, in bytes, by rank.
        mark: see :class:`Memory`.
        group: of all ranks, for CPU tensors.
    """

    def __init__(
        self,
        node: NodeFolder,
        memory: Memory,
        *,
        nodes: Sequence[Sequence[int]],
        sizes: Sequence[int],
        mark: Note,
        group: dist.ProcessGroup,
    ) -> None:
        to = peers(nodes)
        self._to = to[mark.rank]
        self._from = [rank for rank in sorted(to) if to[rank] == mark.rank]
        self._is_first_there = any(ranks[0] == mark.rank for ranks in nodes)
        self._node, self._memory, self._sizes = node, memory, sizes
        self._mark, self._group = mark, group
        self._kept: dict[int, list[Region]] = {}
        self._turn = 0
        self._serials: dict[int, int] = {}

    def prepare(self) -> None:
        """Make room for the others' snapshots.

        Raises:
            OSError: there is not enough.
        """
        for rank in self._from:
            folder = self._node.of_rank(self._mark.incarnation, rank, "peer")
            self._node.make(folder)
            self._kept[rank] = [
                Region.make(folder / f"slot-{at}.bin", self._sizes[rank]) for at in range(KEPT)
            ]

    def exchange(self, slot: int, serial: int) -> None:
        """Send a sealed slot to the peer, and keep what comes. In a thread, on all ranks.

        Raises:
            RuntimeError: a rank is gone.
        """
        at, self._turn = self._turn, (self._turn + 1) % KEPT
        regions = {rank: kept[at] for rank, kept in self._kept.items()}
        self._serials[at] = serial
        for region in regions.values():
            _note_of(region.path).unlink(missing_ok=True)
        notes = self._transfer(
            {self._to: self._memory.sealed(slot)},
            {rank: region.values for rank, region in regions.items()},
        )
        for rank, data in notes.items():
            if data:
                write_note(_note_of(regions[rank].path), data)

    def forget(self, serial: int) -> None:
        """A snapshot is not to be used again: nor are the copies of it that lie here."""
        for at in [at for at, sent in self._serials.items() if sent == serial]:
            for kept in self._kept.values():
                _note_of(kept[at].path).unlink(missing_ok=True)

    def left_by(self, incarnation: int, metrics_bytes: int) -> list[list[Any]]:
        """Copies on this node that an earlier incarnation was sent, as :func:`on_every_rank`

        takes them; told by the node's first rank. Without those of a longer metrics file.
        """
        mark = self._mark
        return [
            [rank, note.layout, note.serial, note.step, note.cursor]
            for rank in (range(mark.world_size) if self._is_first_there else ())
            for note, _, _ in self._copies(incarnation, rank)
            if note.metrics_bytes <= metrics_bytes
        ]

    def _copies(self, incarnation: int, rank: int) -> Iterator[tuple[Note, bytes, Path]]:
        """A rank's copies here, as far as their notes are sound: note, its bytes, the data."""
        mark, folder = self._mark, self._node.of_rank(incarnation, rank, "peer")
        same = (incarnation, rank, mark.world_size, mark.config_digest, mark.data_fingerprint)
        for path in sorted(folder.glob("slot-*.json")) if self._node.is_trusted(folder) else []:
            with contextlib.suppress(CorruptCheckpoint, FileNotFoundError):
                note, data = read_note(path)
                told = (note.incarnation, note.rank, note.world_size)
                if (*told, note.config_digest, note.data_fingerprint) == same:
                    yield note, data, path.with_suffix(".bin")

    def give_back(self, holders: Mapping[int, int], serial: int, incarnation: int) -> None:
        """Bring a snapshot to the ranks that have lost it, into slot 0. On all ranks.

        Raises:
            CorruptCheckpoint: what came to this rank is damaged.
        """
        rank = self._mark.rank
        out = {
            owner: self._copy(incarnation, owner, serial)
            for owner, holder in holders.items()
            if holder == rank
        }
        into = {holders[rank]: self._memory.room(0)} if rank in holders else {}
        for data in self._transfer(out, into).values():
            self._memory.accept(0, data, incarnation)

    def _copy(self, incarnation: int, owner: int, serial: int) -> tuple[bytes, torch.Tensor]:
        for note, data, path in self._copies(incarnation, owner):
            with contextlib.suppress(OSError):
                if note.serial == serial:
                    return data, Region.open(path, note.num_bytes).values
        return b"", torch.empty(0)

    def _transfer(
        self, out: Mapping[int, tuple[bytes, torch.Tensor]], into: Mapping[int, torch.Tensor]
    ) -> dict[int, bytes]:
        """Send notes and values, receive others'; the notes received, by rank."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in into}
        self._swap({rank: torch.tensor([len(note)]) for rank, (note, _) in out.items()}, sizes, 0)
        notes = {rank: torch.zeros(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        told = {
            r: torch.frombuffer(bytearray(n), dtype=torch.uint8) for r, (n, _) in out.items() if n
        }
        self._swap(told, notes, 1)
        sent = {rank: torch.split(values, _CHUNK) for rank, (note, values) in out.items() if note}
        kept = {
            rank: torch.split(values, _CHUNK) for rank, values in into.items() if len(notes[rank])
        }
        for at in range(max(map(len, [*sent.values(), *kept.values()]), default=0)):
            self._swap(
                {rank: parts[at] for rank, parts in sent.items() if at < len(parts)},
                {rank: parts[at] for rank, parts in kept.items() if at < len(parts)},
                2 + at,
            )
        return {rank: bytes(note.numpy()) for rank, note in notes.items()}

    def _swap(
        self, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor], tag: int
    ) -> None:
        group = self._group
        works = [dist.isend(t, rank, group=group, tag=tag) for rank, t in out.items() if len(t)]
        works += [dist.irecv(t, rank, group=group, tag=tag) for rank, t in into.items() if len(t)]
        for work in works:
            if work is not None:
                work.wait()

    def close(self, *, forget: bool) -> None:
        """``forget``: the run needs the copies no more."""
        for rank in self._from if forget else ():
            self._node.remove(self._node.of_rank(self._mark.incarnation, rank, "peer"))


def _note_of(data: Path) -> Path:
    return data.with_suffix(".json")
