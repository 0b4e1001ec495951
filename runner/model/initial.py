"""Initial weights: the same bytes on any world size, engine and device.

Owns the rule per parameter and the numbers. Must not know how parameters are sharded: the
caller asks for the flat range it holds.

The numbers come from torch's CPU generator, whose normals are equal on AVX2 and AVX-512 but may
differ in the last bit on other CPUs (ARM) or in other torch releases.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runner.model.decoder import DecoderShape

BLOCK_ELEMENTS = 2**18

_RESIDUAL_OUTPUTS = ("attention.output.weight", "ffn.down.weight")
_NORMS = ("norm", "attention_norm", "ffn_norm", "query_norm", "key_norm")
_MATRICES = ("embedding", "head", "query", "key", "value", "gate", "up")


def initial_std(name: str, shape: DecoderShape) -> float | None:
    """The deviation of the :class:`Decoder` parameter ``name``, whose mean is 0; None: all ones.

    What writes into the residual stream has ``init_std / sqrt(2 * layers)``, so the stream's
    variance does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). Raises ValueError
    for a name that the decoder does not have.
    """
    if name.endswith(_RESIDUAL_OUTPUTS):
        return shape.init_std / math.sqrt(2 * shape.layers)
    owner, _, kind = name.rpartition(".")
    part = owner.rpartition(".")[2]
    if kind != "weight" or part not in (*_NORMS, *_MATRICES):
        raise ValueError(f"no initial weights are defined for a parameter called {name!r}")
    return None if part in _NORMS else shape.init_std


def initial_range(
    name: str, shape: Sequence[int], std: float | None, *, seed: int, start: int, count: int
) -> Tensor:
    """Elements ``[start, start + count)`` of the flattened parameter: FP32 ``[count]`` on the CPU.

    ``shape`` is the whole parameter's, ``std`` from :func:`initial_std`. Any partition of the flat
    range gives the same bytes; only the blocks touched are generated. Raises ValueError when the
    range leaves the parameter.
    """
    stop = start + count
    if start < 0 or count < 0 or stop > math.prod(shape):
        raise ValueError(f"[{start}, {stop}) leaves {name}, which has {math.prod(shape)} elements")
    if std is None:
        return torch.ones(count, dtype=torch.float32, device="cpu")
    values = torch.empty(count, dtype=torch.float32, device="cpu")
    first_seed = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "little")
    for block in range(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
        origin = block * BLOCK_ELEMENTS
        low, high = max(start, origin), min(stop, origin + BLOCK_ELEMENTS)
        normal = _normal_block(first_seed + block)
        values[low - start : high - start] = normal[low - origin : high - origin]
    return values.mul_(std)


def _normal_block(seed: int) -> Tensor:
    # HAZARD: torch's CPU generator keeps the low 32 bits of its seed. A digest per block would
    # make two of the 30,000 blocks of an 8 B model equal in one run of ten; consecutive seeds
    # within a parameter cannot meet there, and hardly ever across parameters.
    # Always the whole block: the values depend on how many are asked for.
    generator = torch.Generator(device="cpu").manual_seed(seed % 2**32)
    return torch.empty(BLOCK_ELEMENTS, dtype=torch.float32, device="cpu").normal_(
        generator=generator
    )
