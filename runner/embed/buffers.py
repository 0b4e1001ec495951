"""A model's buffers: a discard undoes what forward passes changed (running statistics)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_COMPARED = 3  # first steps, in which every buffer is compared with its copy


@dataclass(slots=True)
class _BufferCopy:
    owner: nn.Module
    key: str
    copy: torch.Tensor
    version: int
    is_changing: bool = False
    older: torch.Tensor | None = None  # what ``copy`` was before; None: the same

    @property
    def was_written(self) -> bool:
        """Whether torch recorded an in-place change. It does not record batch norm's kernels."""
        return self.is_changing or self.live._version != self.version

    @property
    def live(self) -> torch.Tensor:
        buffer = self.owner._buffers[self.key]
        assert buffer is not None
        return buffer


class Buffers:
    """Copies of the buffers from before a batch; only changed buffers are copied again.

    Args:
        named: names and modules.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self._kept: dict[str, _BufferCopy] = {}
        self._num_compared = 0
        seen: set[int] = set()
        for prefix, module in named:
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = f"{prefix}.{key}" if prefix else key
                    copy = buffer.detach().clone()
                    is_changing = isinstance(module, _NormBase) and module.track_running_stats
                    self._kept[name] = _BufferCopy(module, key, copy, buffer._version, is_changing)

    def capture(self, *, keep_older: bool = False) -> None:
        """Copy the buffers, for :meth:`restore`.

        Args:
            keep_older: the copies from before can still be restored, by :meth:`restore_older`.
        """
        compare = self._num_compared < _COMPARED
        self._num_compared += 1
        for kept in self._kept.values():
            live = kept.live
            if kept.was_written or (compare and not torch.equal(kept.copy, live)):
                kept.is_changing = True
                if keep_older:
                    kept.older = kept.copy.clone() if kept.older is None else kept.older
                    kept.older.copy_(kept.copy)
                kept.copy.copy_(live.detach())
                kept.version = live._version

    def restore_older(self) -> None:
        """Undo what was written since the :meth:`capture` before the last."""
        for kept in self._kept.values():
            if kept.older is not None:
                kept.copy.copy_(kept.older)
        self.restore()

    def restore(self) -> None:
        """Undo changes since :meth:`capture`."""
        for kept in self._kept.values():
            live = kept.live
            if kept.was_written:
                kept.is_changing = True
                with torch.no_grad():
                    live.copy_(kept.copy)
                kept.version = live._version

    def changing(self) -> list[str]:
        """Names of buffers that a forward pass or a checkpoint has changed."""
        return [name for name, kept in self._kept.items() if kept.was_written]

    def mark(self, name: str) -> None:
        """Treat a buffer as changing, because a checkpoint or another rank has it changed."""
        self._kept[name].is_changing = True

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def live(self, name: str) -> torch.Tensor:
        """The buffer itself."""
        return self._kept[name].live
