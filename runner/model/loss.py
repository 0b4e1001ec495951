"""The training loss of a batch, one sum per sequence.

Owns cross-entropy and the z-loss, and the head's product where its result is too large to be held.
Must not know the model, the averaging over ranks and micro-batches, or the use of the
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NOT_COUNTED = -100
_FP32_BYTES = 4
# Looks at the tokens of a micro-batch: their cross-entropy [B * T], the labels [B, T], log Z
# [B * T] if known, otherwise the logits [B * T, V]. Must not change them.
TokenTap = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], None]


def sequence_losses(
    logits: Tensor, targets: Tensor, *, fp32: bool, z_loss: float, tap: TokenTap | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over each sequence's counted tokens: cross-entropy, and the loss to train on.

    ``logits`` ``[B, T, V]``, any float dtype; ``targets`` int64 ``[B, T]``, ``NOT_COUNTED``
    where a token does not count: it then adds exactly zero to value and gradient. ``fp32``
    computes in FP32 whatever the logits' dtype. Returns two FP32 ``[B]`` in nats; the second
    adds ``z_loss * log(Z)^2`` per token (PaLM, Chowdhery et al. 2022, section 5) and is the same
    tensor as the first when ``z_loss`` is 0. In place of logits the result of :class:`HeadLosses`
    may come: it has these two already, and ``tap`` has seen their tokens.
    """
    if logits.dim() == 2:
        return logits[0].clone(), logits[1].clone()  # no views leave a sharded module
    # [B * T, V], not [B, V, T]: the two-dimensional kernel is not deterministic on CUDA.
    flat = logits.flatten(0, 1)
    flat = flat.float() if fp32 else flat
    token_losses = _cross_entropy(flat, targets.flatten())
    log_sums = None if z_loss == 0 else torch.logsumexp(flat, dim=-1).float()
    if tap is not None:
        tap(token_losses.detach(), targets, log_sums, flat.detach())
    return _summed(token_losses, log_sums, targets, z_loss)


def right_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    """How many counted tokens of each sequence are the likeliest ones, ``[B]``.

    Args:
        logits: as :func:`sequence_losses` takes them; of :class:`HeadLosses` without gradients.
    """
    return logits[2] if logits.dim() == 2 else (logits.argmax(dim=-1) == targets).sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLosses:
    """The head and its loss in parts: the logits of a whole micro-batch are never held.

    For logits ``[B, T, V]`` of more than ``most_bytes`` in FP32; 0: never. The parts are computed
    again in the backward pass, so no more than about two of them live at a time.
    """

    fp32: bool
    z_loss: float
    most_bytes: int

    def is_wanted(self, hidden: Tensor, weight: Tensor) -> bool:
        """Whether the logits of ``hidden`` ``[B, T, dim]`` are too large at once."""
        num_bytes = hidden.shape[:-1].numel() * weight.shape[0] * _FP32_BYTES
        return 0 < self.most_bytes < num_bytes

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tap: TokenTap | None = None,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        """:func:`sequence_losses` of ``hidden @ weight.T + bias``, as one FP32 ``[2, B]``.

        Without gradients ``[3, B]``: the third is :func:`right_tokens`.
        ``hidden`` ``[B, T, dim]``, ``weight`` ``[V, dim]`` and ``bias`` ``[V]`` of one dtype.
        """
        right = None if torch.is_grad_enabled() else torch.empty_like(targets, dtype=torch.bool)
        losses, log_sums = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), weight, bias, targets.flatten(), self.fp32, self.most_bytes, right
        )
        if tap is not None:
            tap(losses.detach(), targets, log_sums.detach(), None)
        sums = _summed(losses, log_sums if self.z_loss else None, targets, self.z_loss)
        return torch.stack(sums if right is None else [*sums, right.sum(dim=1)])


class _HeadLoss(torch.autograd.Function):
    """``(hidden [N, dim], weight [V, dim], bias [V], targets [N])`` to cross-entropy and log Z.

    Both FP32 [N]. Into ``right``, bool of N elements, goes which targets are the likeliest.

    Forward goes by tokens, backward by rows of ``weight``: each part of its gradient is then one
    product over all tokens, as without parts, and is rounded once. The gradient of ``hidden`` is
    summed in FP32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        fp32: bool,
        most_bytes: int,
        right: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(losses)
        size = max(1, most_bytes // (_FP32_BYTES * len(weight)))
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = F.linear(hidden[part], weight, bias)
            logits = logits.float() if fp32 else logits
            losses[part] = _cross_entropy(logits, targets[part])
            log_sums[part] = torch.logsumexp(logits, dim=-1)
            if right is not None:
                right.view(-1)[part] = logits.argmax(dim=-1) == targets[part]
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums)
        ctx.size = max(1, most_bytes // (_FP32_BYTES * len(hidden)))
        return losses, log_sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_sums = ctx.saved_tensors
        counted = targets != NOT_COUNTED
        of_loss = torch.where(counted, grads[0], 0.0)
        of_softmax = (of_loss + grads[1]).unsqueeze(1)
        for_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(weight), ctx.size):
            part = slice(start, start + ctx.size)
            rows = weight[part]
            grad = F.linear(hidden, rows, None if bias is None else bias[part]).float()
            grad.sub_(log_sums.unsqueeze(1)).exp_().mul_(of_softmax)
            # A token that does not count adds nothing, whatever its logits are.
            grad.masked_fill_(~counted.unsqueeze(1), 0.0)
            _subtract_at(grad, targets - start, of_loss)
            grad = grad.to(hidden.dtype)
            for_hidden += grad @ rows
            if for_weight is not None:
                torch.mm(grad.T, hidden, out=for_weight[part])
            if for_bias is not None:
                for_bias[part] = grad.sum(0, dtype=torch.float32).to(for_bias.dtype)
        return for_hidden.to(hidden.dtype), for_weight, for_bias, None, None, None, None


def _subtract_at(values: Tensor, columns: Tensor, amounts: Tensor) -> None:
    """``values[i, columns[i]] -= amounts[i]`` for columns in range. Does not wait."""
    is_here = (columns >= 0) & (columns < values.shape[1])
    # Not scatter_add_ or index_put_: one place a row, so that nothing is added in any order.
    at = torch.where(is_here, columns, 0).unsqueeze(1)
    amounts = torch.where(is_here, amounts, 0.0).unsqueeze(1)
    values.scatter_(1, at, values.gather(1, at) - amounts)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each token; 0 where it does not count."""
    return F.cross_entropy(logits, targets, ignore_index=NOT_COUNTED, reduction="none")


def _summed(
    token_losses: Tensor, log_sums: Tensor | None, targets: Tensor, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Sum over each sequence: the cross-entropy, and the loss to train on."""
    cross_entropy = token_losses.float().view_as(targets).sum(dim=1)
    if log_sums is None:
        return cross_entropy, cross_entropy
    squares = log_sums.square().view_as(targets)
    counted = torch.where(targets == NOT_COUNTED, 0.0, squares)
    return cross_entropy, cross_entropy + z_loss * counted.sum(dim=1)
