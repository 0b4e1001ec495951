"""Recomputes activations in the backward pass instead of keeping them: less memory, same bits.

``selective`` keeps what is costly to compute, the results of products and of attention, and
computes the rest again: norms, rotations, activation functions, sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

NONE, SELECTIVE = "none", "selective"
_COSTLY: Final = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
) | {torch.ops.higher_order.flex_attention}


def recomputed(
    function: Callable[..., Any], *args: Any, selective: bool, is_random: bool, **more: Any
) -> Any:
    """Call ``function``, and call it again in the backward pass instead of keeping activations.

    Args:
        selective: keep the results of products and attention.
        is_random: it draws random numbers, which must be the same the second time.
    """
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=is_random,
        context_fn=selective_contexts if selective else noop_context_fn,
        **more,
    )


def selective_contexts() -> Any:
    """The two contexts for torch's ``checkpoint``: of the forward pass and of the recomputation."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **more: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_units(units: Iterable[nn.Module], *, selective: bool) -> None:
    """Make a user's modules recompute their forward in the backward pass."""
    for unit in units:
        again = partial(recomputed, unit.forward, selective=selective, is_random=True)
        unit.forward = partial(_in_training, unit.forward, again)


def _in_training(
    plain: Callable[..., Any], again: Callable[..., Any], *args: Any, **more: Any
) -> Any:
    return (again if torch.is_grad_enabled() else plain)(*args, **more)
