"""Finds what a script keeps beside the optimizer: copies of the weights, scalers, schedules."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module"}
Shapes = dict[str, "tuple[int, ...]"]
_OWN_REFERENCES = 3  # to a container: ours, the local name, the argument of getrefcount


def plain_name(name: str) -> str:
    """The name of a parameter without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ModelCopy:
    """A second set of tensors of the weights' names or shapes, such as an EMA.

    Args:
        holder: a weak reference to a module, or a dictionary or list of tensors.
    """

    def __init__(self, label: str, holder: Any) -> None:
        self.label = label
        self._holder = holder

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name; empty when nobody else holds it any more."""
        holder = self._holder
        if isinstance(holder, weakref.ref):
            module = holder()
            return {} if module is None else _state(module)
        if holder is None or sys.getrefcount(holder) < _OWN_REFERENCES + 1:
            self._holder = None
            return {}
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        return {plain_name(str(key)): t for key, t in items if isinstance(t, torch.Tensor)}


class Found:
    """What a look at all objects of the process has found so far."""

    def __init__(self) -> None:
        self.copies: list[ModelCopy] = []
        self.scalers: list[Any] = []  # weak references, as are those of the schedules
        self.schedules: list[Any] = []
        self._seen: set[int] = set()

    def look(self, weights: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """Look again.

        Args:
            weights: the trained parameters by name.
            others: tensors that are no copies: gradients, the optimizer's state.
        """
        known = {id(tensor) for tensor in weights.values()} | {id(t) for t in others}
        modules = modules_of_process()
        names = _names_of_trained(modules, weights)
        shapes = [*names[0].values()]
        scaler, schedule = torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler
        for thing in gc.get_objects():
            kind = type(thing)
            if id(thing) in self._seen:
                continue
            if kind is dict:
                if len(thing) > 1 and _are_copies_by_name(thing, names, known):
                    self._add(f"dictionary of {len(thing)} tensors", thing)
            elif kind is list or kind is tuple:
                if len(thing) == len(shapes) > 1 and _are_copies(thing, shapes, known):
                    self._add(f"list of {len(thing)} tensors", thing)
            elif issubclass(kind, scaler):
                self.scalers.append(self._weak(thing))
            elif issubclass(kind, schedule):
                self.schedules.append(self._weak(thing))
        self._look_at([m for m in modules if id(m) not in self._seen], names, known)

    def _look_at(self, modules: list[Any], names: list[Shapes], known: set[int]) -> None:
        inner: set[int] = set()
        sized = [(sum(1 for _ in module.modules()), module) for module in modules]
        for _, module in sorted(sized, key=lambda pair: -pair[0]):
            own = {plain_name(name): p for name, p in module.named_parameters()}
            shapes = _shapes(own)
            # The names of all trained parameters say enough: those may be sharded, and this not.
            is_copy = bool(names[0]) and names[0].keys() <= own.keys()
            is_copy = is_copy or any(one.items() <= shapes.items() for one in names[1:])
            if not is_copy or id(module) in inner or known & {id(p) for p in own.values()}:
                continue
            parts = {id(part) for part in module.modules()}
            inner |= parts
            self._seen |= parts  # what it wraps is no further copy, also in a later look
            self.copies.append(ModelCopy(type(module).__name__, weakref.ref(module)))

    def _add(self, label: str, thing: Any) -> None:
        self._seen.add(id(thing))
        self.copies.append(ModelCopy(label, thing))

    def _weak(self, thing: Any) -> Any:
        self._seen.add(id(thing))
        return weakref.ref(thing)


def _state(module: Any) -> dict[str, torch.Tensor]:
    # Counters, but no running statistics: those of a copy follow the model's on each rank.
    counters = [(name, b) for name, b in module.named_buffers() if b.numel() == 1]
    named = [*module.named_parameters(), *counters]
    return {plain_name(name): tensor for name, tensor in named}


def modules_of_process() -> list[Any]:
    """All that live."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]


def _names_of_trained(modules: list[Any], weights: Mapping[str, torch.Tensor]) -> list[Shapes]:
    """What a copy may be of: all trained parameters, or a module that holds half of them or more.

    Such a part, as the network in a Lightning module, has names of its own.
    """
    trained, found = {id(tensor) for tensor in weights.values()}, [_shapes(weights)]
    for module in modules:
        own = {plain_name(n): p for n, p in module.named_parameters() if id(p) in trained}
        if own and len(own) * 2 >= len(weights) and _shapes(own) not in found:
            found.append(_shapes(own))
    return found


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _are_copies_by_name(thing: dict[Any, Any], names: list[Shapes], known: set[int]) -> bool:
    # Most dictionaries of a process hold no tensors: renaming their keys would take seconds.
    least = min(map(len, names))
    # By type: isinstance asks objects for their class, which torch's deprecated ones warn of.
    tensors = (issubclass(type(value), torch.Tensor) for value in thing.values())
    if len(thing) < least or least > sum(tensors):
        return False
    if not all(type(key) is str for key in thing):
        return False
    own = {plain_name(key): value for key, value in thing.items()}
    return any(
        one.keys() <= own.keys() and _are_copies([own[name] for name in one], one.values(), known)
        for one in names
    )


def _are_copies(things: Any, shapes: Iterable[tuple[int, ...]], known: set[int]) -> bool:
    return all(
        isinstance(thing, torch.Tensor)
        and tuple(thing.shape) == shape
        and id(thing) not in known
        and thing.is_floating_point()
        and not thing.requires_grad
        for thing, shape in zip(things, shapes)  # noqa: B905  (of any Python)
    )
