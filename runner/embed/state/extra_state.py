"""State of modules beside tensors: what ``get_extra_state`` returns, and counters.

A discard undoes what forward passes changed of it, and it is saved in checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runner.embed.state.codec import pack, unpack

_log = logging.getLogger(__name__)
_COMPARED = 3  # first steps, in which the numbers of every module are compared
_NUMBERS = (int, float)


class ExtraState:
    """The extra state and the counters of modules.

    A counter is a number in an attribute that a forward pass has changed. Modules of torch and of
    libraries around it are left alone.

    Args:
        modules: by name.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = {
            name: module
            for name, module in modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        self._counting = {
            name: module for name, module in modules if not _is_of_a_library(type(module))
        }
        self._num_captured = 0
        # Names of modules and attributes; their numbers from before the first change.
        self._counters: dict[tuple[str, str], int | float] = {}
        self._extra: dict[str, Any] = {}
        self._numbers: dict[str, dict[str, Any]] = {}
        self._older = (self._numbers, self._extra)
        self._others: dict[str, dict[str, int]] = {}  # identities of what is no number
        self._caching: set[str] = set()  # names of modules in which such things change

    def capture(self) -> None:
        """Remember the state from before a batch, for :meth:`restore`."""
        self._older = (self._numbers, self._extra)
        if self._num_captured <= _COMPARED:
            self._num_captured += 1
            self._find_counters()
            self._numbers = {name: _numbers(module) for name, module in self._counting.items()}
            self._others = {name: _others(module) for name, module in self._counting.items()}
        else:
            self._numbers = self._counted()
        self._extra = self._packed()

    def restore_older(self) -> None:
        """Undo changes since the :meth:`capture` before the last."""
        self._find_counters()
        self._numbers, self._extra = self._older
        self.restore()

    def restore(self) -> None:
        """Undo changes since :meth:`capture`."""
        self._find_counters()
        for name, key in self._counters:
            if key in self._numbers.get(name, {}):
                setattr(self._counting[name], key, self._numbers[name][key])
        self._unpack(self._extra)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values.

        Raises:
            ConfigError: a module's extra state cannot be saved.
        """
        self._find_counters()
        saved = {
            name: numbers for name, numbers in self._counted().items() if name not in self._caching
        }
        return {"extra": self._packed(), "counters": saved}

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`; checkpoints of an older version have none."""
        counters = stored.get("counters", {})
        for name, numbers in counters.items():
            for key, value in numbers.items():
                if name in self._counting and hasattr(self._counting[name], key):
                    self._counters.setdefault((name, key), getattr(self._counting[name], key))
                    setattr(self._counting[name], key, value)
        for (name, key), value in self._counters.items():  # of a checkpoint from before it changed
            if name not in self._caching and key not in counters.get(name, {}):
                setattr(self._counting[name], key, value)
        self._unpack(stored.get("extra", {}))
        self._numbers = self._counted()
        self._extra = self._packed()

    def _find_counters(self) -> None:
        for name, before in self._numbers.items():
            now = _numbers(self._counting[name]) if before else {}
            changed = {key for key in before if key in now and now[key] != before[key]}
            for key in changed:
                self._counters.setdefault((name, key), before[key])
            if changed and self._others.get(name) != _others(self._counting[name]):
                self._warn(name, sorted(changed))

    def _warn(self, name: str, keys: Sequence[str]) -> None:
        if name not in self._caching:
            self._caching.add(name)
            _log.warning(
                "Guard: a forward pass changes %s of %s, and other attributes beside it: a discard "
                "undoes the numbers, but no checkpoint has them; if they matter, make them buffers",
                ", ".join(f".{key}" for key in keys),
                name or "the model",
            )

    def _counted(self) -> dict[str, dict[str, Any]]:
        counted: dict[str, dict[str, Any]] = {}
        for name, key in sorted(self._counters):
            value = vars(self._counting[name]).get(key)
            if type(value) in _NUMBERS and value == value:
                counted.setdefault(name, {})[key] = value
        return counted

    def _packed(self) -> dict[str, Any]:
        return {
            name: pack(module.get_extra_state(), f"the extra state of {name or 'the model'}")
            for name, module in self._modules.items()
        }

    def _unpack(self, stored: Mapping[str, Any]) -> None:
        for name, state in stored.items():
            if name in self._modules:
                self._modules[name].set_extra_state(unpack(state))


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(module).items()
        if type(value) in _NUMBERS and value == value  # NaN is no count
    }


def _others(module: nn.Module) -> dict[str, int]:
    """What may be a cache beside a number that says how far it reaches."""
    return {
        key: id(value)
        for key, value in vars(module).items()
        if value is None or isinstance(value, torch.Tensor | list | dict)
    }


def _is_of_a_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in (
        "torch",
        "transformers",
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "deepspeed",
        "peft",
    )
