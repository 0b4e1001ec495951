"""What forward passes and the loop change in modules: buffers, extra state, counters, modes.

A discard undoes what forward passes changed (running statistics), and all of it is saved in
checkpoints: a rollback undoes a freezing, and a restart finds it as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.agreement import Ranks
from runner.embed.state.codec import pack, unpack
from runner.embed.state.stages import Stages
from runner.engine.buffers import BufferCopy, has_running_statistics
from runner.model.quantised import (
    NO_BASE,
    digest_of,
    inexact,
    is_packed,
    keep_layout,
    quantised_weights,
    require_one_base,
    require_same_base,
)
from runner.system.error import ConfigError

_log = logging.getLogger(__name__)
_COMPARED = 3  # first steps, in which every buffer, and the numbers of every module are compared
_NUMBERS = (int, float)


class Modes:
    """``requires_grad`` of parameters and ``training`` of modules.

    Args:
        modules: by name.
        parameters: by name.
    """

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self._modules = dict(modules)
        self._parameters = dict(parameters)

    def to_json(self) -> dict[str, list[str]]:
        """Names of what is frozen, and of what is in evaluation mode."""
        return {
            "frozen": [name for name, p in self._parameters.items() if not p.requires_grad],
            "evaluating": [name for name, module in self._modules.items() if not module.training],
        }

    def load_json(self, stored: Mapping[str, Sequence[str]]) -> None:
        """Inverse of :meth:`to_json`."""
        frozen, evaluating = set(stored["frozen"]), set(stored["evaluating"])
        for name, parameter in self._parameters.items():
            if parameter.requires_grad is (name in frozen):
                parameter.requires_grad_(name not in frozen)
        for name, module in self._modules.items():
            module.training = name not in evaluating


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

    def restore(self, *, older: bool = False) -> None:
        """Undo changes since :meth:`capture`; ``older``: since the one before the last."""
        self._find_counters()
        if older:
            self._numbers, self._extra = self._older
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
        """Inverse of :meth:`to_json`."""
        counters = stored["counters"]
        for name, numbers in counters.items():
            for key, value in numbers.items():
                if name in self._counting and hasattr(self._counting[name], key):
                    self._counters.setdefault((name, key), getattr(self._counting[name], key))
                    setattr(self._counting[name], key, value)
        for (name, key), value in self._counters.items():  # of a checkpoint from before it changed
            if name not in self._caching and key not in counters.get(name, {}):
                setattr(self._counting[name], key, value)
        self._unpack(stored["extra"])
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
    """Identities of attributes that may be caches, whose filled length a counter says."""
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
        "bitsandbytes",
        "torchao",
    )


@dataclass(slots=True)
class _GuardedCopy(BufferCopy):
    is_changing: bool = False
    older: torch.Tensor | None = None  # what ``copy`` was before; None: the same
    original: torch.Tensor | None = None  # from before its first change, and so in no checkpoint

    @property
    def was_written(self) -> bool:
        """Whether it is changing, was replaced, or was changed in place."""
        return self.is_changing or self.has_new_version

    def note_change(self) -> None:
        """It changes from now on, and ``copy`` is from before the first change."""
        if not self.is_changing:
            self.is_changing, self.original = True, self.copy.clone()


class Buffers:
    """Copies of the buffers from before a batch; only changed buffers are copied again.

    Args:
        named: names and modules; a quantised layer's are held otherwise.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self._kept: dict[str, _GuardedCopy] = {}
        self._num_compared = 0
        self._modules = [(name, module) for name, module in named if not is_packed(module)]
        # Registered as None, to be made by a forward pass: name, module, key.
        self._empty: dict[str, tuple[nn.Module, str]] = {}
        self._born: dict[str, tuple[nn.Module, str]] = {}  # made by a forward pass or a checkpoint
        self._known: set[tuple[int, str]] = set()  # identities of modules, and keys
        seen: set[int] = set()
        for prefix, module in self._modules:
            for key, buffer in module._buffers.items():
                if buffer is None:
                    self._empty[_joined(prefix, key)] = (module, key)
                    continue
                self._known.add((id(module), key))
                if id(buffer) not in seen:  # else another name of a buffer that is kept
                    seen.add(id(buffer))
                    kept = self._keep(_joined(prefix, key), module, key)
                    kept.is_changing = has_running_statistics(module)

    def _keep(self, name: str, module: nn.Module, key: str) -> _GuardedCopy:
        buffer = module._buffers[key]
        assert buffer is not None
        self._known.add((id(module), key))
        copy = buffer.detach().clone()
        self._kept[name] = _GuardedCopy(module, key, copy, buffer, buffer._version)
        return self._kept[name]

    def _unknown(self) -> list[tuple[str, nn.Module, str]]:
        """Buffers that were created since the last check: name, module, key."""
        return [
            (_joined(prefix, key), module, key)
            for prefix, module in self._modules
            for key, buffer in module._buffers.items()
            if buffer is not None and (id(module), key) not in self._known
        ]

    def _adopt(self) -> None:
        """Save what a forward pass has created, because it may depend on data."""
        for name, module, key in self._unknown():
            self._born[name] = (module, key)
            self._keep(name, module, key).is_changing = True

    def _forget(self, name: str, module: nn.Module, key: str) -> None:
        """Remove a buffer, as if it had not been created."""
        self._kept.pop(name, None)
        self._known.discard((id(module), key))
        if name in self._empty:
            module._buffers[key] = None
        else:
            module._buffers.pop(key, None)

    def give(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Create a buffer that a checkpoint holds and no forward pass has created here yet."""
        if name in self._empty and name not in self._born:
            module, key = self._empty[name]
            near = [*module.parameters(), *module.buffers()]
            device = near[0].device if near else None
            module._buffers[key] = torch.zeros(tuple(shape), dtype=dtype, device=device)
            self._adopt()

    def drop_all_but(self, names: Collection[str]) -> None:
        """Remove buffers that forward passes have created and a checkpoint does not hold."""
        for name in self._born.keys() - set(names):
            self._forget(name, *self._born.pop(name))

    def capture(self, *, keep_older: bool = False) -> None:
        """Copy the buffers, for :meth:`restore`.

        Args:
            keep_older: the copies from before can still be restored.

        Raises:
            ConfigError: a buffer has another shape than before.
        """
        self._adopt()
        compare = self._num_compared < _COMPARED
        self._num_compared += 1
        for kept in self._kept.values():
            live = kept.live
            if kept.was_written or (compare and not torch.equal(kept.copy, live)):
                kept.note_change()
                if keep_older:
                    kept.older = kept.copy.clone() if kept.older is None else kept.older
                    kept.older.copy_(kept.copy)
                kept.copy.copy_(live.detach())
                kept.remember()

    @torch.no_grad()
    def restore(self, *, older: bool = False) -> None:
        """Undo changes since :meth:`capture`; ``older``: since the one before the last."""
        for name, module, key in self._unknown():
            self._forget(name, module, key)
        for kept in self._kept.values():
            if older and kept.older is not None:
                kept.copy.copy_(kept.older)
            if kept.was_written:
                kept.note_change()
                kept.live.copy_(kept.copy)
                kept.remember()

    def changing(self) -> list[str]:
        """Names of buffers that a forward pass or a checkpoint has changed."""
        self._adopt()
        return [name for name, kept in self._kept.items() if kept.was_written]

    def mark(self, name: str) -> None:
        """Treat a buffer as changing, because a checkpoint or another rank has it changed."""
        self._kept[name].note_change()

    @torch.no_grad()
    def put_back_original(self, saved: Collection[str]) -> None:
        """Reset buffers that the checkpoint lacks: it is from before their first change.

        Args:
            saved: names of the buffers that the checkpoint holds.
        """
        for name, kept in self._kept.items():
            if name not in saved and kept.original is not None:
                kept.live.copy_(kept.original)

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def live(self, name: str) -> torch.Tensor:
        """The buffer itself."""
        return self._kept[name].live


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


# The quantised weights under a loop's adapters: in no checkpoint, held by a digest.
#
# The digest is of what the weights hold, not of files: the same base in other files is the same,
# and the same files quantised otherwise are another.


class BaseWeights:
    """The quantised weights of a loop's models. Making it is collective.

    Args:
        modules: by name.

    Attributes:
        tensors: by name.
        digest: of all stages' weights.

    Raises:
        ConfigError: a weight cannot be held so, or the ranks have other ones.
    """

    def __init__(
        self, modules: Sequence[tuple[str, nn.Module]], ranks: Ranks, stages: Stages
    ) -> None:
        def look() -> dict[str, str]:
            self._weights = quantised_weights(modules)
            keep_layout(self._weights.values())
            return {name: weight.digest(name) for name, weight in self._weights.items()}

        own = ranks.all_or_none("looking at quantised weights", look)
        self.tensors: dict[str, Tensor] = {n: w.tensor for n, w in self._weights.items()}
        by_rank = ranks.gather(digest_of(own) if own else NO_BASE)
        for members in stages.members:
            require_one_base(by_rank, members)
        distinct = list(dict.fromkeys(by_rank[ranks_of[0]] for ranks_of in stages.members))
        self.digest = distinct[0] if len(distinct) == 1 else digest_of(dict.fromkeys(distinct, ""))
        if ranks.rank == 0:
            for sentence in inexact(self._weights):
                _log.warning("%s", sentence)

    def require_unchanged(self) -> None:
        """
        Raises:
            ConfigError: the loop has changed a weight, which no checkpoint would have.
        """
        for name, weight in self._weights.items():
            if not weight.is_unchanged:
                raise ConfigError(
                    f"the loop has changed {name!r}, a quantised weight, and no checkpoint holds "
                    "it (merging adapters into quantised weights rounds them, and cannot be "
                    "undone); merge after training, into a copy of the model"
                )

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint holds of them."""
        return {"digest": self.digest}

    def require_same(self, stored: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: a checkpoint was made on other weights.
        """
        require_same_base(stored.get("digest", NO_BASE), self.digest)
