"""Forward passes and what they tell of each sequence; shared by all engines.

Owns the faults' way into the computation and the probe at the embedding: the end of the
backward pass, before any reduction has mixed the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from runner.engine.protocol import Batch, Disturbance, Sequences, Work

# (logits, targets) -> summed cross-entropy and summed training loss per sequence, [B] FP32.
SequenceLosses = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Forward:
    """One rank's forward passes.

    Args:
        model: called with (tokens, segments), gives logits.
        embedding: the module whose output is the first activation of each sequence.
        probe: note the norm of each sequence's gradient at the embedding.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        embedding: nn.Module,
        sequence_losses: SequenceLosses,
        device: torch.device,
        probe: bool,
    ) -> None:
        self._model = model
        self._sequence_losses = sequence_losses
        self._device = device
        self._probe = probe
        self._disturbance: Disturbance | None = None
        self._losses: list[torch.Tensor] = []
        self._gradient_norms: list[torch.Tensor] = []
        embedding.register_forward_hook(self._at_embedding)

    def begin(self) -> None:
        """Forget the last step's numbers."""
        self._losses, self._gradient_norms = [], []

    def training_loss(self, work: Work) -> torch.Tensor:
        """Summed training loss of one micro-batch, a scalar to call backward on."""
        torch.manual_seed(work.seed)
        self._disturbance = work.disturbance
        logits = self._model(work.batch.tokens, work.batch.segments)
        self._disturbance = None
        cross_entropy, training = self._sequence_losses(logits, work.batch.targets)
        if work.disturbance is not None and work.disturbance.loss_scale is not None:
            scale = torch.tensor(work.disturbance.loss_scale, device=self._device)
            cross_entropy, training = cross_entropy * scale, training * scale
        self._losses.append(cross_entropy.detach())
        return training.sum()

    def told(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the step on this rank: summed cross-entropy, and 1.0 when anything was not finite.

        Anything: its own losses or what its backward passes brought; else 0.0. FP64 scalars.
        """
        loss = seen = _total(self._losses)
        if self._gradient_norms:
            # Norms are not negative: what is not finite in one of them stays so in the sum.
            seen = loss + _total(self._gradient_norms)
        return loss, (~torch.isfinite(seen)).double()

    def sequences(self) -> Sequences:
        """Per-sequence numbers of the step."""
        return Sequences(losses=tuple(self._losses), gradient_norms=tuple(self._gradient_norms))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, int]:
        """Summed cross-entropy (FP64 scalar) and number of counted tokens. Waits once."""
        self._model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        count = torch.zeros((), dtype=torch.int64, device=self._device)
        for batch in batches:
            logits = self._model(batch.tokens, batch.segments)
            losses, _ = self._sequence_losses(logits, batch.targets)
            total += losses.sum(dtype=torch.float64)
            count += (batch.targets >= 0).sum()
        self._model.train()
        return total, int(count)

    def _at_embedding(
        self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor:
        fault = self._disturbance
        if fault is not None and fault.in_forward is not None:
            fault.in_forward()
        if fault is not None and fault.activation_scale is not None:
            scale = torch.tensor(fault.activation_scale, device=output.device, dtype=output.dtype)
            output = output * scale[:, None, None]
        if torch.is_grad_enabled() and (self._probe or fault is not None):
            if not output.requires_grad:
                output.requires_grad_()  # a frozen embedding; who was at fault shows here only
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._at_embedding_gradient(grad, fault)
            )
        return output

    def _at_embedding_gradient(self, grad: torch.Tensor, fault: Disturbance | None) -> torch.Tensor:
        if fault is not None and fault.in_backward is not None:
            fault.in_backward()
        if fault is not None and fault.nan_grad:
            grad = grad * torch.nan
        norms = torch.linalg.vector_norm(grad, dim=(1, 2), dtype=torch.float32)
        self._gradient_norms.append(norms)
        return grad


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of everything in ``parts``, FP64 scalar."""
    total = parts[0].sum(dtype=torch.float64)
    for part in parts[1:]:
        total = total + part.sum(dtype=torch.float64)
    return total
