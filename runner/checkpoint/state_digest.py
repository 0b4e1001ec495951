"""The state digest: one string for all parameters and the optimizer's state.

It does not depend on engine, sharding or world size. There are two definitions; the size of the
state decides which one applies:

1. Up to ``WHOLE_BYTES``: SHA-256 over the tensors by name, in sorted order, little endian, then the
   update counts. 64 hex digits.
2. Above: "v2:" and the SHA-256 over two sums of each tensor, then the update counts. Whoever holds
   elements sums them where they lie, and sums of different holders are added.

The sums of the second are over ``bits * pad * factor`` modulo 2^64: ``bits`` of each element as an
integer, a random odd ``pad`` by its place in a block, a random odd ``factor`` by tensor and block.
That is multiply-and-add hashing (Carter and Wegman 1979): any single change is noticed, and two
states that differ have equal sums with a probability of about 2^-64. It tells runs apart that went
apart by accident; against bytes forged on purpose the ring has the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from runner.checkpoint.manifest import as_bytes

WHOLE_BYTES = 1 << 28
BLOCK_ELEMENTS = 1 << 20
LANES = 2
Sums = tuple[int, ...]  # one for each lane, each below 2^64

_ITEM_BYTES = 4
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1
_PAD_SEED = b"holdfast state digest 2"
_CACHED_ELEMENTS = 1 << 16  # a CPU takes a block in parts that stay in its cache


def is_whole(shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether a state of these tensors is small enough for the first definition."""
    return _ITEM_BYTES * sum(math.prod(shape) for shape in shapes) <= WHOLE_BYTES


def state_digest(
    tensors: Iterable[tuple[str, torch.Tensor]], update_counts: Mapping[str, int]
) -> str:
    """The first definition, of (name, whole tensor) pairs sorted by name, and the update counts."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(as_bytes(tensor))
    return _finished(digest, update_counts)


def digest_of_sums(
    tensors: Mapping[str, tuple[tuple[int, ...], Sums]], update_counts: Mapping[str, int]
) -> str:
    """The second definition, of each tensor's shape and sums by name, and the update counts."""
    digest = hashlib.sha256()
    for name, (shape, sums) in sorted(tensors.items()):
        lanes = " ".join(f"{lane:016x}" for lane in sums)
        digest.update(f"{name} {list(shape)} {lanes}\n".encode())
    return "v2:" + _finished(digest, update_counts)


def _finished(digest: hashlib._Hash, update_counts: Mapping[str, int]) -> str:
    digest.update(json.dumps(dict(sorted(update_counts.items()))).encode())
    return digest.hexdigest()


def added(sums: Sums, others: Sums) -> Sums:
    """Add the sums of two holders, who have no element in common."""
    return tuple((a + b) & _MASK for a, b in zip(sums, others, strict=True))


class Summing:
    """Sums parts of tensors on the device where they lie."""

    def __init__(self) -> None:
        self._pads: dict[torch.device, torch.Tensor] = {}

    def of(self, name: str, start: int, values: torch.Tensor) -> Sums:
        """Sums of the elements ``[start, start + len(values))`` of the flattened tensor ``name``.

        ``values`` 1-D and contiguous, of any type. Waits for the device once.
        """
        if not len(values):
            return (0,) * LANES
        pads = self._pads_on(values.device)
        words = values.view(_WORDS[values.itemsize])
        parts, factors = [], []
        stop = start + len(words)
        for block in range(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
            base = block * BLOCK_ELEMENTS
            first, last = max(start, base), min(stop, base + BLOCK_ELEMENTS)
            overlap = words[first - start : last - start]
            parts.append(_lanes(overlap, pads[:, first - base : last - base]))
            factors.append(_factors(name, block))
        sums: Sums = (0,) * LANES
        for part, factor in zip(torch.stack(parts).tolist(), factors, strict=True):
            sums = added(sums, tuple(a * b for a, b in zip(part, factor, strict=True)))
        return sums

    def _pads_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._pads:
            drawn = hashlib.shake_128(_PAD_SEED).digest(LANES * BLOCK_ELEMENTS * 8)
            odd = np.frombuffer(drawn, dtype="<i8").astype(np.int64) | 1
            self._pads[device] = torch.from_numpy(odd).view(LANES, BLOCK_ELEMENTS).to(device)
        return self._pads[device]


def _lanes(words: torch.Tensor, pads: torch.Tensor) -> torch.Tensor:
    """INT64 [LANES]; the products and sums wrap, as they are to."""
    size = len(words) if words.is_cuda else _CACHED_ELEMENTS
    parts = [slice(first, first + size) for first in range(0, len(words), size)]
    sums = [(words[part].long() * pads[:, part]).sum(dim=1) for part in parts]
    return torch.stack(sums).sum(dim=0)


def _factors(name: str, block: int) -> Sums:
    drawn = hashlib.sha256(f"{name} {block}".encode()).digest()
    return tuple(int.from_bytes(drawn[8 * n : 8 * n + 8], "little") | 1 for n in range(LANES))
