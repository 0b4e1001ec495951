"""What one update did to each tensor: norms of gradients and weights, size of the update, g^2 / v.

Sums over this rank's shards, on its device, such that their sum over all ranks is that of the
whole tensors. Nothing waits, and nothing of the state is changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runner.engine.protocol import Shard

KINDS = ("grad", "weight", "moved", "held", "ratio", "count")
# Of each shard, to tell how far it moved: a copy of all weights would not fit everywhere.
_SAMPLED = 4096
_CHUNK = 1 << 22  # elements that one norm on a CPU takes in


class Engine(Protocol):
    """The part of :class:`runner.engine.protocol.Engine` that is needed."""

    @property
    def device(self) -> torch.device: ...
    @property
    def replica(self) -> tuple[int, int]: ...
    def shards(self) -> list[Shard]: ...
    def gradients(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is kept of a step until its update is made; places as in ``names``."""

    squares: Tensor
    gradients: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


class LayerSums:
    """Measures one step.

    Args:
        names: of the trained parameters, alike on all ranks; the order of the sums.
    """

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = tuple(names)
        # Views of memory that stays where it is; to make them anew costs more than all the sums.
        self._held: dict[str, dict[str, Tensor]] = {}

    @property
    def size(self) -> int:
        """Numbers that :meth:`after` gives."""
        return len(KINDS) * len(self._names)

    def before(self) -> Before:
        """Behind the backward pass, before the update."""
        gradients = self._engine.gradients()
        shards = self._shards("param")
        own = [_flat(gradients.get(name), shards[name]) for name in self._names]
        return Before(
            squares=self._squares(own),
            gradients=tuple(_sampled(grad).clone() for grad in own),
            weights=tuple(_sampled(shards[name]).clone() for name in self._names),
        )

    def after(self, before: Before) -> Tensor:
        """Behind the update: FP64, each of :data:`KINDS` of all ``names`` in turn.

        Squared norms of gradients (of the summed loss) and of weights; then of up to some
        thousand elements a shard: squares of what they moved, and of what they are; the sum of
        g^2 / v, and how many of these there are.
        """
        weights, seconds = self._shards("param"), self._shards("exp_avg_sq")
        own = [weights[name] for name in self._names]
        sampled = [_sampled(weight) for weight in own]
        moved = torch._foreach_sub(sampled, list(before.weights)) if sampled else []
        ratios, counts = [], []
        for name, grad in zip(self._names, before.gradients, strict=True):
            ratio = _ratio(grad, _sampled(seconds[name]) if name in seconds else None)
            ratios.append(ratio.sum(dtype=torch.float64))
            counts.append((ratio > 0).sum(dtype=torch.float64))
        told = [before.squares, self._squares(own), self._squares(moved), self._squares(sampled)]
        told += [self._stacked(ratios), self._stacked(counts)]
        # Copies of a shard tell the same: each gives its part.
        return torch.cat(told) / self._engine.replica[1]

    def _shards(self, kind: str) -> dict[str, Tensor]:
        if not self._held:
            self._held = {"param": {}, "exp_avg_sq": {}}
            for shard in self._engine.shards():
                of_kind, _, name = shard.name.partition("/")
                if of_kind in self._held:
                    self._held[of_kind][name] = shard.local.detach()
        return self._held[kind]

    def _squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Of each tensor the sum of squares, FP64."""
        if not tensors:
            return torch.zeros(0, dtype=torch.float64, device=self._engine.device)
        if not any(one.numel() > _CHUNK and not one.is_cuda for one in tensors):
            return self._stacked(torch._foreach_norm(list(tensors), 2)).square()
        # One long FP32 sum on a CPU stops growing.
        squares = [
            torch.stack(torch._foreach_norm(list(torch.split(one, _CHUNK)), 2)).double().square()
            if one.numel()
            else torch.zeros(1, dtype=torch.float64)
            for one in tensors
        ]
        return self._stacked([one.sum() for one in squares])

    def _stacked(self, numbers: Sequence[Tensor]) -> Tensor:
        if not numbers:
            return torch.zeros(0, dtype=torch.float64, device=self._engine.device)
        return torch.stack(list(numbers)).to(self._engine.device).double()


def _ratio(grad: Tensor, second: Tensor | None) -> Tensor:
    """g^2 / v where v is not 0; else 0. Empty where one of them is not known."""
    if second is None or grad.numel() != second.numel():
        return grad.new_zeros(0)
    return torch.where(second > 0, grad.square() / second, 0.0)


def _flat(gradient: Tensor | None, shard: Tensor) -> Tensor:
    return shard.new_empty(0) if gradient is None else gradient.detach().reshape(-1)


def _sampled(flat: Tensor) -> Tensor:
    """Evenly spaced elements; an odd distance, so that they are not all of one column."""
    return flat[:: max(1, flat.numel() // _SAMPLED) | 1]
