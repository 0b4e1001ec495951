"""One rank's snapshots in the shared memory of its node. Nothing here is agreed with others.

A slot holds all of this rank's shards, replicas too: to restore one needs no communication.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runner.checkpoint.manifest import ITEM_BYTES
from runner.checkpoint.node import NodeFolder
from runner.checkpoint.note import Note, parse_note, read_note, write_note
from runner.checkpoint.protocol import Identity, Moment, Shard
from runner.checkpoint.region import Region
from runner.error import CorruptCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """``count`` elements from ``start`` on of one flattened tensor, at element ``offset``."""

    name: str
    start: int
    count: int
    offset: int


class SlotLayout:
    """Where each shard lies in a slot; ``digest`` is equal where two slots hold the same."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.places: list[Place] = []
        told = []
        offset = 0
        for shard in shards:
            count = len(shard.local)
            self.places.append(
                Place(name=shard.name, start=shard.start, count=count, offset=offset)
            )
            told.append([shard.name, list(shard.shape), shard.start, count])
            offset += count
        self.num_bytes = offset * ITEM_BYTES
        self.digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def views(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The slot's part of each shard, in order."""
        return [values[p.offset : p.offset + p.count] for p in self.places]


class Memory:
    """The slots of one rank in one incarnation, by number from 0.

    Args:
        mark: an empty note with all that stays the same: incarnation, rank, layout, identity.
        threads: for verifying while training waits.
    """

    def __init__(
        self,
        node: NodeFolder,
        layout: SlotLayout,
        *,
        mark: Note,
        num_slots: int,
        device: torch.device,
        threads: int,
    ) -> None:
        self.num_slots = num_slots
        self.layout = layout
        self._node = node
        self._mark = mark
        self._folder = node.of_rank(mark.incarnation, mark.rank)
        self._threads = threads
        self._regions: dict[int, Region] = {}
        self._digests: dict[int, str] = {}
        self._notes: dict[int, Note] = {}
        self._copier: _Copier = _CudaCopier(device) if device.type == "cuda" else _Copier()

    def open(self) -> None:
        """Make this rank's folder.

        Raises:
            OSError: it cannot be made.
        """
        self._node.make(self._folder)

    def prepare(self, slot: int) -> None:
        """Reserve and map a slot's memory.

        Raises:
            OSError: there is not enough.
        """
        if slot not in self._regions:
            region = Region.make(self._path(slot, "bin"), self.layout.num_bytes)
            self._copier.adopt(region)
            self._regions[slot] = region

    # -- taking one ------------------------------------------------------------------------

    def fill(self, slot: int, shards: Sequence[Shard]) -> None:
        """Copy the state. On CUDA it goes on beside the training until :meth:`before_update`."""
        self.invalidate(slot)
        views = self.layout.views(self._regions[slot].values)
        pairs = [(v, s.local.detach()) for v, s in zip(views, shards, strict=True) if len(v)]
        self._copier.copy(slot, [view for view, _ in pairs], [local for _, local in pairs])

    def before_update(self) -> None:
        """Call before the optimizer changes what is being copied. The host does not wait."""
        self._copier.before_update()

    def seal(self, slot: int, serial: int, moment: Moment, counts: Mapping[str, int]) -> None:
        """In the background: digest what was copied and say that it is whole.

        Raises:
            OSError: the note cannot be written.
        """
        self._copier.finish(slot)
        self._digests[slot] = self._regions[slot].digest()
        note = replace(
            self._mark,
            serial=serial,
            step=moment.step,
            cursor=moment.cursor,
            metrics_bytes=moment.metrics_bytes,
            journal_lines=moment.journal_lines,
            train_state=moment.train_state,
            update_counts=counts,
            num_bytes=self.layout.num_bytes,
            sha256=self._digests[slot],
        )
        self._notes[slot] = note
        write_note(self._path(slot, "json"), note.to_bytes())

    def sealed(self, slot: int) -> tuple[bytes, torch.Tensor]:
        """Note and values of a sealed slot."""
        return self._notes[slot].to_bytes(), self._regions[slot].values

    def note_of(self, slot: int) -> Note:
        """Of a slot that was sealed or taken over."""
        return self._notes[slot]

    def invalidate(self, slot: int) -> None:
        """What the slot holds is not to be used again, by this process or a later one."""
        self._path(slot, "json").unlink(missing_ok=True)
        self._digests.pop(slot, None)

    # -- using one -------------------------------------------------------------------------

    def check(self, slot: int, *, finite: bool = False, quick: bool = False) -> None:
        """Compare every byte with what was sealed.

        Args:
            finite: also refuse NaN and Inf.
            quick: with several threads.

        Raises:
            CorruptCheckpoint: something differs.
        """
        region = self._regions[slot]
        found = region.digest(threads=self._threads if quick else 1, finite=finite)
        if found != self._digests.get(slot):
            raise CorruptCheckpoint(f"{region.path}: digest differs: damaged in memory")

    def copy_out(self, slot: int, shards: Sequence[Shard]) -> None:
        """Give the state back."""
        for view, shard in zip(self.layout.views(self._regions[slot].values), shards, strict=True):
            shard.local.copy_(view)

    def pieces(self, slot: int) -> Iterator[tuple[Place, torch.Tensor]]:
        """What the slot holds, as views."""
        return zip(self.layout.places, self.layout.views(self._regions[slot].values), strict=True)

    def path_of(self, slot: int) -> Path:
        return self._path(slot, "bin")

    # -- across a restart ------------------------------------------------------------------

    def left_by(self, incarnation: int) -> tuple[dict[int, Note], list[str]]:
        """Snapshots of this rank that an earlier incarnation left here, by serial.

        And sentences that say which are of no use, and why.
        """
        folder = self._node.of_rank(incarnation, self._mark.rank)
        found: dict[int, Note] = {}
        refused: dict[str, None] = {}
        for path in sorted(folder.glob("slot-*.json")) if self._node.is_trusted(folder) else []:
            try:
                note, _ = read_note(path)
            except (CorruptCheckpoint, FileNotFoundError) as error:
                refused[str(error)] = None
                continue
            why = self._why_not(note, incarnation)
            if why:
                refused[why] = None
            else:
                found[note.serial] = note
        return found, list(refused)

    def _why_not(self, note: Note, incarnation: int) -> str | None:
        mark = self._mark
        if note.world_size != mark.world_size:
            return f"they are of {note.world_size} ranks, and there are {mark.world_size} now"
        if (note.layout, note.num_bytes) != (mark.layout, self.layout.num_bytes):
            return "they are of another model or engine, or cut otherwise"
        if note.config_digest != mark.config_digest:
            return "they were taken with other settings"
        if note.data_fingerprint != mark.data_fingerprint:
            return "they were taken on other data"
        if (note.incarnation, note.rank) != (incarnation, mark.rank):
            return "they are another rank's"
        return None

    def take_over(self, incarnation: int, serial: int, slot: int) -> None:
        """Copy what an earlier incarnation left into an own slot, and verify the copy.

        The other may still live and write: what has been verified must be nobody else's.

        Raises:
            CorruptCheckpoint: it is damaged or gone.
        """
        folder = self._node.of_rank(incarnation, self._mark.rank)
        found = next((pair for pair in _notes_in(folder) if pair[0].serial == serial), None)
        if found is None:
            raise CorruptCheckpoint(f"{folder}: snapshot {serial} is gone")
        note, source = found
        values = self.room(slot)
        try:
            values.copy_(Region.open(source, note.num_bytes).values)
        except (OSError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{source}: {error}") from None
        self._make_own(slot, note)

    def room(self, slot: int) -> torch.Tensor:
        """A slot's values, to be overwritten: it holds nothing until it is accepted.

        Raises:
            OSError: there is not enough memory.
        """
        self.prepare(slot)
        self.invalidate(slot)
        return self._regions[slot].values

    def accept(self, slot: int, data: bytes, incarnation: int) -> None:
        """Verify what came from a peer into :meth:`room`; ``data`` are its note's bytes.

        Raises:
            CorruptCheckpoint: it is not this rank's snapshot, whole.
        """
        try:
            note = parse_note(data)
        except Exception as error:  # damage may take any form
            raise CorruptCheckpoint(f"a peer's note: {str(error)[:200]}") from None
        if why := self._why_not(note, incarnation):
            raise CorruptCheckpoint(f"a peer's snapshot is of no use: {why}")
        self._make_own(slot, note)

    def _make_own(self, slot: int, note: Note) -> None:
        self._digests[slot] = note.sha256
        self.check(slot, quick=True)
        self._notes[slot] = replace(note, incarnation=self._mark.incarnation)
        write_note(self._path(slot, "json"), self._notes[slot].to_bytes())

    def forget_earlier(self) -> None:
        """What earlier incarnations left on this node is of no more use."""
        self._node.remove_before(self._mark.incarnation)

    def close(self, *, forget: bool) -> None:
        """``forget``: the run needs them no more; else they wait for the next start."""
        self._copier.close()
        if forget:
            self._node.remove(self._folder)
            self._node.leave()

    def _path(self, slot: int, suffix: str) -> Path:
        return self._folder / f"slot-{slot}.{suffix}"


def notes_on(node: NodeFolder) -> list[Note]:
    """Of all whole snapshots that lie on this node, of whichever rank and incarnation."""
    return [note for folder in node.of_ranks() for note, _ in _notes_in(folder)]


def _notes_in(folder: Path) -> Iterator[tuple[Note, Path]]:
    """Sound notes, and where their data is."""
    for path in sorted(folder.glob("slot-*.json")):
        with contextlib.suppress(CorruptCheckpoint, FileNotFoundError):
            yield read_note(path)[0], path.with_suffix(".bin")


def empty_note(
    layout: SlotLayout, *, incarnation: int, rank: int, world_size: int, identity: Identity
) -> Note:
    """What all notes of one rank and incarnation have in common."""
    return Note(
        incarnation=incarnation,
        serial=0,
        step=0,
        cursor=0,
        rank=rank,
        world_size=world_size,
        layout=layout.digest,
        config_digest=identity.config_digest,
        data_fingerprint=identity.data_fingerprint,
        metrics_bytes=0,
        journal_lines=0,
        train_state={},
        update_counts={},
        num_bytes=layout.num_bytes,
        sha256="",
    )


class _Copier:
    """Copies on the CPU: done when it returns."""

    def adopt(self, region: Region) -> None:
        """A region that will be copied to."""

    def copy(self, slot: int, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(views, sources)

    def before_update(self) -> None:
        """The sources may change from here on."""

    def finish(self, slot: int) -> None:
        """Return when the slot is filled. In the background thread."""

    def close(self) -> None:
        """Nothing is copied any more."""


class _CudaCopier(_Copier):
    """Copies on a stream of its own, beside the next forward and backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: dict[int, torch.cuda.Event] = {}
        self._last: torch.cuda.Event | None = None
        self._pinned: list[Region] = []

    def adopt(self, region: Region) -> None:
        # Without it every copy would go through a small pinned buffer, and wait.
        with contextlib.suppress(RuntimeError), torch.cuda.device(self._device):
            region.pin()
            self._pinned.append(region)

    def copy(self, slot: int, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(views, sources, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._done[slot] = self._last = event

    def before_update(self) -> None:
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)
            self._last = None

    def finish(self, slot: int) -> None:
        self._done[slot].synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        for region in self._pinned:
            region.unpin()
