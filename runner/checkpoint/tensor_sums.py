"""Sums of tensors that tell whether two of them are equal, taken where the elements lie.

They are over ``bits * pad * factor`` modulo 2^64: ``bits`` of each element as an
integer, a random odd ``pad`` by its place in a block, a random odd ``factor`` by tensor and block.
That is multiply-and-add hashing (Carter and Wegman 1979): any single change is noticed, and two
states that differ have equal sums with a probability of about 2^-64. It tells runs apart that went
apart by accident; against bytes forged on purpose the ring has the SHA-256 of each file.

``prove-resume`` loads this file in processes of strangers, so it imports nothing of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

BLOCK_ELEMENTS = 1 << 20
LANES = 2
Sums = tuple[int, ...]  # one for each lane, each below 2^64

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = (1 << 64) - 1
_PAD_SEED = b"holdfast state digest 2"
_CACHED_ELEMENTS = 1 << 16  # a CPU takes a block in parts that stay in its cache


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
        return self.of_all([(name, start, values)])[0]

    def of_all(self, pieces: Sequence[tuple[str, int, torch.Tensor]]) -> list[Sums]:
        """:meth:`of` for each (name, start, values). Waits for each device once."""
        parts: dict[torch.device, list[torch.Tensor]] = {}
        factors: dict[torch.device, list[tuple[int, Sums]]] = {}
        for number, (name, start, values) in enumerate(pieces):
            words = values.view(_WORDS[values.itemsize])
            for block, first, last in _overlaps(start, start + len(words)):
                pads = self._pads_on(words.device)[:, first % BLOCK_ELEMENTS :]
                overlap = words[first - start : last - start]
                parts.setdefault(words.device, []).append(_lanes(overlap, pads[:, : last - first]))
                factors.setdefault(words.device, []).append((number, _factors(name, block)))
        sums: list[Sums] = [(0,) * LANES] * len(pieces)
        for device, lanes in parts.items():
            for part, (number, factor) in zip(
                torch.stack(lanes).tolist(), factors[device], strict=True
            ):
                scaled = tuple(a * b for a, b in zip(part, factor, strict=True))
                sums[number] = added(sums[number], scaled)
        return sums

    def _pads_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._pads:
            drawn = hashlib.shake_128(_PAD_SEED).digest(LANES * BLOCK_ELEMENTS * 8)
            odd = np.frombuffer(drawn, dtype="<i8").astype(np.int64) | 1
            self._pads[device] = torch.from_numpy(odd).view(LANES, BLOCK_ELEMENTS).to(device)
        return self._pads[device]


def _overlaps(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The blocks that ``[start, stop)`` meets: number, and the first and last element of each."""
    blocks = range(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)) if start < stop else ()
    for block in blocks:
        base = block * BLOCK_ELEMENTS
        yield block, max(start, base), min(stop, base + BLOCK_ELEMENTS)


def _lanes(words: torch.Tensor, pads: torch.Tensor) -> torch.Tensor:
    """INT64 [LANES]; the products and sums wrap, as they are to."""
    size = len(words) if words.is_cuda else _CACHED_ELEMENTS
    parts = [slice(first, first + size) for first in range(0, len(words), size)]
    sums = [(words[part].long() * pads[:, part]).sum(dim=1) for part in parts]
    return torch.stack(sums).sum(dim=0)


def _factors(name: str, block: int) -> Sums:
    drawn = hashlib.sha256(f"{name} {block}".encode()).digest()
    return tuple(int.from_bytes(drawn[8 * n : 8 * n + 8], "little") | 1 for n in range(LANES))
