"""Digests of tensors where they lie; a sharded tensor's is that of this rank's part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from ...checkpoint.tensor_sums import BLOCK_ELEMENTS, Summing

_ROWS = 4096  # of a batch, above which it counts as one sample
_DEPTH = 4
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements, 1-D and contiguous, without a collective."""
    held: Any = tensor.detach()
    if hasattr(held, "device_mesh"):
        held = held._local_tensor
    if held.layout is not torch.strided:
        held = held._values() if held.layout is torch.sparse_coo else held.values()
    if held.is_complex():
        held = torch.view_as_real(held)
    flat: torch.Tensor = held.contiguous().reshape(-1)
    return flat


class Digests:
    """Digests many tensors at a time; the device is waited for a few times, not for each."""

    def __init__(self) -> None:
        self._summing = Summing()

    def of(self, tensors: Sequence[torch.Tensor], *, precision: bool = False) -> list[list[Any]]:
        """For each tensor: digest, norm, and with ``precision`` the narrowest type that holds it.

        The norm is None for what is no floating point number.
        """
        held = [local(tensor) for tensor in tensors]
        sums = self._summing.of_all([("", 0, values) for values in held])
        norms = _numbers([torch.linalg.vector_norm(v.float()) for v in held if _is_real(v)])
        narrow = _numbers([narrowest(v) for v in held if _is_real(v)] if precision else [])
        entries = []
        for tensor, values, lanes in zip(tensors, held, sums, strict=True):
            shown = f"{lanes} {list(tensor.shape)} {values.numel()} {values.dtype}".encode()
            entry: list[Any] = [short(shown), next(norms) if _is_real(values) else None]
            if precision and _is_real(values):
                entry.append(("bfloat16", "float16", "")[int(next(narrow))])
            entries.append(entry)
        return entries

    def named(
        self, tensors: Mapping[str, torch.Tensor], *, precision: bool = False
    ) -> dict[str, list[Any]]:
        """:meth:`of`, by name."""
        return dict(zip(tensors, self.of([*tensors.values()], precision=precision)))  # noqa: B905

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """INT64 [rows]: one number for each sample of a batch; the device is not waited for.

        The first tensor with a dimension says how many samples there are.
        """
        batched = [t for t in tensors if t.dim() and t.numel() and t.layout is torch.strided]
        if not batched:
            return None
        count = len(batched[0])
        total = torch.zeros(count, dtype=torch.int64, device=batched[0].device)
        for number, tensor in enumerate(t for t in batched if len(t) == count):
            plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            words = plain.detach().contiguous().reshape(count, -1)
            words = words.view(_WORDS[words.itemsize])[:, :BLOCK_ELEMENTS]
            pads = self._summing._pads_on(words.device)[0, : words.shape[1]]
            part = (words.long() * pads).sum(dim=1) * (2 * number + 1)
            total += part.to(total.device)
        return total if count <= _ROWS else total.sum().reshape(1)


def narrowest(values: torch.Tensor) -> torch.Tensor:
    """0 where BF16 holds every value, 1 where FP16 does, else 2."""
    if values.itemsize < 4 or not values.any():
        return torch.full((), 2.0, device=values.device)
    wide = values.float()
    brain = (wide.bfloat16().float() == wide).all()
    half = (wide.half().float() == wide).all()
    return torch.where(brain, 0.0, torch.where(half, 1.0, 2.0))


def short(data: bytes) -> str:
    """16 hex digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _is_real(values: torch.Tensor) -> bool:
    return values.is_floating_point() and values.numel() > 0


def _numbers(scalars: list[torch.Tensor]) -> Iterator[float]:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for scalar in scalars:
        by_device.setdefault(scalar.device, []).append(scalar.float())
    read = {device: iter(torch.stack(s).tolist()) for device, s in by_device.items()}
    return iter([next(read[scalar.device]) for scalar in scalars])


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The tensors of a module's arguments, in order."""
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type != "meta":
            yield value
        elif hasattr(value, "device_mesh"):
            yield cast("Any", value)._local_tensor
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        yield torch.from_numpy(np.ascontiguousarray(value))
    elif depth:
        inner: Iterable[Any] = ()
        if isinstance(value, dict) or (hasattr(value, "data") and hasattr(value, "keys")):
            inner = [value[key] for key in sorted(value.keys(), key=str)]
        elif isinstance(value, (list, tuple)):
            inner = value
        elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
            inner = list(vars(value).values())
        for one in inner:
            yield from tensors_in(one, depth - 1)
