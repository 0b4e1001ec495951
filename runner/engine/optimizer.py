"""Which optimizer updates which shard, its state, and the gate that all obey.

What is built in, and how to add one, is in :mod:`runner.engine.builtin_optimizer`.

A gated step leaves parameters and state unchanged, bit for bit. Optimizers that honour
``found_inf`` (torch's fused ones, ours) are gated on the device without waiting; before the step of
any other (:mod:`runner.engine.user_optimizer`) this rank reads the gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.config.schema import OptimConfig, OptimKind
from runner.engine.builtin_optimizer import (
    Muon,
    Whole,
    counts_updates,
    make_optimizer,
    opened,
    restored,
    set_gate,
    state_kinds,
)
from runner.engine.user_optimizer import Make, UserOptimizer
from runner.system.error import ConfigError
from runner.system.user_code import call_target, find_target

Groups = list[dict[str, Any]]
_TARGET = "optim._target_"
_COUNT = "step"  # torch's name of the number of updates
AVERAGE = "ema"  # the kind of the weights' average


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRule:
    """Applies to parameters whose name contains the regular expression ``match``.

    Args:
        rate: factor of the learning rate.
        weight_decay: None keeps the optimizer's.
    """

    match: str
    rate: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of ``optim``, and what makes the optimizer that ``optim._target_`` names.

    Args:
        make: builds it from torch parameter groups; None for one of our own.
    """

    optim: OptimConfig
    make: Make | None = None

    @classmethod
    def of(cls, optim: OptimConfig) -> OptimizerSettings:
        """
        Raises:
            ConfigError: ``optim._target_`` cannot be found.
        """
        target = optim._target_
        if target is None:
            return cls(optim)
        find_target(_TARGET, target)
        arguments, offered = optim.arguments or {}, {"lr": optim.lr}

        def make(groups: Groups) -> Optimizer:
            optimizer = call_target(_TARGET, target, {"params": groups, **arguments}, offered)
            if not isinstance(optimizer, Optimizer):
                raise ConfigError(
                    f"{_TARGET}={target}: returns {type(optimizer).__name__}; must be a "
                    "torch.optim.Optimizer"
                )
            return optimizer

        return cls(optim, make)

    @cached_property
    def rules(self) -> Sequence[ParameterRule]:
        """``optim.groups``; a parameter follows the first rule that matches its name."""
        return [ParameterRule(**rule) for rule in self.optim.groups]

    @property
    def kind(self) -> OptimKind | None:
        """``optim.kind``; None for the user's own optimizer."""
        return self.optim.kind if self.make is None else None

    @property
    def name(self) -> str:
        """The user's name for his own optimizer."""
        return self.optim._target_ or ""

    def kinds(self, name: str, num_dims: int) -> tuple[str, ...]:
        """Kinds of state kept for a parameter: FP32 tensors in its shape, in order.

        For the user's own, only the average: its own state is known once it is built.
        """
        kinds = () if self.kind is None else state_kinds(self.optim, name, num_dims)
        return kinds if self.optim.ema is None else (*kinds, AVERAGE)

    def rule(self, name: str) -> ParameterRule:
        """Return the rule of a parameter."""
        fitting = (rule for rule in self.rules if re.search(rule.match, name))
        return next(fitting, ParameterRule(match=""))


def grouped(
    names: Iterable[str], num_dims: Mapping[str, int], settings: OptimizerSettings
) -> dict[tuple[float, float | None], list[str]]:
    """The parameters by their factor of the learning rate and their decay, in the order of names.

    Parameters of two or more dimensions decay by ``optim.weight_decay``, others do not, unless a
    rule says otherwise; an optimizer from elsewhere is told of no decay but a rule's (None).
    """
    groups: dict[tuple[float, float | None], list[str]] = {}
    for name in names:
        rule = settings.rule(name)
        decay: float | None = settings.optim.weight_decay if num_dims[name] >= 2 else 0.0
        if rule.weight_decay is not None or settings.make is not None:
            decay = rule.weight_decay
        groups.setdefault((rule.rate, decay), []).append(name)
    return groups


class ShardOptimizer:
    """The optimizer of this rank's shards.

    Args:
        shards: by name, FP32, with as many dimensions as the parameter; ``.grad`` is read.
        shapes: shape of each whole parameter.
        whole: gathers a tensor sharded like a parameter; returns it and this rank's first row;
            collective.
        is_cut: whether a shard may be only part of its parameter.

    Raises:
        ConfigError: the optimizer cannot work on shards, or has state that a checkpoint cannot
            hold.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        settings: OptimizerSettings,
        device: torch.device,
        whole: Whole,
        *,
        is_cut: bool = False,
    ) -> None:
        self._shards = shards
        self._num_dims = {name: len(shape) for name, shape in shapes.items()}
        self._settings = settings
        self._kinds = {name: settings.kinds(name, self._num_dims[name]) for name in shards}
        # By learning-rate factor; filled before each step, so that nothing waits.
        self._rates: dict[float, Tensor] = {}
        self._device = device
        # Update count of the optimizers that keep none.
        self._updates = torch.zeros((), device=device)
        self._averages = {n: torch.zeros_like(s) for n, s in shards.items() if settings.optim.ema}
        self._of: dict[str, Optimizer] = {}
        self._user: UserOptimizer | None = None
        if settings.make is not None and shards:
            self._user = UserOptimizer(
                shards,
                shapes,
                self._groups(list(shards)),
                make=settings.make,
                name=settings.name,
                whole=whole,
                is_cut=is_cut,
            )
        is_muon = settings.kind is OptimKind.muon
        matrices = [n for n in shards if is_muon and "momentum_buffer" in self._kinds[n]]
        if matrices:
            self._add(matrices, partial(Muon, momentum=settings.optim.momentum, whole=whole))
        remaining = [name for name in shards if name not in self._of and self._user is None]
        if remaining:
            self._add(remaining, partial(make_optimizer, settings.optim))
        self._optimizers = list(dict.fromkeys(self._of.values()))
        self._make_state()

    @property
    def waits_for_host(self) -> bool:
        """Whether the gate is read before each step."""
        return self._user is not None and not self._user.is_gated

    def step(self, *, skip: Tensor, grad_scale: Tensor, learning_rate: float) -> None:
        """Update from gradients divided by ``grad_scale``, unless ``skip`` is 1; FP32 scalars."""
        for factor, rate in self._rates.items():
            rate.fill_(learning_rate * factor)
        if self._user is not None:
            self._user.step(skip=skip, grad_scale=grad_scale, learning_rate=learning_rate)
        for optimizer in self._optimizers:
            set_gate(optimizer, skip=skip, grad_scale=grad_scale)
            optimizer.step()
        self._follow(skip)
        self._updates += 1.0 - skip

    def _follow(self, skip: Tensor) -> None:
        """Update the averages, which start at the weights after the first update."""
        if self._settings.optim.ema is None:
            return
        is_first = self._updates == 0
        for name, average in self._averages.items():
            shard = self._shards[name]
            moved = torch.where(is_first, shard, average.lerp(shard, 1 - self._settings.optim.ema))
            average.copy_(opened(moved, average, skip))

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """Hold the averaged weights in the shards, if there are any. Waits once.

        Without an average, holds the evaluation weights of a user's optimizer.
        """
        if not self._averages and self._user is not None:
            with self._user.evaluated() as is_other:
                yield is_other
        elif not (self._averages and self._updates.item()):
            yield False
        else:
            with restored(self._shards):
                for name, shard in self._shards.items():
                    shard.detach().copy_(self._averages[name])
                yield True

    def tensors(self) -> dict[str, Tensor]:
        """State that is sharded like its parameter, by "kind/name"."""
        tensors = {
            f"{kind}/{name}": self._state(name)[kind]
            for name, kinds in self._kinds.items()
            for kind in kinds
            if kind != AVERAGE
        }
        if self._user is not None:
            tensors |= self._user.tensors()
        return tensors | {f"{AVERAGE}/{name}": average for name, average in self._averages.items()}

    def uncut(self, *, is_loaded: bool = False) -> dict[str, Tensor]:
        """State that every rank has whole, by "kind/name"; see :meth:`UserOptimizer.uncut`."""
        return {} if self._user is None else self._user.uncut(is_loaded=is_loaded)

    def update_counts(self) -> dict[str, int]:
        """Applied updates by name. Waits once."""
        if self._user is not None:
            own = self._user.counts(self._updates)
        else:
            own = [self._state(name).get(_COUNT, self._updates) for name in self._shards]
        counts = [torch.as_tensor(count).to(self._device, torch.float32) for count in own]
        # One copy for all: separate copies would each wait for the device.
        values = torch.stack(counts).tolist() if counts else []
        return {name: int(count) for name, count in zip(self._shards, values, strict=True)}

    def set_update_counts(self, counts: Mapping[str, int]) -> None:
        """Set the update counts after a load."""
        if self._user is not None:
            self._user.finish_load(counts)
        for name in self._of:
            state = self._state(name)
            if _COUNT in state:
                state[_COUNT].fill_(float(counts[name]))
        self._updates.fill_(float(max((counts[name] for name in self._shards), default=0)))

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self._of[name].state[self._shards[name]]
        return state

    def _add(self, names: Sequence[str], make: Make) -> None:
        optimizer = make(self._groups(names))
        self._of.update(dict.fromkeys(names, optimizer))

    def _groups(self, names: Sequence[str]) -> Groups:
        groups: Groups = []
        for (rate, decay), members in grouped(names, self._num_dims, self._settings).items():
            group = {"params": [self._shards[n] for n in members], "names": members, "rate": rate}
            if self._settings.make is None:
                zero = torch.zeros((), device=self._device)
                group["lr"] = self._rates.setdefault(rate, zero)
            if decay is not None:
                group["weight_decay"] = decay
            groups.append(group)
        return groups

    def _make_state(self) -> None:
        """Create state before the first step: a checkpoint at step 0 and a load need it."""
        for name, optimizer in self._of.items():
            shard = self._shards[name]
            state = optimizer.state[shard]
            if counts_updates(optimizer):
                state[_COUNT] = torch.zeros((), device=shard.device)
            for kind in self._kinds[name]:
                if kind != AVERAGE:
                    state[kind] = torch.zeros_like(shard)
