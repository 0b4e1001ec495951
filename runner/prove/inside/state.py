"""One line of the record: the state that an optimizer step begins with, and what it reads."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .digests import Digests, short
from .found import Found, plain_name

_LOOKS = 3  # steps of a process before which its objects are looked at


def named_parameters(optimizer: Any, roots: list[Any]) -> list[list[str]]:
    """The names of the parameters of each group; by number where no module has them."""
    names: dict[int, str] = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            names.setdefault(id(parameter), plain_name(name))
    return [
        [names.get(id(p), f"group {g}, parameter {n}") for n, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """The options of each group as plain values."""
    groups = [
        {key: plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return groups


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
        self.found = Found()
        self._num_before = 0

    def before(self, roots: list[Any]) -> dict[str, Any]:
        """What the step begins with: weights, state, options, scalers, copies; keyed by place."""
        self._num_before += 1
        groups = self.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        state = [dict(flat_state(self.optimizer.state.get(p, {}))) for p in parameters]
        tensors = [v for one in state for v in one.values() if isinstance(v, torch.Tensor)]
        is_first = self._num_before == 1
        if self._num_before <= _LOOKS:
            names = [name for names in named_parameters(self.optimizer, roots) for name in names]
            grads = [p.grad for p in parameters if p.grad is not None]
            weights = dict(zip(names, parameters))  # noqa: B905
            self.found.look(weights, [*tensors, *grads])
        entries = iter(self._digests.of([*parameters, *tensors], precision=is_first))
        line: dict[str, Any] = {"weights": [next(entries) for _ in parameters]}
        line["state"] = [
            {k: next(entries) if isinstance(v, torch.Tensor) else ["", v] for k, v in one.items()}
            for one in state
        ]
        line["options"] = options_of(self.optimizer)
        line["copies"] = {}
        for number, copy in enumerate(self.found.copies):
            if held := copy.tensors():
                label = f"{copy.label} ({number + 1})" if number else copy.label
                own = self._digests.of(list(held.values()))
                line["copies"][label] = dict(zip(held, own))  # noqa: B905
        line["scalers"] = [_scaler(ref()) for ref in self.found.scalers if ref() is not None]
        line["schedules"] = [
            plain(getattr(ref(), "last_epoch", None))
            for ref in self.found.schedules
            if ref() is not None
        ]
        return line

    def frozen(self, roots: list[Any]) -> dict[str, list[Any]]:
        """Parameters of the modules that this optimizer does not train."""
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        left = {
            plain_name(name): p
            for root in roots
            for name, p in root.named_parameters()
            if id(p) not in own and not p.requires_grad
        }
        return dict(zip(left, self._digests.of(list(left.values()), precision=True)))  # noqa: B905

    def gradients(self) -> list[Any]:
        """Of each parameter; None where it has none."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        entries = iter(self._digests.of([p.grad for p in parameters if p.grad is not None]))
        return [None if p.grad is None else next(entries) for p in parameters]

    def num_bytes(self) -> int:
        """Of the weights that this rank trains."""
        groups = self.optimizer.param_groups
        return sum(p.numel() * p.element_size() for group in groups for p in group["params"])


def _scaler(scaler: Any) -> dict[str, Any]:
    if not scaler.is_enabled():
        return {}
    scale = scaler._scale if scaler._scale is not None else scaler._init_scale
    tracker = scaler._growth_tracker
    count = tracker if tracker is not None else scaler._init_growth_tracker
    return {"scale": plain(scale), "growth_tracker": plain(count)}


class Written:
    """Tells which files of a folder are new or have changed since the last look."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._known: dict[str, tuple[int, int, int]] = {}
        self.look()

    def look(self) -> list[list[Any]]:
        """[path below the folder, bytes] of each."""
        changed: list[list[Any]] = []
        waiting = [self._folder] if self._folder else []
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
                        elif entry.is_file(follow_symlinks=False):
                            about = entry.stat(follow_symlinks=False)
                            mark = (about.st_mtime_ns, about.st_size, about.st_ino)
                            if self._known.get(entry.path) != mark:
                                self._known[entry.path] = mark
                                name = os.path.relpath(entry.path, self._folder)
                                changed.append([name, about.st_size])
            except OSError:  # removed meanwhile
                continue
        return changed
