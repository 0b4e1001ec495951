"""The state digest: one string for all parameters and the optimizer's state.

It does not depend on engine, sharding or world size. There are two definitions; the size of the
state decides which one applies:

1. Up to ``WHOLE_BYTES``: SHA-256 over the tensors by name, in sorted order, little endian, then the
   update counts. 64 hex digits.
2. Above: "v2:" and the SHA-256 over two sums of each tensor, then the update counts. Whoever holds
   elements sums them where they lie, and sums of different holders are added.

:mod:`runner.checkpoint.tensor_sums` has the sums of the second.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping

import torch

from runner.checkpoint.elements import as_bytes
from runner.checkpoint.tensor_sums import Sums

WHOLE_BYTES = 1 << 28

_ITEM_BYTES = 4


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
