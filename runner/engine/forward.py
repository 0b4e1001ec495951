"""Forward passes and their per-sequence numbers; shared by all engines.

Owns the probe at the embedding: it sees the end of the backward pass, before any reduction mixes
the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from runner.engine.buffers import RunningBuffers
from runner.engine.modes import evaluating
from runner.engine.protocol import Batch, Evaluated, LocalSums, Metrics, MicroStep, Sequences

# Of one micro-batch: cross-entropy, training loss and count, each summed by sample, [B]; and the
# model's own metrics.
Losses = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Metrics]
Disturb = Callable[[Losses], Losses]


class Forward:
    """One rank's forward passes.

    Args:
        model: called with a batch's tensors by name; returns :data:`Losses`.
        embedding: the module whose output is the first activation of each sequence.
        buffers: those of the model that forward passes change.
        probe: record the norm of each sequence's gradient at the embedding.
        disturb: an injected fault on the losses, if any.
        context: makes the context manager that each forward pass runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        embedding: nn.Module,
        buffers: RunningBuffers,
        device: torch.device,
        probe: bool,
        disturb: Disturb | None = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._context = context
        self._buffers = buffers
        self._model = model
        self._device = device
        self._probe = probe
        self._disturb = disturb
        self._rows = 0
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []
        self._metrics: list[Metrics] = []
        # For each micro-batch, one tensor per call of the embedding.
        self._norms: list[list[torch.Tensor]] = []
        self._norms_of_nobody: list[torch.Tensor] = []
        embedding.register_forward_hook(self._at_embedding)

    def begin(self) -> None:
        """Discard the previous step's numbers."""
        self._buffers.drop()
        self._losses, self._counts, self._metrics = [], [], []
        self._norms, self._norms_of_nobody = [], []

    def training_loss(self, work: MicroStep) -> torch.Tensor:
        """Summed training loss of one micro-batch, a scalar to call backward on."""
        _seed_generators(work.seed, self._device)
        self._buffers.restore()  # from before the step
        self._norms.append([])
        cross_entropy, training, counts, metrics = self._sums(work.batch)
        self._buffers.take(counts)
        self._losses.append(cross_entropy.detach())
        self._counts.append(counts)
        self._metrics.append(metrics)
        return training.sum()

    def _totals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's summed cross-entropy of the step, and 1.0 if anything was not finite.

        "Anything" is its own losses, the results of its backward passes and the buffers. FP64
        scalars.
        """
        loss = total = _total(self._losses)
        buffers = self._buffers.total()
        self._buffers.restore()
        if buffers is not None:
            total = total + buffers
        norms = [norm for of_one in self._norms for norm in of_one] + self._norms_of_nobody
        if norms:
            # Norms are not negative, so a non-finite one makes the sum non-finite.
            total = total + _total(norms)
        return loss, (~torch.isfinite(total)).double()

    def sums(self, gradients: Iterable[torch.Tensor], *, copies: int = 1) -> LocalSums:
        """The step's numbers, from its forward passes and this rank's reduced gradients.

        Args:
            copies: ranks that have the same gradients.
        """
        square = squared_norm(gradients, self._device) / copies
        loss, nonfinite = self._totals()
        norms: tuple[torch.Tensor, ...] = ()
        if any(self._norms):
            pairs = zip(self._norms, self._losses, strict=True)
            norms = tuple(_combine(of_one, losses) for of_one, losses in pairs)
        return LocalSums(
            loss=loss,
            grad_square=square,
            nonfinite=nonfinite,
            count=_total(self._counts),
            sequences=Sequences(
                losses=tuple(self._losses), gradient_norms=norms, counts=tuple(self._counts)
            ),
            metrics=_totals_by_name(self._metrics),
        )

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Evaluated:
        """Run forward passes only."""
        with self._buffers.untouched(), evaluating(self._model):
            parts = [self._sums(batch) for batch in batches]
        losses, _, counts, metrics = zip(*parts, strict=True)
        return Evaluated(
            losses=losses,
            counts=counts,
            total=_total(losses),
            count=_total(counts),
            metrics=metrics,
        )

    def _sums(self, batch: Batch) -> Losses:
        inputs = batch.inputs()
        self._rows = len(next(iter(inputs.values())))
        if batch.real is not None:
            inputs["real"] = batch.real
        with self._context():
            losses: Losses = self._model(inputs)
        return losses if self._disturb is None else self._disturb(losses)

    def _at_embedding(self, module: nn.Module, inputs: object, output: object) -> object:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, torch.Tensor) or not first.is_floating_point():
            return output
        if self._probe and torch.is_grad_enabled():
            if not first.requires_grad:
                first.requires_grad_()  # a frozen embedding; only this probe identifies the culprit
            rows, norms = self._rows, self._norms[-1]
            first.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._at_embedding_gradient(grad, rows, norms)
            )
        return output

    def _at_embedding_gradient(
        self, grad: torch.Tensor, rows: int, norms: list[torch.Tensor]
    ) -> None:
        """Record each sample's norm, or norms of runs of rows if there is no row per sample."""
        if not rows or not grad.dim() or len(grad) % rows:
            total = torch.linalg.vector_norm(grad, dtype=_at_least_fp32(grad))
            self._norms_of_nobody.append(total)
            return
        flat = grad.reshape(len(grad), -1)
        norm = torch.linalg.vector_norm(flat, dim=1, dtype=_at_least_fp32(grad))
        norms.append(norm if len(grad) == rows else norm.view(-1, rows).norm(dim=0))


def _at_least_fp32(grad: torch.Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


def _combine(norms: list[torch.Tensor], losses: torch.Tensor) -> torch.Tensor:
    """Combine the norms of all embedding calls in one forward pass; zeros if there were none."""
    if not norms:
        return torch.zeros_like(losses, dtype=torch.float32)
    return norms[0] if len(norms) == 1 else torch.stack(norms).norm(dim=0)


def _seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a forward pass on this device draws from.

    ``torch.manual_seed`` would also record the call stack for every absent kind of device, which
    takes a tenth of a small step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of everything in ``parts``, FP64 scalar."""
    total = parts[0].sum(dtype=torch.float64)
    for part in parts[1:]:
        total = total + part.sum(dtype=torch.float64)
    return total


def _totals_by_name(parts: Sequence[Metrics]) -> Metrics:
    """Sum and count of each metric over the micro-batches that have it, FP64 scalars."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: (
            _total([part[name][0] for part in parts if name in part]),
            _total([part[name][1] for part in parts if name in part]),
        )
        for name in names
    }


# Elements that one FP32 sum of squares on a CPU takes in. Tried: off by 5e-7 where they differ,
# by 2.3e-5 where all are equal and every addition rounds the same way.
_PIECE = 1 << 15


def squared_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of all squares, FP64 scalar on ``device``; does not wait for the device.

    A tree: FP32 within a piece, FP64 above. One long FP32 sum on a CPU loses small terms (0.5 % of
    the norm at 2^26 elements); FP64 throughout takes four times as long there.

    Args:
        gradients: FP32, any shapes, on one device, which need not be ``device``.
    """
    pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(pieces, 2))
    return norms.to(device).double().square().sum()


def _pieces(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # CUDA's own kernel adds up in a tree.
    if gradient.is_cuda or gradient.numel() <= _PIECE:
        return (gradient,)
    return torch.split(gradient.reshape(-1), _PIECE)
