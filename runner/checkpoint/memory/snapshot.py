"""One rank's snapshots in the shared memory of its node. Nothing here is agreed with others.

A slot holds all of this rank's shards, replicas too, so restoring one needs no communication.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128

from runner.checkpoint.elements import is_finite, name_of
from runner.checkpoint.manifest import ITEM_BYTES, parse_fields
from runner.checkpoint.memory.node_dir import NodeDir
from runner.checkpoint.protocol import CheckpointMetadata, Identity, SavedShard
from runner.system.error import CorruptCheckpoint
from runner.system.files import open_regular, read_bounded
from runner.system.parsing import json_text, refuse_flagged
from runner.system.units import format_bytes

# The header of a snapshot in a slot: written after the data, removed before it.
#
# A process can end between any two of its writes; a slot without a header holds nothing. The
# first line is the SHA-256 of the rest.
FORMAT = "holdfast-snapshot"
VERSION = 2
_MOST_BYTES = 1 << 27
_WORDS = 300
_TEXTS = ("layout", "config_digest", "data_fingerprint", "digest")
_NUMBERS = (
    "incarnation", "serial", "step", "cursor", "rank", "world_size", "metrics_bytes",
    "journal_lines", "num_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader(CheckpointMetadata):
    """What a slot holds. ``layout`` is a digest of the places of all tensors' elements in it.

    ``digest`` is :meth:`SharedBuffer.digest`.
    """

    incarnation: int
    rank: int
    world_size: int
    layout: str
    config_digest: str
    data_fingerprint: str
    num_bytes: int
    serial: int = 0
    update_counts: Mapping[str, int] = field(default_factory=dict)
    digest: str = ""

    def is_told(self, metrics_bytes: int, journal_lines: int) -> bool:
        """Whether files of these lengths contain all lines written before the snapshot."""
        return self.metrics_bytes <= metrics_bytes and self.journal_lines <= journal_lines

    def to_bytes(self) -> bytes:
        """The header as bytes, after their digest."""
        tree = {"format": FORMAT, "version": VERSION, **asdict(self)}
        text = json_text(tree).encode()
        return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def write_header(path: Path, data: bytes) -> None:
    """Write a header atomically for other processes; a power cut loses the memory too."""
    temporary = path.with_suffix(".tmp")
    temporary.touch(0o600)
    temporary.write_bytes(data)
    temporary.rename(path)


def read_header(path: Path) -> SnapshotHeader:
    """Read a header.

    Raises:
        CorruptCheckpoint: it is damaged, or not a header of ours.
        FileNotFoundError: there is none.
    """
    try:
        return parse_header(read_bounded(path, _MOST_BYTES))
    except FileNotFoundError:
        raise
    except Exception as error:  # damage may take any form
        cause = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(f"{path}: {cause[:_WORDS]}") from None


def parse_header(data: bytes) -> SnapshotHeader:
    """
    Raises:
        ValueError, TypeError, KeyError: it is not what :meth:`SnapshotHeader.to_bytes` returns.
    """
    promised, _, text = data.partition(b"\n")
    if len(data) > _MOST_BYTES or promised != hashlib.sha256(text).hexdigest().encode():
        raise ValueError("its digest differs from what is written")
    tree: Any = json.loads(text)
    json.dumps(tree, allow_nan=False)  # NaN, Infinity or 1e999 could not be written again
    if (tree["format"], tree["version"]) != (FORMAT, VERSION):
        raise ValueError(f"is of format {tree['format']} {tree['version']}")
    refuse_flagged(tree)
    return SnapshotHeader(**parse_fields(tree, counts=_NUMBERS, texts=_TEXTS))


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlace:
    """``count`` elements from ``start`` on of one flattened tensor, at byte ``offset``."""

    name: str
    start: int
    count: int
    offset: int
    dtype: torch.dtype


class SlotLayout:
    """The place of each shard in a slot; ``digest`` is equal if two slots have the same places."""

    def __init__(self, shards: Iterable[SavedShard]) -> None:
        self.places: list[SlotPlace] = []
        self.is_fp32 = True  # bytes of the whole slot
        rows = []
        offset = 0
        for shard in shards:
            count, dtype = len(shard.local), shard.local.dtype
            offset = -(-offset // dtype.itemsize) * dtype.itemsize  # torch needs aligned data
            self.places.append(
                SlotPlace(
                    name=shard.name, start=shard.start, count=count, offset=offset, dtype=dtype
                )
            )
            is_other = dtype is not torch.float32
            more = [name_of(dtype)] if is_other else []
            self.is_fp32 = self.is_fp32 and not is_other
            rows.append([shard.name, list(shard.shape), shard.start, count, *more])
            offset += count * dtype.itemsize
        self.num_bytes = -(-offset // ITEM_BYTES) * ITEM_BYTES
        self.digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def views(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The slot's part of each shard, in order."""
        data = values.view(torch.uint8)
        return [
            data[p.offset : p.offset + p.count * p.dtype.itemsize].view(p.dtype)
            for p in self.places
        ]


class Memory:
    """The slots of one rank in one incarnation, by number from 0.

    Args:
        mark: a header with the fields that never change: incarnation, rank, layout, identity.
        threads: number of threads that verify while training waits.
    """

    def __init__(
        self,
        node: NodeDir,
        layout: SlotLayout,
        *,
        mark: SnapshotHeader,
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
        self._buffers: dict[int, SharedBuffer] = {}
        self._digests: dict[int, str] = {}
        self._headers: dict[int, SnapshotHeader] = {}
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
        if slot not in self._buffers:
            buffer = SharedBuffer.make(self._path(slot, "bin"), self.layout.num_bytes)
            self._copier.adopt(buffer)
            self._buffers[slot] = buffer

    # -- taking one ------------------------------------------------------------------------

    def fill(self, slot: int, shards: Sequence[SavedShard], *, overlap: bool = True) -> None:
        """Copy the state.

        Args:
            overlap: on CUDA the copy may continue until :meth:`before_update`; the shards must
                then be parts of tensors that live on and that only updates change.
        """
        self.invalidate(slot)
        views = self.layout.views(self._buffers[slot].values)
        pairs = [(v, s.local.detach()) for v, s in zip(views, shards, strict=True) if len(v)]
        self._copier.copy(slot, [view for view, _ in pairs], [local for _, local in pairs])
        if not overlap:
            # While the sources are held: the allocator reuses memory in the order of one stream.
            self._copier.before_update()

    def before_update(self) -> None:
        """Call before the optimizer changes what is being copied. The host does not wait."""
        self._copier.before_update()

    def seal(
        self, slot: int, serial: int, metadata: CheckpointMetadata, counts: Mapping[str, int]
    ) -> None:
        """Digest the copied data, then write the header that marks it whole. In the background.

        Raises:
            OSError: the header cannot be written.
        """
        self._copier.finish(slot)
        self._digests[slot] = self._buffers[slot].digest()
        header = replace(
            self._mark,
            serial=serial,
            **metadata.metadata(),
            update_counts=counts,
            num_bytes=self.layout.num_bytes,
            digest=self._digests[slot],
        )
        self._headers[slot] = header
        write_header(self._path(slot, "json"), header.to_bytes())

    def sealed(self, slot: int) -> tuple[bytes, torch.Tensor]:
        """Header and values of a sealed slot."""
        return self._headers[slot].to_bytes(), self._buffers[slot].values

    def header_of(self, slot: int) -> SnapshotHeader:
        """The header of a slot that was sealed or adopted."""
        return self._headers[slot]

    def invalidate(self, slot: int) -> None:
        """Make a slot's snapshot unusable, for this process and later ones."""
        self._path(slot, "json").unlink(missing_ok=True)
        self._digests.pop(slot, None)

    # -- using one -------------------------------------------------------------------------

    def check(self, slot: int, *, finite: bool = False, quick: bool = False) -> None:
        """Compare every byte with what was sealed.

        Args:
            finite: also refuse NaN and Inf.
            quick: use several threads.

        Raises:
            CorruptCheckpoint: a byte differs.
        """
        buffer, is_fp32 = self._buffers[slot], self.layout.is_fp32
        threads = self._threads if quick else 1
        if self._digests.get(slot) != buffer.digest(threads=threads, finite=finite and is_fp32):
            raise CorruptCheckpoint(f"{buffer.path}: digest differs: damaged in memory")
        if finite and not is_fp32 and not all(map(is_finite, self.layout.views(buffer.values))):
            raise CorruptCheckpoint(f"{buffer.path}: holds NaN or Inf")

    def copy_out(self, slot: int, shards: Sequence[SavedShard]) -> None:
        """Copy the snapshot into the state."""
        for view, shard in zip(self.layout.views(self._buffers[slot].values), shards, strict=True):
            shard.local.copy_(view)

    def pieces(self, slot: int) -> Iterator[tuple[SlotPlace, torch.Tensor]]:
        """The slot's contents, as views."""
        return zip(self.layout.places, self.layout.views(self._buffers[slot].values), strict=True)

    def path_of(self, slot: int) -> Path:
        return self._path(slot, "bin")

    # -- across a restart ------------------------------------------------------------------

    def left_by(self, incarnation: int) -> tuple[dict[int, SnapshotHeader], list[str]]:
        """Snapshots of this rank that an earlier incarnation left here, by serial.

        Also returns a sentence for each that cannot be used, with the reason.
        """
        folder = self._node.of_rank(incarnation, self._mark.rank)
        headers: dict[int, SnapshotHeader] = {}
        refused: dict[str, None] = {}
        for path in sorted(folder.glob("slot-*.json")) if self._node.is_trusted(folder) else []:
            try:
                header = read_header(path)
            except (CorruptCheckpoint, FileNotFoundError) as error:
                refused[str(error)] = None
                continue
            why = self._why_not(header, incarnation)
            if why:
                refused[why] = None
            else:
                headers[header.serial] = header
        return headers, list(refused)

    def _why_not(self, header: SnapshotHeader, incarnation: int) -> str | None:
        mark = self._mark
        if header.world_size != mark.world_size:
            return f"they are of {header.world_size} ranks, and there are {mark.world_size} now"
        if (header.layout, header.num_bytes) != (mark.layout, self.layout.num_bytes):
            return "they are of another model or engine, or cut otherwise"
        if header.config_digest != mark.config_digest:
            return "they were taken with other settings"
        if header.data_fingerprint != mark.data_fingerprint:
            return "they were taken on other data"
        if (header.incarnation, header.rank) != (incarnation, mark.rank):
            return "they are another rank's"
        return None

    def adopt(self, incarnation: int, serial: int, slot: int) -> None:
        """Take a snapshot of an earlier incarnation into an own slot, and verify it.

        Where the earlier process may still be alive and write, only an own copy can be verified;
        where it is dead, its memory becomes the slot's. Its name stays, for a start after this.

        Raises:
            CorruptCheckpoint: it is damaged or gone.
        """
        folder = self._node.of_rank(incarnation, self._mark.rank)
        earlier = next((pair for pair in headers_in(folder) if pair[0].serial == serial), None)
        if earlier is None:
            raise CorruptCheckpoint(f"{folder}: snapshot {serial} is gone")
        header, source = earlier
        try:
            if slot in self._buffers or not self._is_taken(folder, source, slot):
                self.room(slot).copy_(SharedBuffer.open(source, header.num_bytes).values)
        except (OSError, RuntimeError) as error:
            raise CorruptCheckpoint(f"{source}: {error}") from None
        self._make_own(slot, header)

    def _is_taken(self, folder: Path, source: Path, slot: int) -> bool:
        """Make the memory of a dead process an empty slot's; False if that is not possible."""
        own = self._path(slot, "bin")
        if not self._node.is_left(folder):
            return False
        try:
            os.link(source, own, follow_symlinks=False)
            buffer = SharedBuffer.open(own, self.layout.num_bytes, is_own=True)
        except OSError:
            own.unlink(missing_ok=True)
            return False
        self._copier.adopt(buffer)
        self._buffers[slot] = buffer
        return True

    def room(self, slot: int) -> torch.Tensor:
        """A slot's values, to be overwritten; the slot counts as empty until :meth:`accept`.

        Raises:
            OSError: there is not enough memory.
        """
        self.prepare(slot)
        self.invalidate(slot)
        return self._buffers[slot].values

    def accept(self, slot: int, data: bytes, incarnation: int) -> None:
        """Verify what a peer sent into :meth:`room`; ``data`` are the bytes of its header.

        Raises:
            CorruptCheckpoint: it is not this rank's snapshot, whole.
        """
        try:
            header = parse_header(data)
        except Exception as error:  # damage may take any form
            raise CorruptCheckpoint(f"a peer's note: {str(error)[:200]}") from None
        if why := self._why_not(header, incarnation):
            raise CorruptCheckpoint(f"a peer's snapshot cannot be used: {why}")
        self._make_own(slot, header)

    def _make_own(self, slot: int, header: SnapshotHeader) -> None:
        self._digests[slot] = header.digest
        self.check(slot, quick=True)
        self._headers[slot] = replace(header, incarnation=self._mark.incarnation)
        write_header(self._path(slot, "json"), self._headers[slot].to_bytes())

    def forget_earlier(self) -> None:
        """Remove what earlier incarnations left on this node."""
        self._node.remove_before(self._mark.incarnation)

    def close(self, *, forget: bool) -> None:
        """Close; ``forget``: remove the snapshots, which otherwise wait for the next start."""
        self._copier.close()
        if forget:
            self._node.remove(self._folder)
            self._node.leave()

    def _path(self, slot: int, suffix: str) -> Path:
        return self._folder / f"slot-{slot}.{suffix}"


def headers_on(node: NodeDir) -> list[SnapshotHeader]:
    """Headers of all whole snapshots on this node, of any rank and incarnation."""
    return [header for folder in node.of_ranks() for header, _ in headers_in(folder)]


def headers_in(folder: Path) -> Iterator[tuple[SnapshotHeader, Path]]:
    """Valid headers, and the paths of their data."""
    for path in sorted(folder.glob("slot-*.json")):
        with contextlib.suppress(CorruptCheckpoint, FileNotFoundError):
            yield read_header(path), path.with_suffix(".bin")


def empty_header(
    layout: SlotLayout, *, incarnation: int, rank: int, world_size: int, identity: Identity
) -> SnapshotHeader:
    """The fields that all headers of one rank and incarnation have in common."""
    nothing = CheckpointMetadata(step=0, cursor=0, train_state={}, metrics_bytes=0, journal_lines=0)
    return SnapshotHeader(
        **nothing.metadata(),
        incarnation=incarnation,
        rank=rank,
        world_size=world_size,
        layout=layout.digest,
        config_digest=identity.config_digest,
        data_fingerprint=identity.data_fingerprint,
        num_bytes=layout.num_bytes,
    )


class _Copier:
    """Copies on the CPU, synchronously."""

    def adopt(self, buffer: SharedBuffer) -> None:
        """Register a buffer as a target of copies."""

    def copy(self, slot: int, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        torch._foreach_copy_(views, sources)

    def before_update(self) -> None:
        """After this call the sources may change."""

    def finish(self, slot: int) -> None:
        """Wait until the slot is filled. Call it in the background thread."""

    def close(self) -> None:
        """End; nothing more is copied."""


class _CudaCopier(_Copier):
    """Copies on a CUDA stream of its own, during the next forward and backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: dict[int, torch.cuda.Event] = {}
        self._last: torch.cuda.Event | None = None
        self._pinned: list[SharedBuffer] = []

    def adopt(self, buffer: SharedBuffer) -> None:
        try:
            with torch.cuda.device(self._device):
                buffer.pin()
        except RuntimeError as error:
            buffer.forget_refusal(self._device)
            # Without page-locked memory every copy goes through a small pinned buffer, and waits.
            _log.warning(
                "%s: %s cannot be page-locked (%s): training waits while a snapshot is copied. "
                "Raise the limit of locked memory (ulimit -l), or set checkpoint.memory_every=0",
                buffer.path,
                format_bytes(buffer.num_bytes),
                str(error).partition("\n")[0],
            )
        else:
            self._pinned.append(buffer)

    def copy(self, slot: int, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(views, sources, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
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
        for buffer in self._pinned:
            buffer.unpin()


_BLOCK_BYTES = 1 << 23  # bytes digested at once
_TOUCH_BYTES = 1 << 24  # bytes mapped at once: madvise holds the interpreter's lock
_MADV_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14, which mmap does not name

# XXH3 detects accidental damage, which is enough for this user's own memory, and is three times as
# fast as the SHA-256 used on disk.
_KIND = "xxh3"


class SharedBuffer:
    """``values``: FP32, 1-D, on the CPU; ``num_bytes`` of them in the mapped file at ``path``.

    It lies in shared memory and outlives its process. All pages are reserved when it is made: a
    sparse file would give SIGBUS, not an error, when the machine has no page left.

    The owner decides what the bytes mean: elements of other types are stored in it as well.
    """

    def __init__(self, path: Path, mapped: mmap.mmap, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        count = num_bytes // ITEM_BYTES
        self.values = torch.frombuffer(mapped, dtype=torch.float32)[:count]
        self._mapped = mapped
        self._is_pinned = False

    @classmethod
    def make(cls, path: Path, num_bytes: int) -> SharedBuffer:
        """Make a new file with all its pages.

        Raises:
            OSError: no room, or the name is taken.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        size = max(num_bytes, mmap.PAGESIZE)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, f"{error.strerror} ({size:,} bytes)", str(path)) from None
        finally:
            os.close(descriptor)
        _touch(mapped)
        return cls(path, mapped, num_bytes)

    @classmethod
    def open(cls, path: Path, num_bytes: int, *, is_own: bool = False) -> SharedBuffer:
        """Open the file of an earlier process, to read only.

        Args:
            is_own: to write as well; nobody else does.

        Raises:
            OSError: the file is missing, or of another size.
        """
        size = max(num_bytes, mmap.PAGESIZE)
        with open_regular(path, writable=is_own) as file:
            if os.fstat(file.fileno()).st_size != size:
                raise OSError(f"{path}: is not of {size:,} bytes")
            # Copy-on-write: torch accepts only writable memory.
            access = mmap.ACCESS_WRITE if is_own else mmap.ACCESS_COPY
            mapped = mmap.mmap(file.fileno(), size, access=access)
        if is_own:
            _touch(mapped)
        return cls(path, mapped, num_bytes)

    def pin(self) -> None:
        """Page-lock the memory, so that a GPU copies into it without the CPU.

        Raises:
            RuntimeError: the driver refuses.
        """
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        size = len(self._mapped)
        torch.cuda.check_error(int(runtime.cudaHostRegister(self.values.data_ptr(), size, 0)))
        self._is_pinned = True

    def forget_refusal(self, device: torch.device) -> None:
        """Clear the error of a refused :meth:`pin`. CUDA keeps each thread's last error, and would
        report it for the next kernel."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)

    def unpin(self) -> None:
        """Undo :meth:`pin`; call it before the memory is freed."""
        if self._is_pinned:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self.values.data_ptr())
            self._is_pinned = False

    def digest(self, *, threads: int = 1, finite: bool = False) -> str:
        """``xxh3:hex``, a digest of the blocks' digests, so that several threads can compute it.

        Args:
            finite: also refuse NaN and Inf.

        Raises:
            CorruptCheckpoint: a value is not finite.
        """

        def block_digest(block: np.ndarray) -> bytes:
            if finite and not np.isfinite(block).all():
                raise CorruptCheckpoint(f"{self.path}: holds NaN or Inf")
            return xxh3_128(block.data.cast("B")).digest()

        array, size = self.values.numpy(), _BLOCK_BYTES // ITEM_BYTES
        blocks = [array[start : start + size] for start in range(0, len(array), size)]
        if threads == 1:
            parts = b"".join(map(block_digest, blocks))
        else:
            with ThreadPoolExecutor(max_workers=threads) as pool:
                parts = b"".join(pool.map(block_digest, blocks))
        return f"{_KIND}:{xxh3_128(parts).hexdigest()}"


def _touch(mapped: mmap.mmap) -> None:
    """Map every page now; otherwise the first snapshot would map them, page by page."""
    with contextlib.suppress(
        OSError
    ):  # has an effect only if the system allows huge pages for files
        mapped.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, len(mapped), _TOUCH_BYTES):
            length = min(_TOUCH_BYTES, len(mapped) - start)
            mapped.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError:
        np.frombuffer(mapped, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
