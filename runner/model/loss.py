"""The training loss of a batch, one sum per sequence.

Owns cross-entropy and the z-loss. Must not know the model, the averaging over ranks and
micro-batches, or what is done with the numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NOT_COUNTED = -100


def sequence_losses(
    logits: Tensor, targets: Tensor, *, fp32: bool, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Sums over each sequence's counted tokens: cross-entropy, and the loss to train on.

    ``logits`` ``[B, T, V]``, any float dtype; ``targets`` int64 ``[B, T]``, ``NOT_COUNTED``
    where a token does not count: it then adds exactly zero to value and gradient. ``fp32``
    computes in FP32 whatever the logits' dtype. Returns two FP32 ``[B]`` in nats; the second
    adds ``z_loss * log(Z)^2`` per token (PaLM, Chowdhery et al. 2022, section 5) and is the same
    tensor as the first when ``z_loss`` is 0.
    """
    # [B * T, V], not [B, V, T]: the two-dimensional kernel is not deterministic on CUDA.
    flat = logits.flatten(0, 1)
    flat = flat.float() if fp32 else flat
    token_losses = F.cross_entropy(
        flat, targets.flatten(), ignore_index=NOT_COUNTED, reduction="none"
    )
    cross_entropy = token_losses.float().view_as(targets).sum(dim=1)
    if z_loss == 0:
        return cross_entropy, cross_entropy
    squares = torch.logsumexp(flat, dim=-1).float().square().view_as(targets)
    counted = torch.where(targets == NOT_COUNTED, 0.0, squares)
    return cross_entropy, cross_entropy + z_loss * counted.sum(dim=1)
