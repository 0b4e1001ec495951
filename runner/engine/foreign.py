"""An optimizer from elsewhere over this rank's shards: ``optim._target_``.

Where an element's update depends on that element alone it works on the shards. Where it needs a
whole parameter (Adafactor's factors, blocks of 8-bit states) each rank gathers one parameter after
the other with what is kept in its shape, updates it, and keeps its own rows; the rest that is kept
of it is whole on every rank. So the end does not depend on how many ranks there are.

What it keeps has the types and shapes that it gave it. Until the first update it has made nothing,
and makes it then as it would in a loop of its own; so a state that begins with the parameter's
values is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.adamw import set_gate
from runner.engine.found_state import (
    COUNT,
    Make,
    Path,
    begin_training,
    evaluates,
    found_traits,
    leaf,
    leaves,
    set_leaf,
)
from runner.engine.muon import Whole
from runner.system.error import ConfigError

_GROUP = "group"


@dataclass(slots=True, kw_only=True)
class _Unit:
    """One optimizer, and which parameters are its.

    Args:
        groups: torch's, of which it was made.
        held: what it sees as the parameters, by name.
        begins: by group, the numbers that a step changes, as they were before the first.
    """

    optimizer: Optimizer
    groups: list[dict[str, Any]]
    held: dict[str, Tensor]
    begins: list[dict[str, Any]]


class Foreign:
    """See the module's docstring.

    Args:
        shards: by name, FP32; ``.grad`` is read.
        shapes: of the whole parameters.
        groups: torch's, with ``names`` and ``rate``.
        is_cut: whether shards are less than the whole.

    Raises:
        ConfigError: it cannot work on shards, or keeps what a checkpoint cannot hold.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        groups: Sequence[dict[str, Any]],
        *,
        make: Make,
        name: str,
        whole: Whole,
        is_cut: bool,
    ) -> None:
        self._shards = shards
        self._shapes = shapes
        self._whole = whole
        self._key = f"optim._target_={name}"
        traits = found_traits(make, frozenset(map(len, shapes.values())), name)
        if is_cut and not traits.is_separable:
            raise ConfigError(
                f"{self._key}: updates a parameter by the others too (a norm or an estimate over "
                "all of them), of which each rank has a part only; use parallel=ddp, or one rank"
            )
        self._make = make
        self._numbers = traits.numbers
        # The same on one rank as on many: what is kept must have the same names.
        self.is_apart = traits.is_separable and not traits.is_elementwise
        self._units = self._made_units(groups)
        self._of = {name: unit for unit in self._units for name in unit.held}
        self._is_begun = False
        self._kept: dict[str, dict[str, Any]] = {}  # before the first update: what there will be
        self._rows: dict[str, Tensor] = {}  # of what is cut, while each parameter is by itself
        self._staged: dict[str, Tensor] = {}  # numbers, as a checkpoint has them
        self._cut: dict[str, tuple[str, Path]] = {}
        self._uncut: dict[str, tuple[str, Path]] = {}
        for unit in self._units:
            self._look_at(unit)

    def _made_units(self, groups: Sequence[dict[str, Any]]) -> list[_Unit]:
        units = []
        for parts in self._divided(groups):
            optimizer = self._made(parts)
            held = {
                name: param
                for group in parts
                for name, param in zip(group["names"], group["params"], strict=True)
            }
            begins = [{n: group[n] for n in self._numbers} for group in optimizer.param_groups]
            units.append(_Unit(optimizer=optimizer, groups=parts, held=held, begins=begins))
        return units

    def _made(self, groups: Sequence[dict[str, Any]]) -> Optimizer:
        # It writes into what it is given.
        optimizer = self._make([dict(group) for group in groups])
        begin_training(optimizer)
        return optimizer

    def _divided(self, groups: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        if not self.is_apart:
            yield [dict(group) for group in groups]
            return
        for group in groups:
            for name, shard in zip(group["names"], group["params"], strict=True):
                yield [group | {"params": [_nothing(shard)], "names": [name]}]

    # -- what it keeps ---------------------------------------------------------------------

    @torch.no_grad()
    def _look_at(self, unit: _Unit) -> None:
        """Have it make its state by a step on zeros, and take that away again."""
        gradients = {name: param.grad for name, param in unit.held.items()}
        for name, param in unit.held.items():
            if self.is_apart:
                param.data = torch.zeros(self._shapes[name], device=param.device)
            param.grad = torch.zeros_like(param)
        before = {name: param.clone() for name, param in unit.held.items()}
        for param in unit.held.values():
            param.zero_()  # where weights come later there is anything in it yet
        unit.optimizer.step()
        for name, param in unit.held.items():
            state = self._kept[name] = dict(unit.optimizer.state[param])
            for path, value in leaves(state, self._key):
                self._note(name, path, value, param)
            param.grad = gradients[name]  # DeepSpeed has buffers there
            if self.is_apart:
                param.data = _nothing(param)
            else:
                param.copy_(before[name])
        unit.optimizer.state.clear()
        self._reset_numbers(unit)

    def _note(self, name: str, path: Path, value: Any, param: Tensor) -> None:
        label = f"{'.'.join(path)}/{name}"
        if not isinstance(value, Tensor):
            self._staged[label] = torch.zeros((), dtype=torch.float64)
            self._uncut[label] = (name, path)
        elif value.shape == param.shape:
            self._cut[label] = (name, path)
            if self.is_apart:
                self._rows[label] = torch.zeros_like(self._shards[name], dtype=value.dtype)
                set_leaf(self._kept[name], path, value.new_empty(0))
        else:
            self._uncut[label] = (name, path)

    def _reset_numbers(self, unit: _Unit) -> None:
        for group, begins in zip(unit.optimizer.param_groups, unit.begins, strict=True):
            group.update(begins)

    def _state(self, name: str) -> dict[str, Any]:
        unit = self._of[name]
        state: dict[str, Any] = unit.optimizer.state.get(unit.held[name]) or self._kept[name]
        return state

    def tensors(self) -> dict[str, Tensor]:
        """What is cut like its parameter by "kind/name", on this rank."""
        if self.is_apart:
            return dict(self._rows)
        return {label: leaf(self._state(name), path) for label, (name, path) in self._cut.items()}

    def uncut(self, *, is_loaded: bool = False) -> dict[str, Tensor]:
        """What every rank has whole, by "kind/name"; numbers in FP64.

        To be overwritten before :meth:`finish_load`.

        Args:
            is_loaded: it has been; numbers are what was loaded.
        """
        tensors = {}
        for label, (name, path) in self._uncut.items():
            value = leaf(self._state(name), path)
            tensors[label] = value if isinstance(value, Tensor) else self._staged[label]
            if not isinstance(value, Tensor) and not is_loaded:
                self._staged[label].fill_(value)
        for label, group, key in self._group_numbers():
            tensors[label] = self._staged.setdefault(label, torch.zeros((), dtype=torch.float64))
            if not is_loaded:
                tensors[label].fill_(group[key])
        return tensors

    def _group_numbers(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for number, unit in enumerate(self._units):
            for at, group in enumerate(unit.optimizer.param_groups):
                where = group["names"][0] if self.is_apart else str(at + number)
                for key in self._numbers:
                    yield f"{_GROUP}.{key}/{where}", group, key

    def counts(self, default: Tensor) -> list[Any]:
        """Of updates, a parameter each; ``default`` where it does not count."""
        return [self._state(name).get(COUNT, default) for name in self._shards]

    def finish_load(self, counts: Mapping[str, int]) -> None:
        """What :meth:`tensors` and :meth:`uncut` gave has been overwritten."""
        self._is_begun = any(counts[name] for name in self._shards)
        self._take_numbers(counts)
        for unit in self._units:
            for name, param in unit.held.items():
                state = self._state(name)
                if self._is_begun:
                    unit.optimizer.state[param] = state
                else:
                    self._kept[name] = state
            if not self._is_begun:
                unit.optimizer.state.clear()
                self._reset_numbers(unit)

    def _take_numbers(self, counts: Mapping[str, int]) -> None:
        for label, group, key in self._group_numbers():
            group[key] = _like(group[key], self._staged[label])
        for label, (name, path) in self._uncut.items():
            if label in self._staged:
                state = self._state(name)
                set_leaf(state, path, _like(leaf(state, path), self._staged[label]))
        for name in self._shards:
            state = self._state(name)
            if isinstance(state.get(COUNT), Tensor):
                state[COUNT].fill_(float(counts[name]))
            elif COUNT in state:
                state[COUNT] = counts[name]

    # -- a step ----------------------------------------------------------------------------

    @property
    def is_gated(self) -> bool:
        """Whether it looks at ``found_inf`` by itself, and divides by ``grad_scale``."""
        return not self.is_apart and all(_is_gated(unit.optimizer) for unit in self._units)

    @torch.no_grad()
    def step(self, *, skip: Tensor, grad_scale: Tensor, learning_rate: float) -> None:
        """See :meth:`runner.engine.optimizer.ShardOptimizer.step`."""
        if not self.is_gated:
            if skip.item():
                return
            self._divide(grad_scale)
        if not self._is_begun:
            self._begin()
        for unit in self._units:
            for group in unit.optimizer.param_groups:
                _set_rate(group, learning_rate * group["rate"])
            if self.is_apart:
                self._step_apart(unit)
            else:
                self._step_shards(unit, skip, grad_scale)
        for name in list(self._kept):
            unit = self._of[name]
            if unit.optimizer.state.get(unit.held[name]):
                del self._kept[name]  # it has its own now

    def _divide(self, grad_scale: Tensor) -> None:
        for shard in self._shards.values():
            if shard.grad is not None:
                shard.grad.div_(grad_scale)

    def _step_shards(self, unit: _Unit, skip: Tensor, grad_scale: Tensor) -> None:
        for param in unit.held.values():
            if param.grad is None and not param.numel():
                param.grad = torch.zeros_like(param)  # it counts with those that have rows
        if self.is_gated:
            set_gate(unit.optimizer, skip=skip, grad_scale=grad_scale)
        unit.optimizer.step()

    def _begin(self) -> None:
        """Anew: some make their state when they are made (Adagrad), before weights are loaded."""
        self._is_begun = True
        for unit in self._units:
            unit.optimizer = self._made(unit.groups)

    def _step_apart(self, unit: _Unit) -> None:
        """One parameter, whole meanwhile. Collective."""
        ((name, param),) = unit.held.items()
        shard = self._shards[name]
        if shard.grad is None:
            return
        param.data, first = self._whole(name, shard)
        # Where nothing is cut what is gathered is the shard itself; an optimizer may write to both.
        param.grad = self._whole(name, shard.grad)[0]
        mine = slice(first, first + len(shard)) if shard.dim() else ...
        state: dict[str, Any] = unit.optimizer.state.get(param) or {}
        paths = {t: path for t, (of, path) in self._cut.items() if of == name}
        for label, path in paths.items() if state else ():
            set_leaf(state, path, self._whole(name, self._rows[label])[0])
        unit.optimizer.step()
        state = unit.optimizer.state[param]
        shard.copy_(param.data[mine])
        for label, path in paths.items():
            moved = leaf(state, path)
            self._rows[label].copy_(moved[mine])
            set_leaf(state, path, moved.new_empty(0))
        param.grad = None
        param.data = _nothing(param)

    @contextmanager
    def evaluated(self) -> Iterator[bool]:
        """The shards hold the weights to evaluate meanwhile, where it has such."""
        ones = [] if self.is_apart else [u.optimizer for u in self._units if evaluates(u.optimizer)]
        is_other = bool(ones) and self._is_begun
        kept = {n: shard.detach().clone() for n, shard in self._shards.items()} if is_other else {}
        for optimizer in ones if is_other else ():
            optimizer.eval()  # type: ignore[attr-defined]
        try:
            yield is_other
        finally:
            for optimizer in ones if is_other else ():
                begin_training(optimizer)
            for name, values in kept.items():  # not what it computes back, which rounds
                self._shards[name].detach().copy_(values)


def _nothing(like: Tensor) -> Tensor:
    """Without elements, of as many dimensions."""
    return like.new_empty((0,) * like.dim())


def _is_gated(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _like(value: Any, stored: Tensor) -> bool | int | float:
    """A number of a checkpoint as what it was."""
    number = float(stored.item())
    if isinstance(value, bool):
        return bool(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number
