"""A model's buffers: a discard undoes what forward passes changed (running statistics)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from runner.engine.buffers import BufferCopy, has_running_statistics

_COMPARED = 3  # first steps, in which every buffer is compared with its copy


@dataclass(slots=True)
class _GuardedCopy(BufferCopy):
    is_changing: bool = False
    older: torch.Tensor | None = None  # what ``copy`` was before; None: the same
    original: torch.Tensor | None = None  # from before its first change, and so in no checkpoint

    @property
    def was_written(self) -> bool:
        """Whether it is changing, was replaced, or was changed in place."""
        return self.is_changing or self.has_new_version

    def note_change(self) -> None:
        """It changes from now on, and ``copy`` is from before the first change."""
        if not self.is_changing:
            self.is_changing, self.original = True, self.copy.clone()


class Buffers:
    """Copies of the buffers from before a batch; only changed buffers are copied again.

    Args:
        named: names and modules.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self._kept: dict[str, _GuardedCopy] = {}
        self._num_compared = 0
        self._modules = list(named)
        # Registered as None, to be made by a forward pass: name, module, key.
        self._empty: dict[str, tuple[nn.Module, str]] = {}
        self._born: dict[str, tuple[nn.Module, str, bool]] = {}  # whether it was registered
        self._shared: set[tuple[int, str]] = set()  # another name of a buffer that is kept
        self._sizes = [len(module._buffers) for _, module in named]
        seen: set[int] = set()
        for prefix, module in named:
            for key, buffer in module._buffers.items():
                name = _joined(prefix, key)
                if buffer is None:
                    self._empty[name] = (module, key)
                elif id(buffer) in seen:
                    self._shared.add((id(module), key))
                else:
                    seen.add(id(buffer))
                    self._kept[name] = _copy_of(module, key, buffer)
                    self._kept[name].is_changing = has_running_statistics(module)

    def _unknown(self) -> list[tuple[str, nn.Module, str]]:
        """Buffers that were created since the last check: name, module, key."""
        unknown = [
            (name, module, key)
            for name, (module, key) in self._empty.items()
            if module._buffers.get(key) is not None
        ]
        sizes = [len(module._buffers) for _, module in self._modules]
        if sizes != self._sizes:
            unknown += [
                (_joined(prefix, key), module, key)
                for prefix, module in self._modules
                for key, buffer in module._buffers.items()
                if buffer is not None
                and _joined(prefix, key) not in {*self._kept, *self._empty}
                and (id(module), key) not in self._shared
            ]
        return unknown

    def _adopt(self) -> None:
        """Save what a forward pass has created, because it may depend on data."""
        unknown = self._unknown()
        if not unknown:
            return
        for name, module, key in unknown:
            buffer = module._buffers[key]
            assert buffer is not None
            self._born[name] = (module, key, self._empty.pop(name, None) is not None)
            self._kept[name] = _copy_of(module, key, buffer)
            self._kept[name].is_changing = True
        self._sizes = [len(module._buffers) for _, module in self._modules]

    def _forget(self, name: str, module: nn.Module, key: str, *, was_registered: bool) -> None:
        """Remove a buffer, as if it had not been created."""
        self._kept.pop(name, None)
        if was_registered:
            module._buffers[key] = None
            self._empty[name] = (module, key)
        else:
            module._buffers.pop(key, None)

    def give(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Create a buffer that a checkpoint holds and no forward pass has created here yet."""
        if name in self._empty:
            module, key = self._empty[name]
            near = [*module.parameters(), *module.buffers()]
            device = near[0].device if near else None
            module._buffers[key] = torch.zeros(tuple(shape), dtype=dtype, device=device)
            self._adopt()

    def drop_all_but(self, names: Collection[str]) -> None:
        """Remove buffers that forward passes have created and a checkpoint does not hold."""
        for name, (module, key, was_registered) in list(self._born.items()):
            if name not in names:
                del self._born[name]
                self._forget(name, module, key, was_registered=was_registered)
        self._sizes = [len(module._buffers) for _, module in self._modules]

    def capture(self, *, keep_older: bool = False) -> None:
        """Copy the buffers, for :meth:`restore`.

        Args:
            keep_older: the copies from before can still be restored, by :meth:`restore_older`.

        Raises:
            ConfigError: a buffer has another shape than before.
        """
        self._adopt()
        compare = self._num_compared < _COMPARED
        self._num_compared += 1
        for kept in self._kept.values():
            live = kept.live
            if kept.was_written or (compare and not torch.equal(kept.copy, live)):
                kept.note_change()
                if keep_older:
                    kept.older = kept.copy.clone() if kept.older is None else kept.older
                    kept.older.copy_(kept.copy)
                kept.copy.copy_(live.detach())
                kept.remember()

    def restore_older(self) -> None:
        """Undo what was written since the :meth:`capture` before the last."""
        for kept in self._kept.values():
            if kept.older is not None:
                kept.copy.copy_(kept.older)
        self.restore()

    def restore(self) -> None:
        """Undo changes since :meth:`capture`."""
        for name, module, key in self._unknown():
            self._forget(name, module, key, was_registered=name in self._empty)
        for kept in self._kept.values():
            if kept.was_written:
                kept.note_change()
                with torch.no_grad():
                    kept.live.copy_(kept.copy)
                kept.remember()

    def changing(self) -> list[str]:
        """Names of buffers that a forward pass or a checkpoint has changed."""
        self._adopt()
        return [name for name, kept in self._kept.items() if kept.was_written]

    def mark(self, name: str) -> None:
        """Treat a buffer as changing, because a checkpoint or another rank has it changed."""
        self._kept[name].note_change()

    def put_back_original(self, saved: Collection[str]) -> None:
        """Reset buffers that the checkpoint lacks: it is from before their first change.

        Args:
            saved: names of the buffers that the checkpoint holds.
        """
        for name, kept in self._kept.items():
            if name not in saved and kept.original is not None:
                with torch.no_grad():
                    kept.live.copy_(kept.original)

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def live(self, name: str) -> torch.Tensor:
        """The buffer itself."""
        return self._kept[name].live


def _copy_of(module: nn.Module, key: str, buffer: torch.Tensor) -> _GuardedCopy:
    return _GuardedCopy(module, key, buffer.detach().clone(), buffer, buffer._version)


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
