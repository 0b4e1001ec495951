"""A model's buffers: what a forward pass changes (running statistics) is put back at a discard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_COMPARED = 3  # steps after which every buffer is compared with what it was


@dataclass(slots=True)
class _Kept:
    owner: nn.Module
    key: str
    copy: torch.Tensor
    version: int
    is_changing: bool = False

    @property
    def was_written(self) -> bool:
        """Whether torch has noted a change in place. Batch norm's kernels go unnoticed."""
        return self.is_changing or self.live._version != self.version

    @property
    def live(self) -> torch.Tensor:
        found = self.owner._buffers[self.key]
        assert found is not None
        return found


class Buffers:
    """Copies of the buffers as they were before a batch; only those that change are copied again.

    Args:
        named: modules with their names.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self._kept: dict[str, _Kept] = {}
        self._num_compared = 0
        seen: set[int] = set()
        for prefix, module in named:
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = f"{prefix}.{key}" if prefix else key
                    copy = buffer.detach().clone()
                    changes = isinstance(module, _NormBase) and module.track_running_stats
                    self._kept[name] = _Kept(module, key, copy, buffer._version, changes)

    def remember(self) -> None:
        """As they are now is what :meth:`put_back` gives."""
        compare = self._num_compared < _COMPARED
        self._num_compared += 1
        for kept in self._kept.values():
            live = kept.live
            if kept.was_written or (compare and not torch.equal(kept.copy, live)):
                kept.is_changing = True
                kept.copy.copy_(live.detach())
                kept.version = live._version

    def put_back(self) -> None:
        """Undo what was written since :meth:`remember`."""
        for kept in self._kept.values():
            live = kept.live
            if kept.was_written:
                kept.is_changing = True
                with torch.no_grad():
                    live.copy_(kept.copy)
                kept.version = live._version

    def changing(self) -> list[str]:
        """Names of those that a forward pass has written to, or a checkpoint."""
        return [name for name, kept in self._kept.items() if kept.was_written]

    def mark(self, name: str) -> None:
        """It changes: a checkpoint, or another rank, says so."""
        self._kept[name].is_changing = True

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def live(self, name: str) -> torch.Tensor:
        """The buffer itself."""
        return self._kept[name].live
