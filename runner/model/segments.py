"""Attention that does not leave a document: with a mask of all pairs, or without.

A mask is bool ``[B, 1, T, T]``, and CUDA's kernels read all of it. torch's flex attention gets a
table of pairs of 128-token blocks instead, ``[B, T / 128, T / 128]``: pairs without common
documents, pairs within one document, and pairs that need the element-wise test. Building it does
not wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

MASK, FLEX = "mask", "flex"
_BLOCK: Final = 128
_LEAST_HEAD_DIM: Final = 16  # tokens; flex attention's kernels take no fewer
# The mask that keeps attention within documents; None without documents.
Documents = Tensor | BlockMask | None


def document_attention(kind: str, device_type: str, head_dim: int) -> str:
    """Choose :data:`MASK` or :data:`FLEX`; ``auto`` takes flex on CUDA if it can be compiled.

    Args:
        kind: ``auto``, or one of these.
        device_type: type of the device that computes attention.
    """
    if kind != "auto":
        return kind
    if device_type != "cuda" or head_dim < _LEAST_HEAD_DIM:
        return MASK
    from torch.utils._triton import has_triton  # asks for the device

    return FLEX if has_triton() else MASK


def documents_of(segments: Tensor | None, kind: str) -> Documents:
    """Who may attend to whom, once for all layers.

    Args:
        segments: int32 ``[B, T]``, the document of each token; None: all are of one.
        kind: see :func:`document_attention`.
    """
    if segments is None:
        return None
    return block_mask(segments) if kind == FLEX else segment_mask(segments)


def segment_mask(segments: Tensor) -> Tensor:
    """Who may attend to whom: bool ``[B, 1, T, T]``, causal and within one segment.

    ``segments`` ``[B, T]`` numbers the document of each token. Every row has its diagonal, so
    no softmax is over nothing.
    """
    same = segments.unsqueeze(2) == segments.unsqueeze(1)
    return same.tril().unsqueeze(1)


def block_mask(segments: Tensor) -> BlockMask:
    """The same as :func:`segment_mask`, for flex attention, in blocks of 128 tokens."""
    rows, length = segments.shape
    num = -(-length // _BLOCK)
    # The last block is filled with copies of the last token, which no query attends to.
    filled = F.pad(segments.float(), (0, num * _BLOCK - length), mode="replicate")
    blocks = filled.view(rows, num, _BLOCK)
    least, most = blocks.amin(dim=2), blocks.amax(dim=2)
    have_common = (least.unsqueeze(2) <= most.unsqueeze(1)) & (
        most.unsqueeze(2) >= least.unsqueeze(1)
    )
    is_one = (least == most).unsqueeze(2) & (least == most).unsqueeze(1)
    is_one &= least.unsqueeze(2) == least.unsqueeze(1)
    causal = torch.ones(num, num, dtype=torch.bool, device=segments.device).tril()
    full = is_one & causal.tril(-1)
    partial = have_common & causal & ~full

    def may_attend(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments[row, query] == segments[row, key])

    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=may_attend,
        seq_lengths=(length, length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number and indices of True in each row of bool ``[B, N, N]``; the rest is arbitrary."""
    counts = blocks.sum(dim=2, dtype=torch.int32)
    which = blocks.to(torch.int8).argsort(dim=2, descending=True, stable=True).to(torch.int32)
    return counts.unsqueeze(1), which.unsqueeze(1)


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Attention ``[B, heads, T, head_dim]``: causal, and within documents if there are any.

    ``key`` and ``value`` may have fewer heads; each then serves a run of consecutive queries.
    """
    grouped = key.shape[1] != query.shape[1]
    if isinstance(documents, BlockMask):
        mixed: Tensor = _flex(query.device.type)(
            query, key, value, block_mask=documents, enable_gqa=grouped
        )
        return mixed
    if documents is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    if grouped:
        # HAZARD: of the CUDA kernels that take a mask not all take grouped heads; the one left
        # stores [B, heads, T, T]. Expanding the heads keeps the memory-saving kernel.
        groups = query.shape[1] // key.shape[1]
        key, value = _expand_heads(key, groups), _expand_heads(value, groups)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=documents)


def _expand_heads(x: Tensor, groups: int) -> Tensor:
    # Not repeat_interleave: the backward of expand is a plain, repeatable sum.
    return x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2)


@functools.cache
def _flex(device_type: str) -> Callable[..., Any]:
    """Flex attention, compiled if possible; uncompiled it is slow and gives the same result."""
    if device_type == "cuda":
        return torch.compile(flex_attention, dynamic=False)
    return flex_attention
