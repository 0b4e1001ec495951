"""What one rank does to its pretended device: bytes, collectives, order among streams.

Order is known by vector clocks, as torch's CUDA sanitizer does it: each stream counts its
operations; an event carries what its stream knew when it was recorded, and whoever waits for it
knows that too. Two operations on one storage, one of them a write, that no clock orders are a race.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended import device
from tests.pretended.device import Told

HOST = -1
GIB = 1 << 30
_ALLOCATED = 512  # bytes of CUDA's caching allocator: sizes are rounded up to it
# They touch no memory, or none that has a value yet.
_VIEWS = frozenset(
    """detach view alias as_strided t transpose slice select _unsafe_view unsqueeze expand split
    split_with_sizes permute empty empty_like new_empty empty_strided squeeze chunk
    _reshape_alias resize_ set_""".split()  # noqa: SIM905
)
_COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_"})


class Clock(dict[int, int]):
    """How many operations of each stream are known to be over."""

    def merge(self, other: dict[int, int]) -> None:
        for stream, count in other.items():
            self[stream] = max(count, self.get(stream, 0))


@dataclass(frozen=True)
class Touch:
    """One operation on a storage."""

    stream: int
    count: int
    what: str
    where: str


def _files() -> Iterator[tuple[str, int]]:
    """File and line of each frame, from the innermost; ``traceback`` takes far longer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def where() -> str:
    """The line of the project that is being run, or of FSDP2's."""
    in_torch = ""
    for file, line in _files():
        if "/runner/" in file:
            return f"{file.rpartition('/runner/')[2]}:{line}"
        if "/_fully_shard/" in file and not in_torch:
            in_torch = f"{file.rpartition('/')[2]}:{line}"
    return in_torch or "autograd"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [_local(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Trace(TorchDispatchMode):
    """Sees everything that is dispatched while it is entered.

    Args:
        order: look for races as well, which takes as long again.
    """

    def __init__(self, *, order: bool) -> None:
        super().__init__()
        self._order = order
        self.num_bytes = self.peak = 0
        self.peak_at = ""
        self.phase = ""
        self.collectives: Counter[str] = Counter()
        self.collective_bytes: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()  # between host and device
        self.waits: list[str] = []  # of the host
        self.spins: list[str] = []  # waits that keep a core busy; since the beginning
        self.races: list[str] = []
        self._live: dict[int, int] = {}
        self._on_host: set[int] = set()  # what is freed there may come again as another
        self._clocks: defaultdict[int, Clock] = defaultdict(Clock)
        self._events: dict[int, Clock] = {}
        self._written: dict[int, Touch] = {}
        self._read: defaultdict[int, dict[int, Touch]] = defaultdict(dict)
        device.listen(self._told)
        device.listen_for_spins(lambda: self.spins.append(where()))

    def __enter__(self) -> Trace:
        super().__enter__()
        self._resize = torch.UntypedStorage.resize_
        trace, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if storage._cdata in trace._live:
                trace._hold(storage._cdata, int(size), "resize")
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def begin(self, phase: str) -> None:
        """Count from here on."""
        self.phase, self.peak = phase, self.num_bytes
        for counter in (self.collectives, self.collective_bytes, self.copies):
            counter.clear()
        self.waits.clear()

    # -- streams ---------------------------------------------------------------------------

    def _told(self, what: int, stream: int, event: int) -> None:
        if what == Told.record:
            self._events[event] = Clock(self._clocks[stream])
        elif what == Told.block:
            self._clocks[stream].merge(self._events.get(event, {}))
        elif what == Told.sync_event:
            self.host_waits("an event", self._events.get(event, Clock()))
        elif what == Told.sync_stream:
            self.host_waits("a stream", self._clocks[stream])
        elif what == Told.sync_device:
            for clock in list(self._clocks.values()):
                self.host_waits("the device", clock)

    def host_waits(self, why: str, known: Clock) -> None:
        self.waits.append(f"{why} at {where()}")
        self._clocks[HOST].merge(known)

    def _is_over(self, touch: Touch, stream: int) -> bool:
        return touch.stream == stream or self._clocks[stream].get(touch.stream, 0) >= touch.count

    def _touch(self, key: int, stream: int, what: str, *, writes: bool) -> None:
        now = Touch(stream, self._clocks[stream].get(stream, 0), what, where())
        before = [self._written[key]] if key in self._written else []
        if writes:
            before += self._read[key].values()
        for touch in before:
            if not self._is_over(touch, stream):
                self.races.append(
                    f"{what} on stream {stream} at {now.where} overtakes {touch.what} on stream "
                    f"{touch.stream} at {touch.where}"
                )
        if writes:
            self._written[key], self._read[key] = now, {}
        else:
            self._read[key][stream] = now

    def _host_reads(self, tensor: torch.Tensor) -> None:
        written = self._written.get(_key(tensor))
        if written is not None and not self._is_over(written, HOST):
            self.races.append(
                f"the host reads at {where()} before {written.what} on stream {written.stream} at "
                f"{written.where} is over"
            )

    # -- memory ----------------------------------------------------------------------------

    def _hold(self, key: int, num_bytes: int, what: str) -> None:
        size = -(-num_bytes // _ALLOCATED) * _ALLOCATED
        self.num_bytes += size - self._live.get(key, 0)
        self._live[key] = size
        if self.num_bytes > self.peak:
            self.peak, self.peak_at = self.num_bytes, f"{self.phase}: {what} at {where()}"

    def _gone(self, key: int) -> None:
        self.num_bytes -= self._live.pop(key, 0)
        self._written.pop(key, None)
        self._read.pop(key, None)
        self._on_host.discard(key)

    def _note(self, tensor: torch.Tensor, what: str) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda":
            if storage._cdata not in self._on_host:
                self._on_host.add(storage._cdata)
                weakref.finalize(storage, self._gone, storage._cdata)
            return
        if storage._cdata not in self._live:
            if any("_sharding_prop" in file for file, _ in _files()):
                return  # DTensor asks what shape would come out; nothing is made
            weakref.finalize(storage, self._gone, storage._cdata)
        self._hold(storage._cdata, storage.nbytes(), f"{what} {tuple(tensor.shape)}")

    # -- operations ------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        space, _, name = func._schema.name.partition("::")
        stream = device.current_stream()
        if name == "_local_scalar_dense":  # the host looks at a number
            if args[0].device.type == "cuda":
                self.host_waits("a number", self._clocks[stream])
            else:
                self._host_reads(args[0])
            return 1.0
        # The fused update has no kernel that makes shapes only.
        out = None if "_fused_adamw_" in name else func(*args, **(kwargs or {}))
        given, made = _tensors((args, kwargs)), _tensors(out)
        if space == "c10d":
            self.collectives[name] += 1
            self.collective_bytes[name] += max((one.nbytes for one in given), default=0)
        kinds = {one.device.type for one in given + made}
        if name in _COPIES and len(kinds) > 1:
            self.copies[f"{name} at {where()}"] += 1
        if self._order and "cuda" in kinds and name not in _VIEWS:
            written = set(_written(func, args, space))
            self._run(name, stream, given, made, written)
        elif self._order and "cuda" not in kinds:
            for one in given:
                self._host_reads(one)
        for one in given + made:
            self._note(one, name)
        return out

    def _run(
        self,
        name: str,
        stream: int,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        written: set[int],
    ) -> None:
        clock = self._clocks[stream]
        clock.merge(self._clocks[HOST])  # it is launched after what the host knows
        clock[stream] = clock.get(stream, 0) + 1
        inputs = {_key(one) for one in given}
        for one in given:
            self._touch(_key(one), stream, name, writes=_key(one) in written)
        for one in made:
            if _key(one) not in inputs:
                self._touch(_key(one), stream, name, writes=True)


def _written(func: Any, args: tuple[Any, ...], space: str) -> Iterator[int]:
    """The storages that an operation writes to."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from map(_key, _tensors(value))
    if space == "c10d" and args:
        yield from map(_key, _tensors(args[0]))
