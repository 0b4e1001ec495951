"""Measures one update of each tensor: gradient and weight norms, size of the update, g^2 / v.

The sums cover this rank's shards, on its device; added over all ranks they cover the whole tensors.
Nothing waits for the device, and the state is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.engine.protocol import Engine

KINDS = ("grad", "weight", "moved", "held", "ratio", "count")
# Elements of each shard, to tell how far it moved: a copy of all weights would not fit everywhere.
_SAMPLED = 512
_CHUNK = 1 << 22  # elements that one norm on a CPU takes in


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What is kept of a step until its update is made.

    ``squares`` are the squared norms of gradients, FP64 [names]; ``weights`` and ``gradients`` a
    sample of each shard, FP32 [names, ``_SAMPLED``], padded with zeros; ``gradients`` None where
    moments are not measured.
    """

    squares: Tensor
    weights: Tensor
    gradients: Tensor | None


class LayerSums:
    """Measures one step.

    The samples of all shards lie in one matrix, a row each, so that the arithmetic takes a handful
    of calls however many tensors there are: on small tensors a call costs more than what it does.

    Args:
        names: trained parameters, the same on all ranks; sets the order of the sums.
    """

    def __init__(self, engine: Engine, names: Sequence[str]) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._weights: list[Tensor] = []  # this rank's shards, 1-D
        self._steps: list[int] = []  # between the sampled elements of each
        # Views of memory that does not move; making them anew would cost more than all the sums.
        self._sampled_weights: list[Tensor] = []
        self._sampled_seconds: list[Tensor] = []
        # By kind: FP32 [names, _SAMPLED], the rest of a row zero; and the filled part of each row.
        self._matrices: dict[str, tuple[Tensor, list[Tensor]]] = {}

    @property
    def size(self) -> int:
        """Length of the result of :meth:`after`."""
        return len(KINDS) * len(self._names)

    @torch.no_grad()
    def before(self, *, has_moments: bool) -> Before:
        """Measure behind the backward pass, before the update.

        Args:
            has_moments: measure g^2 / v as well.
        """
        self._open()
        gradients = self._engine.gradients()
        own = [
            gradients[name].reshape(-1) if name in gradients else weight.new_empty(0)
            for name, weight in zip(self._names, self._weights, strict=True)
        ]
        return Before(
            squares=self._squares(own),
            weights=self._filled("before", self._sampled_weights),
            gradients=self._filled("gradients", self._sampled(own)) if has_moments else None,
        )

    @torch.no_grad()
    def after(self, before: Before) -> Tensor:
        """Measure behind the update: FP64, each of :data:`KINDS` of all ``names`` in turn.

        Squared norms of gradients (of the summed loss) and of weights; then of up to
        ``_SAMPLED`` elements a shard: squares of what they moved, and of what they are; the sum of
        g^2 / v, and how many of these there are: 0 where moments are not measured.
        """
        now = self._filled("now", self._sampled_weights)
        sampled = [now - before.weights, now]
        sums = [torch.linalg.vector_norm(sample, dim=1).double().square_() for sample in sampled]
        if before.gradients is None:
            sums += [torch.zeros_like(sums[0])] * 2
        else:
            seconds = self._filled("seconds", self._sampled_seconds)
            ratios = torch.where(seconds > 0, before.gradients.square() / seconds, 0.0)
            sums += [values.sum(dim=1, dtype=torch.float64) for values in (ratios, ratios > 0)]
        sums = [column.to(self._engine.device) for column in sums]
        # Copies of a shard have equal sums: each gives its part.
        squares = self._squares(self._weights)
        return torch.cat([before.squares, squares, *sums]) / self._engine.replica[1]

    def _open(self) -> None:
        if self._weights:
            return
        held: dict[str, dict[str, Tensor]] = {"param": {}, "exp_avg_sq": {}}
        for shard in self._engine.shards():
            kind, _, name = shard.name.partition("/")
            if kind in held:
                held[kind][name] = shard.local.detach()
        self._weights = [held["param"][name] for name in self._names]
        self._steps = [_distance(weight.numel()) for weight in self._weights]
        self._sampled_weights = self._sampled(self._weights)
        # Of some there is no second moment, or it is kept in another form.
        seconds = held["exp_avg_sq"]
        self._sampled_seconds = self._sampled(
            [_like(seconds.get(n), w) for n, w in zip(self._names, self._weights, strict=True)]
        )

    def _sampled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Evenly spaced elements of each."""
        return [
            tensor[::step] if step > 1 else tensor
            for tensor, step in zip(tensors, self._steps, strict=True)
        ]

    def _filled(self, kind: str, few: Sequence[Tensor]) -> Tensor:
        """The matrix of this kind, which is used again at each look: to make it takes longer."""
        if kind not in self._matrices:
            device = self._weights[0].device if self._weights else None
            matrix = torch.zeros(len(few), _SAMPLED, device=device)
            parts = zip(matrix.unbind(), self._sampled_weights, strict=True)
            self._matrices[kind] = matrix, [row[: part.numel()] for row, part in parts]
        matrix, rows = self._matrices[kind]
        both = [(row, part) for row, part in zip(rows, few, strict=True) if part.numel()]
        if len(both) < len(rows):
            matrix.zero_()  # a gradient that was there at another look may be missing
        if both:
            torch._foreach_copy_([row for row, _ in both], [part for _, part in both])
        return matrix

    def _squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Sum of squares of each tensor, FP64."""
        if not tensors:
            return torch.zeros(0, dtype=torch.float64, device=self._engine.device)
        if not any(tensor.numel() > _CHUNK and not tensor.is_cuda for tensor in tensors):
            return self._stacked(torch._foreach_norm(list(tensors), 2)).square()
        # One long FP32 sum on a CPU loses small terms.
        squares = [
            torch.stack(torch._foreach_norm(list(torch.split(tensor, _CHUNK)), 2)).double().square()
            if tensor.numel()
            else torch.zeros(1, dtype=torch.float64)
            for tensor in tensors
        ]
        return self._stacked([parts.sum() for parts in squares])

    def _stacked(self, numbers: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(numbers)).to(self._engine.device).double()


def _like(second: Tensor | None, weight: Tensor) -> Tensor:
    fits = second is not None and second.numel() == weight.numel() and second.is_floating_point()
    return second if second is not None and fits else weight.new_empty(0)


def _distance(size: int) -> int:
    """Between sampled elements; odd, so that they are not all of one column."""
    return max(1, -(-size // _SAMPLED)) | 1
