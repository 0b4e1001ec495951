"""Replicates each rank's snapshots to the memory of another node, and brings them back.

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

from runner.checkpoint.memory.node_dir import NodeDir
from runner.checkpoint.memory.snapshot import (
    Memory,
    SharedBuffer,
    SnapshotHeader,
    headers_in,
    write_header,
)
from runner.policy.retention.records import Record, State, Tier

KEPT = 2  # copies of each rank: one is whole while the other is received
_CHUNK = 1 << 26  # elements sent at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInventory:
    """A snapshot that every rank has or can get back.

    ``holders``: for each rank that has lost it, the rank on whose node a copy is.
    """

    record: Record
    holders: Mapping[int, int]


# What a rank sends in a transfer (a header and values) and what it receives, by rank.
Sent = Mapping[int, tuple[bytes, torch.Tensor]]
Received = Mapping[int, torch.Tensor]


def peers(nodes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Each rank's peer, which keeps its copies: on the next node, at the same place there."""
    peer_of = {}
    for at, ranks in enumerate(nodes):
        next_node = nodes[(at + 1) % len(nodes)]
        for place, rank in enumerate(ranks):
            peer_of[rank] = next_node[place % len(next_node)]
    return peer_of


def on_every_rank(by_rank: Sequence[Mapping[str, Any]]) -> list[ReplicaInventory]:
    """List the snapshots that every rank has or can get back.

    Args:
        by_rank: ``layout`` of its slots, ``own`` [serial, step, cursor] rows, and the ``copies``
            [owner, layout, serial, step, cursor] on its node.
    """
    own = [{tuple(row) for row in listing["own"]} for listing in by_rank]
    holders: list[dict[tuple[int, ...], int]] = [{} for _ in by_rank]
    for holder, listing in enumerate(by_rank):
        for owner, layout, *row in listing["copies"]:
            if 0 <= owner < len(by_rank) and layout == by_rank[owner]["layout"]:
                holders[owner].setdefault(tuple(row), holder)
    anywhere = set().union(*own, *holders)
    return [
        ReplicaInventory(
            record=Record(
                serial=row[0], step=row[1], cursor=row[2], state=State.committed, tier=Tier.memory
            ),
            holders={r: holders[r][row] for r in range(len(by_rank)) if row not in own[r]},
        )
        for row in sorted(anywhere)
        if all(row in own[r] or row in holders[r] for r in range(len(by_rank)))
    ]


class PeerReplica:
    """
    Args:
        nodes: the ranks of each node.
        sizes: bytes of a slot, by rank.
        mark: see :class:`Memory`.
        group: a process group of all ranks, for CPU tensors.
    """

    def __init__(
        self,
        node: NodeDir,
        memory: Memory,
        *,
        nodes: Sequence[Sequence[int]],
        sizes: Sequence[int],
        mark: SnapshotHeader,
        group: dist.ProcessGroup,
    ) -> None:
        to = peers(nodes)
        self._to = to[mark.rank]
        self._from = [rank for rank in sorted(to) if to[rank] == mark.rank]
        self._is_first_there = any(ranks[0] == mark.rank for ranks in nodes)
        self._node, self._memory, self._sizes = node, memory, sizes
        self._mark, self._group = mark, group
        self._kept: dict[int, list[SharedBuffer]] = {}
        self._turn = 0
        self._serials: dict[int, int] = {}

    def prepare(self) -> None:
        """Reserve room for the snapshots of another node.

        Raises:
            OSError: there is not enough memory.
        """
        for rank in self._from:
            folder = self._node.of_rank(self._mark.incarnation, rank, "peer")
            self._node.make(folder)
            self._kept[rank] = [
                SharedBuffer.make(folder / f"slot-{at}.bin", self._sizes[rank])
                for at in range(KEPT)
            ]

    def exchange(self, slot: int, serial: int) -> None:
        """Send a sealed slot to the peer, and keep what arrives. Call it in a thread, on all ranks.

        Raises:
            RuntimeError: a rank is gone.
        """
        at, self._turn = self._turn, (self._turn + 1) % KEPT
        buffers = {rank: buffers_of[at] for rank, buffers_of in self._kept.items()}
        self._serials[at] = serial
        for buffer in buffers.values():
            _header_of(buffer.path).unlink(missing_ok=True)
        headers = self._transfer(
            {self._to: self._memory.sealed(slot)},
            {rank: buffer.values for rank, buffer in buffers.items()},
        )
        for rank, data in headers.items():
            if data:
                write_header(_header_of(buffers[rank].path), data)

    def forget(self, serial: int) -> None:
        """Drop this node's copies of a snapshot that must not be used again."""
        for at in [at for at, sent in self._serials.items() if sent == serial]:
            for buffers in self._kept.values():
                _header_of(buffers[at].path).unlink(missing_ok=True)

    def left_by(self, incarnation: int, metrics_bytes: int, journal_lines: int) -> list[list[Any]]:
        """Copies on this node that an earlier incarnation received.

        Copies taken when the metrics or the journal were longer are left out.

        Returns:
            Rows for :func:`on_every_rank`, from the first rank of the node; none from the others.
        """
        mark = self._mark
        return [
            [rank, header.layout, header.serial, header.step, header.cursor]
            for rank in (range(mark.world_size) if self._is_first_there else ())
            for header, _ in self._copies(incarnation, rank)
            if header.is_told(metrics_bytes, journal_lines)
        ]

    def _copies(self, incarnation: int, rank: int) -> Iterator[tuple[SnapshotHeader, Path]]:
        """A rank's copies here with sound headers, and the paths of their data."""
        mark, folder = self._mark, self._node.of_rank(incarnation, rank, "peer")
        same = (incarnation, rank, mark.world_size, mark.config_digest, mark.data_fingerprint)
        for header, path in headers_in(folder) if self._node.is_trusted(folder) else ():
            writer = (header.incarnation, header.rank, header.world_size)
            if (*writer, header.config_digest, header.data_fingerprint) == same:
                yield header, path

    def open_copies(self, inventory: ReplicaInventory, incarnation: int) -> tuple[Sent, Received]:
        """Prepare what this rank sends and receives to bring a snapshot back. Not collective.

        Raises:
            OSError: there is no room for what arrives.
        """
        rank, holders = self._mark.rank, inventory.holders
        out = {
            owner: self._copy(incarnation, owner, inventory.record.serial)
            for owner, holder in holders.items()
            if holder == rank
        }
        return out, {holders[rank]: self._memory.room(0)} if rank in holders else {}

    def bring_back(self, out: Sent, into: Received) -> list[bytes]:
        """Bring a snapshot to the ranks that have lost it, into slot 0. Collective.

        Returns:
            The received header, to compare the bytes with; None if nothing was received.

        Raises:
            RuntimeError: a rank is gone.
        """
        return list(self._transfer(out, into).values())

    def _copy(self, incarnation: int, owner: int, serial: int) -> tuple[bytes, torch.Tensor]:
        for header, path in self._copies(incarnation, owner):
            with contextlib.suppress(OSError):
                if header.serial == serial:
                    return header.to_bytes(), SharedBuffer.open(path, header.num_bytes).values
        return b"", torch.empty(0)

    def _transfer(self, out: Sent, into: Received) -> dict[int, bytes]:
        """Send headers and values, receive others'; returns the received headers by rank."""
        sizes = {rank: torch.zeros(1, dtype=torch.int64) for rank in into}
        self._swap(
            {rank: torch.tensor([len(header)]) for rank, (header, _) in out.items()}, sizes, 0
        )
        headers = {rank: torch.zeros(int(size), dtype=torch.uint8) for rank, size in sizes.items()}
        header_data = {
            r: torch.frombuffer(bytearray(n), dtype=torch.uint8) for r, (n, _) in out.items() if n
        }
        self._swap(header_data, headers, 1)
        sent = {
            rank: torch.split(values, _CHUNK) for rank, (header, values) in out.items() if header
        }
        kept = {
            rank: torch.split(values, _CHUNK) for rank, values in into.items() if len(headers[rank])
        }
        for at in range(max(map(len, [*sent.values(), *kept.values()]), default=0)):
            self._swap(
                {rank: parts[at] for rank, parts in sent.items() if at < len(parts)},
                {rank: parts[at] for rank, parts in kept.items() if at < len(parts)},
                2 + at,
            )
        return {rank: bytes(header.numpy()) for rank, header in headers.items()}

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
        """Close; ``forget``: the run no longer needs the copies."""
        for rank in self._from if forget else ():
            self._node.remove(self._node.of_rank(self._mark.incarnation, rank, "peer"))


def _header_of(data: Path) -> Path:
    return data.with_suffix(".json")
