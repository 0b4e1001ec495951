"""One line of the record: the state that an optimizer step begins with, and what it reads."""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from .digests import Digests, short
from .found import Found, plain_name

_LOOKS = 3  # steps of a process before which its objects are looked at


class Roots:
    """The modules that the script itself calls with gradients, as far as they live."""

    def __init__(self) -> None:
        self._modules: list[Any] = []  # weak references, whose places are the modules' numbers

    def add(self, module: Any) -> None:
        """Add one that is called."""
        if all(ref() is not module for ref in self._modules):
            self._modules.append(weakref.ref(module))

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
    """Takes the digests of one optimizer's step."""

    def __init__(self, optimizer: Any, digests: Digests) -> None:
        self.optimizer, self._digests = optimizer, digests
        self.groups = optimizer.param_groups  # of the step in hand, see the recorder
        self.found = Found()
        self._num_before = 0

    @property
    def is_first(self) -> bool:
        """Whether the step in hand is the first of this process."""
        return self._num_before == 1

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.groups for p in group["params"]]

    def _names(self, roots: Roots) -> list[list[str]]:
        """Of the parameters of each group; by number where no module has them."""
        names = {id(parameter): name for name, parameter in roots.named("parameters")}
        return [
            [names.get(id(p), f"group {g}, parameter {n}") for n, p in enumerate(group["params"])]
            for g, group in enumerate(self.groups)
        ]

    def before(self, roots: Roots) -> dict[str, Any]:
        """What the step begins with: weights, state, options, scalers, copies; keyed by place."""
        self._num_before += 1
        parameters = self._parameters()
        state = [dict(flat_state(self.optimizer.state.get(p, {}))) for p in parameters]
        tensors = [v for one in state for v in one.values() if isinstance(v, torch.Tensor)]
        if self._num_before <= _LOOKS:
            names = [name for names in self._names(roots) for name in names]
            grads = [p.grad for p in parameters if p.grad is not None]
            weights = dict(zip(names, parameters))  # noqa: B905
            self.found.look(weights, [*tensors, *grads])
        entries = iter(self._digests.of([*parameters, *tensors], precision=self.is_first))
        line: dict[str, Any] = {"weights": [next(entries) for _ in parameters]}
        line["state"] = [
            {k: next(entries) if isinstance(v, torch.Tensor) else ["", v] for k, v in one.items()}
            for one in state
        ]
        line["options"] = [
            {k: plain(v) for k, v in group.items() if k not in ("params", "param_names")}
            for group in self.groups
        ]
        line["copies"] = {}
        for number, copy in enumerate(self.found.copies):
            if held := copy.tensors():
                label = f"{copy.label} ({number + 1})" if number else copy.label
                own = self._digests.of(list(held.values()))
                line["copies"][label] = dict(zip(held, own))  # noqa: B905
        line["scalers"] = [_scaler(ref()) for ref in self.found.scalers if ref() is not None]
        schedules = [ref() for ref in self.found.schedules]
        line["schedules"] = [plain(s.last_epoch) for s in schedules if s is not None]
        return line

    def about(self, roots: Roots) -> dict[str, Any]:
        """What is recorded once: names, the weights' bytes, and parameters that nobody trains."""
        own = {id(p) for p in self._parameters()}
        left = {
            name: p
            for name, p in roots.named("parameters")
            if id(p) not in own and not p.requires_grad
        }
        entries = self._digests.of(list(left.values()), precision=True)
        return {
            "names": self._names(roots),
            "frozen": dict(zip(left, entries)),  # noqa: B905
            "num_bytes": sum(p.numel() * p.element_size() for p in self._parameters()),
        }

    def gradients(self) -> list[Any]:
        """Of each parameter; None where it has none."""
        grads = [p.grad for p in self._parameters()]
        entries = iter(self._digests.of([grad for grad in grads if grad is not None]))
        return [None if grad is None else next(entries) for grad in grads]


def _scaler(scaler: Any) -> dict[str, Any]:
    if not scaler.is_enabled():
        return {}
    scale = scaler._scale if scaler._scale is not None else scaler._init_scale
    tracker = scaler._growth_tracker
    count = tracker if tracker is not None else scaler._init_growth_tracker
    return {"scale": plain(scale), "growth_tracker": plain(count)}
