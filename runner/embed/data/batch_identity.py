"""A digest of what a batch holds, to recognise it when a loader is read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

_NUM_LEAVES = 32
_NUM_BYTES = 1 << 14  # of a tensor's beginning and of its end


def batch_digest(batch: Any) -> str:
    """64 bits over the batch's structure and the ends of its tensors on the CPU."""
    digest = xxhash.xxh3_64()
    for number, leaf in enumerate(_leaves(batch, 0)):
        if number == _NUM_LEAVES:
            break
        digest.update(_content(leaf))
    return digest.hexdigest()


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if depth < 4 and isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item, depth + 1)
    elif depth < 4 and isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, depth + 1)
    else:
        yield value


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
            return type(leaf).__name__.encode()
        text = f"{leaf.dtype}{tuple(leaf.shape)}".encode()
        return text if leaf.device.type != "cpu" or leaf.is_quantized else text + _ends(leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return f"{leaf.dtype}{leaf.shape}".encode() + _both_ends(flat.data)
    if leaf is None or isinstance(leaf, bool | int | float | str | bytes):
        return repr(leaf)[:_NUM_BYTES].encode(errors="surrogatepass")
    return type(leaf).__name__.encode()


def _ends(tensor: torch.Tensor) -> bytes:
    """The bytes at both ends; only these are copied of a tensor that is not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg()
    count = max(1, _NUM_BYTES // max(1, flat.element_size()))
    if not flat.is_contiguous():
        flat = flat.contiguous() if flat.numel() <= 2 * count else flat[:1].contiguous()
    flat = flat.reshape(-1)
    ends = flat if len(flat) <= 2 * count else torch.cat([flat[:count], flat[-count:]])
    return ends.contiguous().view(torch.uint8).numpy().tobytes() if len(ends) else b""


def _both_ends(data: memoryview) -> bytes:
    if len(data) <= 2 * _NUM_BYTES:
        return bytes(data)
    return bytes(data[:_NUM_BYTES]) + bytes(data[-_NUM_BYTES:])
