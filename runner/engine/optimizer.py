"""Which optimizer updates which shard, its state, and the gate that all obey.

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
from runner.engine.adamw import make_state, set_gate
from runner.engine.lion import Lion, opened
from runner.engine.muon import Muon, Whole, is_hidden_matrix
from runner.engine.optimizer_traits import Make
from runner.engine.user_optimizer import UserOptimizer

Groups = list[dict[str, Any]]
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
        average = (AVERAGE,) if self.optim.ema is not None else ()
        return (*self._of_optimizer(name, num_dims), *average)

    def _of_optimizer(self, name: str, num_dims: int) -> tuple[str, ...]:
        if self.make is not None:
            return ()
        if self.kind is OptimKind.sgd:
            return ("momentum_buffer",) if self.optim.momentum else ()
        if self.kind is OptimKind.lion:
            return ("exp_avg",)
        if self.kind is OptimKind.muon and is_hidden_matrix(name, num_dims):
            return ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq")

    def rule(self, name: str) -> ParameterRule:
        """Return the rule of a parameter."""
        fitting = (rule for rule in self.rules if re.search(rule.match, name))
        return next(fitting, ParameterRule(match=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same rate and decay.

    Args:
        rate: factor of the learning rate.
        weight_decay: None leaves it to the optimizer.
    """

    names: list[str]
    rate: float
    weight_decay: float | None


def grouped(
    names: Iterable[str], num_dims: Mapping[str, int], settings: OptimizerSettings
) -> list[ParameterGroup]:
    """The groups of ``names``, in the order in which each is first met.

    Parameters of two or more dimensions decay by ``optim.weight_decay``, others do not, unless a
    rule says otherwise; an optimizer from elsewhere is told of no decay but a rule's.
    """
    groups: dict[tuple[float, float | None], ParameterGroup] = {}
    for name in names:
        rule = settings.rule(name)
        decay: float | None = settings.optim.weight_decay if num_dims[name] >= 2 else 0.0
        if rule.weight_decay is not None or settings.make is not None:
            decay = rule.weight_decay
        new = ParameterGroup(names=[], rate=rule.rate, weight_decay=decay)
        groups.setdefault((rule.rate, decay), new).names.append(name)
    return list(groups.values())


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
        matrices = [n for n in shards if is_muon and is_hidden_matrix(n, self._num_dims[n])]
        if matrices:
            self._add(matrices, partial(Muon, momentum=settings.optim.momentum, whole=whole))
        remaining = [name for name in shards if name not in self._of and self._user is None]
        if remaining:
            self._add(remaining, self._make_rest)
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
            return
        has_average = bool(self._averages) and bool(self._updates.item())
        training = (
            {n: shard.detach().clone() for n, shard in self._shards.items()} if has_average else {}
        )
        try:
            for name in training:
                self._shards[name].detach().copy_(self._averages[name])
            yield has_average
        finally:
            for name, values in training.items():
                self._shards[name].detach().copy_(values)

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
        for of_names in grouped(names, self._num_dims, self._settings):
            group: dict[str, Any] = {
                "params": [self._shards[name] for name in of_names.names],
                "names": of_names.names,
                "rate": of_names.rate,
            }
            if self._settings.make is None:
                zero = torch.zeros((), device=self._device)
                group["lr"] = self._rates.setdefault(of_names.rate, zero)
            if of_names.weight_decay is not None:
                group["weight_decay"] = of_names.weight_decay
            groups.append(group)
        return groups

    def _make_rest(self, groups: Groups) -> Optimizer:
        optim = self._settings.optim
        if optim.kind is OptimKind.sgd:
            return torch.optim.SGD(groups, momentum=optim.momentum, fused=True)
        betas = (optim.beta1, optim.beta2)
        if optim.kind is OptimKind.lion:
            return Lion(groups, betas=betas)
        return torch.optim.AdamW(groups, betas=betas, eps=optim.eps, fused=True)

    def _make_state(self) -> None:
        """Create state before the first step: a checkpoint at step 0 and a load need it."""
        for name, optimizer in self._of.items():
            shard = self._shards[name]
            if isinstance(optimizer, torch.optim.AdamW):
                make_state(optimizer, [shard])
                continue
            for kind in set(self._kinds[name]) - {AVERAGE}:
                optimizer.state[shard][kind] = torch.zeros_like(shard)
