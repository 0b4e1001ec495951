"""A copier of snapshots that is as late as CUDA's may be, on the CPU.

``runner.checkpoint.memory.snapshot`` copies on a CUDA stream of its own while training goes on.
Here the copy is made when ``before_update`` asks for it, else :data:`LATEST` seconds after the
background thread began to wait, which is longer than a drill's steps take: whoever changes the
state without asking tears the snapshot. A source whose storage nobody holds any more is copied as
:data:`GARBAGE`, because CUDA's allocator would have given its memory to somebody else.

To switch it on: set ``HOLDFAST_LATE_COPIES=1`` in the environment of a program that is forked from
a warm process (``tests/warm.py``), of the runner as of a script with ``Guard`` or ``Ring``; or call
:func:`install` in the process itself, before the run is opened. Nothing else has to change: a run
with it must end as one without, bit for bit (P16).
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from runner.checkpoint.memory import snapshot

LATEST = 0.25
GARBAGE = 77.0  # finite: a proof of the snapshot would see NaN


class _Source:
    """One tensor, without holding it: where it lies, and a weak reference to its storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._weak, self._size = storage._weak_ref(), storage.nbytes()
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())

    def copy_to(self, view: torch.Tensor) -> None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        if storage is None or storage.nbytes() < self._size:  # freed, or emptied by FSDP2
            view.fill_(GARBAGE)
        else:
            view.copy_(torch.empty(0, dtype=view.dtype).set_(storage, *self._place))

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self._weak)


class LateCopier(snapshot._Copier):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[int, list[tuple[torch.Tensor, _Source]]] = {}
        self._copied = threading.Event()

    def copy(self, slot: int, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with self._lock:
            self._pending[slot] = list(zip(views, map(_Source, sources), strict=True))
            self._copied.clear()

    def before_update(self) -> None:
        with self._lock:
            for slot in list(self._pending):
                self._copy_now(slot)
        self._copied.set()

    def finish(self, slot: int) -> None:
        if slot in self._pending:
            self._copied.wait(LATEST)
        with self._lock:
            self._copy_now(slot)

    def _copy_now(self, slot: int) -> None:
        with torch.no_grad():
            for view, source in self._pending.pop(slot, ()):
                source.copy_to(view)


def install() -> Any:
    """Have this process copy late; returns what :func:`remove` takes."""
    earlier, snapshot._Copier = snapshot._Copier, LateCopier  # type: ignore[misc]
    return earlier


def remove(earlier: Any) -> None:
    """Undo :func:`install`."""
    snapshot._Copier = earlier  # type: ignore[misc]
