"""Measures one update of each tensor: gradient and weight norms, size of the update, g^2 / v.

The sums cover this rank's shards, on its device; added over all ranks they cover the whole tensors.
Nothing waits for the device, and the state is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        # Views of memory that does not move; making them anew would cost more than all the sums.
        self._views: _Views | None = None

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
        views = self._opened()
        gradients = self._engine.gradients()
        own = [
            _flat(gradients.get(name), weight)
            for name, weight in zip(self._names, views.weights, strict=True)
        ]
        return Before(
            squares=self._squares(own),
            weights=views.now("before"),
            gradients=views.gradients(own) if has_moments else None,
        )

    @torch.no_grad()
    def after(self, before: Before) -> Tensor:
        """Measure behind the update: FP64, each of :data:`KINDS` of all ``names`` in turn.

        Squared norms of gradients (of the summed loss) and of weights; then of up to
        ``_SAMPLED`` elements a shard: squares of what they moved, and of what they are; the sum of
        g^2 / v, and how many of these there are: 0 where moments are not measured.
        """
        views = self._opened()
        now = views.now("now")
        sampled = [now - before.weights, now]
        sums = [torch.linalg.vector_norm(sample, dim=1).double().square_() for sample in sampled]
        if before.gradients is None:
            sums += [torch.zeros_like(sums[0])] * 2
        else:
            seconds = views.now("seconds")
            ratios = torch.where(seconds > 0, before.gradients.square() / seconds, 0.0)
            sums += [values.sum(dim=1, dtype=torch.float64) for values in (ratios, ratios > 0)]
        sums = [column.to(self._engine.device) for column in sums]
        # Copies of a shard have equal sums: each gives its part.
        squares = self._squares(views.weights)
        return torch.cat([before.squares, squares, *sums]) / self._engine.replica[1]

    def _opened(self) -> _Views:
        if self._views is None:
            held: dict[str, dict[str, Tensor]] = {"param": {}, "exp_avg_sq": {}}
            for shard in self._engine.shards():
                kind, _, name = shard.name.partition("/")
                if kind in held:
                    held[kind][name] = shard.local.detach()
            self._views = _Views(self._names, held["param"], held["exp_avg_sq"])
        return self._views

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


class _Views:
    """This rank's shards, and a matrix for each kind of what is sampled of them.

    The matrices are FP32 [names, ``_SAMPLED``]; the rest of a row is zero. They are used again at
    each look, for to make them takes longer than to fill them.

    Attributes:
        weights: of each name the shard of the parameter, 1-D.
    """

    def __init__(
        self, names: Sequence[str], weights: Mapping[str, Tensor], seconds: Mapping[str, Tensor]
    ) -> None:
        self.weights = [weights[name] for name in names]
        self._steps = [_distance(weight.numel()) for weight in self.weights]
        self._few = self._sampled(self.weights)
        # Of some there is no second moment, or it is kept in another form.
        self._seconds = self._sampled(
            [_like(seconds.get(n), w) for n, w in zip(names, self.weights, strict=True)]
        )
        self._matrices: dict[str, tuple[Tensor, list[Tensor]]] = {}

    def gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        return self._filled("gradients", self._sampled(gradients))

    def now(self, kind: str) -> Tensor:
        """Of the weights ("before", "now"), or of the second moments ("seconds")."""
        return self._filled(kind, self._seconds if kind == "seconds" else self._few)

    def _sampled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Evenly spaced elements of each."""
        return [
            tensor[::step] if step > 1 else tensor
            for tensor, step in zip(tensors, self._steps, strict=True)
        ]

    def _filled(self, kind: str, few: Sequence[Tensor]) -> Tensor:
        if kind not in self._matrices:
            device = self.weights[0].device if self.weights else None
            matrix = torch.zeros(len(few), _SAMPLED, device=device)
            rows = [
                row[: part.numel()] for row, part in zip(matrix.unbind(), self._few, strict=True)
            ]
            self._matrices[kind] = matrix, rows
        matrix, rows = self._matrices[kind]
        both = [(row, part) for row, part in zip(rows, few, strict=True) if part.numel()]
        if len(both) < len(rows):
            matrix.zero_()  # a gradient that was there at another look may be missing
        if both:
            torch._foreach_copy_([row for row, _ in both], [part for _, part in both])
        return matrix


def _like(second: Tensor | None, weight: Tensor) -> Tensor:
    fits = second is not None and second.numel() == weight.numel() and second.is_floating_point()
    return second if second is not None and fits else weight.new_empty(0)


def _flat(gradient: Tensor | None, shard: Tensor) -> Tensor:
    return shard.new_empty(0) if gradient is None else gradient.reshape(-1)


def _distance(size: int) -> int:
    """Between sampled elements; odd, so that they are not all of one column."""
    return max(1, -(-size // _SAMPLED)) | 1
