"""Finds the module that computes the first bad number, by comparison with a wider precision.

Hooks record for every call of a module the largest magnitude and a few elements of its input, its
output and their gradients. The same calls in a wider precision show what they should be. A module
is named if its input was right and its output was not; if a bad number arose between two modules,
the module around them made it.

Hooks run in the order of their registration: these run last, after the engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

_ELEMENTS = 128  # recorded per tensor
# Relative error of the recorded elements together. Rounding to BF16 caused less than 0.1 at every
# depth that was tried; a broken operation is off by more than the numbers themselves.
_MOST_RELATIVE_ERROR = 0.5
_LEAST = 1e-3  # of the largest element, if all recorded ones are almost zero
_FAR = 4.0  # ratio to the expected largest magnitude, for an element that was not recorded


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """The recorded numbers of one tensor of a call."""

    largest: float
    elements: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.largest)

    def is_off(self, right: TensorSummary) -> bool:
        """Whether it differs from the right numbers by more than rounding."""
        if not right.is_finite:
            return False  # the right numbers are unknown
        if not self.is_finite:
            return True
        if len(self.elements) != len(right.elements):
            return False
        size = math.hypot(*right.elements)
        distance = math.dist(self.elements, right.elements)
        return (
            distance > _MOST_RELATIVE_ERROR * size + _LEAST * right.largest
            or self.largest > _FAR * right.largest
        )


# A module's name, and the summaries of its "in", "out", "grad_out" and "grad_in", if recorded.
Calls = Sequence[tuple[str, Mapping[str, TensorSummary]]]


class ModuleWatch:
    """Records all calls of a network's modules, in the order in which they ended."""

    def __init__(self) -> None:
        # By module, the tensors of a call as FP64 [1 + elements]: largest magnitude, elements.
        self._calls: list[tuple[str, dict[str, torch.Tensor]]] = []

    @contextmanager
    def over(self, network: nn.Module) -> Iterator[None]:
        """Record while the network computes inside of this context."""
        self._calls = []
        handles = [
            module.register_forward_hook(partial(self._note, name), with_kwargs=True)
            for name, module in network.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def calls(self) -> Calls:
        """The recorded calls; waits for the device."""
        return [
            (name, {kind: _summary(tensor) for kind, tensor in tensors.items()})
            for name, tensors in self._calls
        ]

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call: dict[str, torch.Tensor] = {}
        self._calls.append((name, call))

        def note(kind: str, value: torch.Tensor) -> None:
            call[kind] = _summarise(value)

        for kind, value in (("in", (args, kwargs)), ("out", output)):
            tensor = _first_tensor(value)
            if tensor is not None:
                note(kind, tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    at_gradient = partial(note, f"grad_{kind}")
                    tensor.register_hook(at_gradient)  # type: ignore[no-untyped-call]


def first_bad(calls: Calls, right: Calls) -> str | None:
    """The module that computed the first bad number; None if none can be named.

    Args:
        right: the same calls in a wider precision.
    """
    if [name for name, _ in calls] != [name for name, _ in right]:
        return None
    off = [
        (name, {what: value.is_off(good[what]) for what, value in tensors.items() if what in good})
        for (name, tensors), (_, good) in zip(calls, right, strict=True)
    ]
    return _first_forward(off) or _first_backward(off)


_OffTensors = list[tuple[str, dict[str, bool]]]


def _first_forward(off: _OffTensors) -> str | None:
    """The first call with a bad output, which is innermost: inner calls end before outer ones."""
    for index, (name, flags) in enumerate(off):
        if not flags.get("out"):
            continue
        if flags.get("in"):
            return _around(name, off[index:])
        return name
    return None


def _around(name: str, later: _OffTensors) -> str | None:
    """The innermost module around ``name`` whose own input was right."""
    while name:
        name = name.rpartition(".")[0]
        tensors_off = next((one for other, one in later if other == name), None)
        if tensors_off is not None and not tensors_off.get("in"):
            return name
    return None


def _first_backward(off: _OffTensors) -> str | None:
    """The innermost module with a right gradient of its output and a bad one of its input."""
    candidates = [
        name for name, flags in off if flags.get("grad_in") and flags.get("grad_out") is False
    ]
    names = {
        name
        for name in candidates
        if not any(o != name and (o.startswith(f"{name}.") or not name) for o in candidates)
    }
    if len(names) > 1:  # they share an input, whose gradient is the sum of theirs
        names = {name.rpartition(".")[0] for name in names}
    return names.pop() if len(names) == 1 else None


def largest_by_module(calls: Calls, right: Calls) -> dict[str, list[float]]:
    """The largest output magnitude of each module, here and in the wider precision."""
    largest: dict[str, list[float]] = {}
    for (name, tensors), (_, good) in zip(calls, right, strict=False):
        if "out" in tensors and "out" in good:
            pair = largest.get(name, [0.0, 0.0])
            now = (tensors["out"].largest, good["out"].largest)
            largest[name] = np.maximum(pair, now).tolist()  # NaN is the largest
    return largest


@torch.no_grad()
def _summarise(tensor: torch.Tensor) -> torch.Tensor:
    """FP64 [1 + n]: the largest magnitude (NaN if there is one), and evenly spread elements."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return torch.zeros(1, dtype=torch.float64, device=tensor.device)
    step = max(1, flat.numel() // _ELEMENTS)
    return torch.cat([flat.abs().amax().double()[None], flat[::step][:_ELEMENTS].double()])


def _summary(noted: torch.Tensor) -> TensorSummary:
    largest, *elements = noted.tolist()
    return TensorSummary(largest, tuple(elements))


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first floating-point tensor in a module's arguments or output."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return None
