"""The state digest: SHA-256 over parameters and optimizer state, in full.

Tensors by name, in sorted order, as FP32 little endian, then the update counts; so it does
not depend on engine, sharding or world size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import torch


def state_digest(
    tensors: Iterable[tuple[str, torch.Tensor]], update_counts: Mapping[str, int]
) -> str:
    """Digest (hex) of (name, whole tensor) pairs in sorted order of names, and the counts."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).numpy().data.cast("B"))
    digest.update(json.dumps(dict(sorted(update_counts.items()))).encode())
    return digest.hexdigest()
