"""Which module of a network gives the first bad numbers: one computation against a wider one.

Hooks note of every call of a module how large its input and its output are, and a few of their
elements; of the gradients that come back likewise. The same calls in a wider precision tell what
they should have been. A module is named whose input was right and whose output was not; where a
bad number came between two modules, it is the one around them that made it.

Hooks run in the order of their registration: these come last, behind the engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_ELEMENTS = 128  # of a tensor that are noted
# Relative, of the noted elements together: BF16 has rounded them by less than 0.1 in any depth that
# was tried, and an operation that breaks is off by more than the numbers themselves.
_BAD = 0.5
_LEAST = 1e-3  # of the largest element: where all that were noted are next to nothing
_FAR = 4.0  # times as large as it should be, for one element that was not noted


@dataclass(slots=True)
class _Call:
    """One call of a module; of each tensor FP64 [1 + elements]: largest magnitude, elements."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was noted of one tensor of a call."""

    largest: float
    elements: tuple[float, ...]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.largest)

    def is_off(self, right: Seen) -> bool:
        """Whether it is another number than it should be, by more than rounding."""
        if not right.is_finite:
            return False  # nobody knows what it should be
        if not self.is_finite:
            return True
        if len(self.elements) != len(right.elements):
            return False
        size = math.hypot(*right.elements)
        apart = math.dist(self.elements, right.elements)
        return apart > _BAD * size + _LEAST * right.largest or self.largest > _FAR * right.largest


# Module, and what was noted of its "in", "out", "grad_out" and "grad_in" where there were such.
Calls = Sequence[tuple[str, Mapping[str, Seen]]]


class ModuleWatch:
    """Notes all calls of a network's modules, in the order in which they ended."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    @contextmanager
    def over(self, network: nn.Module) -> Iterator[None]:
        """While it computes."""
        self._calls = []
        handles = [
            module.register_forward_hook(self._hook(name), with_kwargs=True)
            for name, module in network.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def calls(self) -> Calls:
        """Waits for the device."""
        return [
            (call.name, {what: _seen(tensor) for what, tensor in call.tensors.items()})
            for call in self._calls
        ]

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = _Call(name)
            self._calls.append(call)
            for what, value in (("in", (args, kwargs)), ("out", output)):
                tensor = _first_tensor(value)
                if tensor is None:
                    continue
                call.tensors[what] = _noted(tensor)
                if tensor.requires_grad and torch.is_grad_enabled():
                    note = self._at_gradient(call, f"grad_{what}")
                    tensor.register_hook(note)  # type: ignore[no-untyped-call]

        return hook

    @staticmethod
    def _at_gradient(call: _Call, what: str) -> Any:
        def note(grad: torch.Tensor) -> None:
            call.tensors[what] = _noted(grad)

        return note


def first_bad(calls: Calls, right: Calls) -> str | None:
    """The module that made the first bad number; None where nobody can be named.

    Args:
        right: the same calls in a wider precision.
    """
    if [name for name, _ in calls] != [name for name, _ in right]:
        return None
    off = [
        (name, {what: seen.is_off(good[what]) for what, seen in one.items() if what in good})
        for (name, one), (_, good) in zip(calls, right, strict=True)
    ]
    return _first_forward(off) or _first_backward(off)


_Off = list[tuple[str, dict[str, bool]]]


def _first_forward(off: _Off) -> str | None:
    """The first that ended with a bad output is an innermost one: what is inside ended before."""
    for at, (name, one) in enumerate(off):
        if not one.get("out"):
            continue
        if one.get("in"):
            return _around(name, off[at:])
        return name
    return None


def _around(name: str, later: _Off) -> str | None:
    """The innermost module around ``name`` whose own input was right."""
    while name:
        name = name.rpartition(".")[0]
        told = next((one for other, one in later if other == name), None)
        if told is not None and not told.get("in"):
            return name
    return None


def _first_backward(off: _Off) -> str | None:
    """The innermost whose output's gradient was right and whose input's was not."""
    made = [name for name, one in off if one.get("grad_in") and one.get("grad_out") is False]
    innermost = [one for one in made if not any(_is_inside(other, one) for other in made)]
    names = list(dict.fromkeys(innermost))
    if len(names) > 1:  # they share an input: its gradient is the sum of theirs
        parents = {name.rpartition(".")[0] for name in names}
        return parents.pop() if len(parents) == 1 else None
    return names[0] if names else None


def _is_inside(inner: str, outer: str) -> bool:
    return inner != outer and (inner.startswith(f"{outer}.") or not outer)


def largest_by_module(calls: Calls, right: Calls) -> dict[str, list[float]]:
    """Of each module's outputs the largest magnitude, here and in the wider precision."""
    found: dict[str, list[float]] = {}
    for (name, one), (_, good) in zip(calls, right, strict=False):
        if "out" in one and "out" in good:
            pair = found.setdefault(name, [0.0, 0.0])
            pair[0] = _larger(pair[0], one["out"].largest)
            pair[1] = _larger(pair[1], good["out"].largest)
    return found


def _larger(one: float, other: float) -> float:
    return other if math.isnan(other) or other > one else one


@torch.no_grad()
def _noted(tensor: torch.Tensor) -> torch.Tensor:
    """FP64 [1 + n]: the largest magnitude, NaN among them told, and elements evenly spread."""
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return torch.zeros(1, dtype=torch.float64, device=tensor.device)
    step = max(1, flat.numel() // _ELEMENTS)
    return torch.cat([flat.abs().amax().double()[None], flat[::step][:_ELEMENTS].double()])


def _seen(noted: torch.Tensor) -> Seen:
    largest, *elements = noted.tolist()
    return Seen(largest, tuple(elements))


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first floating-point tensor in a module's arguments or output."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((t for t in map(_first_tensor, value) if t is not None), None)
    return None
