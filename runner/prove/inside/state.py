"""One line of the record: the state that an optimizer step begins with, and what it reads."""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from .digests import Digests, short
from .found import Found, modules_of_process, plain_name

_NO_OPTIONS = ("params", "param_names")
_LOOKS = 3  # steps of a process before which its objects are looked at


class Roots:
    """The modules that the script itself calls with gradients, as far as they live."""

    def __init__(self) -> None:
        self._modules: list[Any] = []  # weak references, whose places are the modules' numbers

    def add(self, module: Any) -> None:
        """Add one that is called."""
        if all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))

    def add_holder(self, parameters: Collection[torch.Tensor]) -> None:
        """Add the innermost module that holds the most of them, where none of them has a name.

        A step that calls the model itself, as Lightning's, begins before any module is called.
        """
        wanted = {id(parameter) for parameter in parameters}
        if any(id(tensor) in wanted for _, tensor in self.named("parameters")):
            return

        def size(module: Any) -> tuple[int, int]:
            held = sum(id(parameter) in wanted for parameter in module.parameters())
            return held, -sum(1 for _ in module.modules())

        best = max(modules_of_process(), key=size, default=None)
        if best is not None and size(best)[0]:
            self.add(best)

    def named(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of all ``parameters`` or ``buffers``; each has one name."""
        seen: set[int] = set()
        for number, ref in enumerate(self._modules):
            module = ref()
            for name, tensor in getattr(module, f"named_{kind}")() if module is not None else ():
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield (f"module {number + 1}: " if number else "") + plain_name(name), tensor


def plain(value: Any) -> Any:
    """A JSON value for an option."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return type(value).__name__


def random_states() -> dict[str, str]:
    """Digests of the generators of this process."""
    states: dict[str, bytes] = {"python": pickle.dumps(random.getstate())}
    states["torch"] = torch.get_rng_state().numpy().tobytes()
    if "numpy" in sys.modules:
        import numpy as np

        states["numpy"] = pickle.dumps(np.random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: short(state) for name, state in states.items()}


def flat_state(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(key, tensor or number) of a nested optimizer state."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat_state(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from flat_state(inner, f"{key}.{number}")
    elif isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool):
        yield key, value


class StepState:
    """Takes the digests of one optimizer's step, by the names of its parameters.

    Args:
        number: of the optimizer, from 0; the names of later ones' parameters say it.
    """

    def __init__(self, optimizer: Any, digests: Digests, number: int) -> None:
        self._optimizer, self._digests = optimizer, digests
        self._prefix = f"optimizer {number + 1}: " if number else ""
        self._names: list[list[str]] = []
        self._found = Found()
        self._num_before = 0

    @property
    def is_first(self) -> bool:
        """Whether the step in hand is the first of this process."""
        return self._num_before == 1

    def _parameters(self) -> dict[str, torch.Tensor]:
        pairs = zip(self._names, self._groups)  # noqa: B905
        return {n: p for names, group in pairs for n, p in zip(names, group["params"])}  # noqa: B905

    def _state(self) -> dict[str, Any]:
        return {
            f"{name}/{key}": value
            for name, p in self._parameters().items()
            for key, value in flat_state(self._optimizer.state.get(p, {}))
        }

    def _learned(self) -> dict[str, Any]:
        """What a step changes."""
        state = self._state()
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        numbers = {key: ["", value] for key, value in state.items() if key not in tensors}
        return {
            "weights": self._digests.named(self._parameters(), precision=self.is_first),
            "state": numbers | self._digests.named(tensors, precision=self.is_first),
        }

    def was_rehearsal(self, line: Mapping[str, Any]) -> bool:
        """Whether the step, at a rate of 0, has left weights and state as they were.

        Args:
            line: what it began with.
        """
        if any(group.get("lr", 1) for group in self._groups):
            return False
        now = self._learned()
        empty = {key: entry for key, entry in now["state"].items() if not entry[1]}
        is_one = bool(now["state"]) and line["weights"] == now["weights"]
        is_one = is_one and bool((line["state"] or empty) == now["state"])
        self._num_before -= is_one
        return is_one

    def begin(self, roots: Roots) -> dict[str, Any]:
        """:meth:`before`, with the optimizer's groups as they are now."""
        self._groups = self._optimizer.param_groups
        if [len(names) for names in self._names] != [len(g["params"]) for g in self._groups]:
            roots.add_holder([p for group in self._groups for p in group["params"]])
            known = {id(parameter): name for name, parameter in roots.named("parameters")}
            self._names = [
                [
                    self._prefix + known.get(id(p), f"group {g}, parameter {n}")
                    for n, p in enumerate(group["params"])
                ]
                for g, group in enumerate(self._groups)
            ]
        return self.before()

    def before(self) -> dict[str, Any]:
        """What the step begins with: weights, state, options, scalers, copies."""
        self._num_before += 1
        if self._num_before <= _LOOKS:
            parameters = self._parameters()
            grads = [p.grad for p in parameters.values() if p.grad is not None]
            start = len(self._prefix)
            weights = {name[start:]: p for name, p in parameters.items()}
            tensors = [t for t in self._state().values() if isinstance(t, torch.Tensor)]
            self._found.look(weights, [*tensors, *grads])
        copies = {f"{self._prefix}{n + 1} {c.label}": c for n, c in enumerate(self._found.copies)}
        told = {label: self._digests.named(copy.tensors()) for label, copy in copies.items()}
        return self._learned() | {
            "options": [
                [names, {k: plain(v) for k, v in group.items() if k not in _NO_OPTIONS}]
                for names, group in zip(self._names, self._groups)  # noqa: B905
            ],
            "copies": {label: tensors for label, tensors in told.items() if tensors},
            "scalers": [_scaler(scaler) for ref in self._found.scalers if (scaler := ref())],
            "schedules": [plain(s.last_epoch) for ref in self._found.schedules if (s := ref())],
        }

    def about(self, roots: Roots) -> dict[str, Any]:
        """What is recorded once: the weights' bytes, and parameters that nobody trains."""
        trained = self._parameters().values()
        own = {id(p) for p in trained}
        frozen = {
            name: p
            for name, p in roots.named("parameters")
            if id(p) not in own and not p.requires_grad
        }
        return {
            "frozen": self._digests.named(frozen, precision=True),
            "num_bytes": sum(p.numel() * p.element_size() for p in trained),
        }

    def gradients(self) -> dict[str, Any]:
        """Of each parameter; None where it has none."""
        grads = {name: p.grad for name, p in self._parameters().items()}
        own = self._digests.named({name: g for name, g in grads.items() if g is not None})
        return {name: own.get(name) for name in grads}


def _scaler(scaler: Any) -> dict[str, Any]:
    if not scaler.is_enabled():
        return {}
    scale = scaler._scale if scaler._scale is not None else scaler._init_scale
    tracker = scaler._growth_tracker
    count = tracker if tracker is not None else scaler._init_growth_tracker
    return {"scale": plain(scale), "growth_tracker": plain(count)}
