"""Which optimizer works on which shard, what it keeps beside it, and the gate that all obey.

A gated step leaves parameters and state as they were, bit for bit. Optimizers that look at
``found_inf`` (torch's fused ones, ours) are gated on the device, where nothing waits; before the
step of any other this rank reads the gate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.adamw import AdamWSettings, adamw_over, make_state, set_gate
from runner.engine.found_state import found_kinds, prime
from runner.engine.lion import Lion, opened
from runner.engine.muon import Muon, Whole, is_hidden_matrix

Groups = list[dict[str, Any]]
Make = Callable[[Groups], Optimizer]
_COUNT = "step"  # torch's name of the number of updates
AVERAGE = "ema"  # the kind of the weights' average


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRule:
    """For parameters in whose name ``match``, a regular expression, is found.

    Args:
        rate: factor of the learning rate.
        weight_decay: None leaves it as it is.
    """

    match: str
    rate: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """``kind`` is adamw, sgd, lion, muon or other.

    Args:
        adamw: AdamW's numbers; Lion takes betas and decay of it, SGD and Muon the decay.
        momentum: of SGD and Muon.
        rules: a parameter takes the first that fits its name.
        ema: decay of an average of the weights; None: none is kept.
        make: for ``other``: makes it from torch's parameter groups.
        name: for ``other``: as the user named it.
    """

    kind: str
    adamw: AdamWSettings
    momentum: float = 0.0
    rules: Sequence[ParameterRule] = ()
    ema: float | None = None
    make: Make | None = None
    name: str = ""

    def kinds(self, name: str, num_dims: int) -> tuple[str, ...]:
        """What is kept for a parameter: FP32 tensors in its shape, in order.

        Raises:
            ConfigError: ``other`` keeps something else, too.
        """
        average = (AVERAGE,) if self.ema is not None else ()
        return (*self._of_optimizer(name, num_dims), *average)

    def _of_optimizer(self, name: str, num_dims: int) -> tuple[str, ...]:
        if self.make is not None:
            return found_kinds(self.make, num_dims, self.name)
        if self.kind == "sgd":
            return ("momentum_buffer",) if self.momentum else ()
        if self.kind == "lion":
            return ("exp_avg",)
        if self.kind == "muon" and is_hidden_matrix(name, num_dims):
            return ("momentum_buffer",)
        return ("exp_avg", "exp_avg_sq")

    def rule(self, name: str) -> ParameterRule:
        """Of a parameter."""
        fitting = (rule for rule in self.rules if re.search(rule.match, name))
        return next(fitting, ParameterRule(match=""))


class ShardOptimizer:
    """The optimizer of this rank's shards.

    Args:
        shards: by name, FP32, with as many dimensions as the parameter; ``.grad`` is read.
        num_dims: of each whole parameter.
        whole: gives a whole matrix from this rank's rows; collective.

    Raises:
        ConfigError: it keeps what a checkpoint cannot hold.
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        num_dims: Mapping[str, int],
        settings: OptimizerSettings,
        device: torch.device,
        whole: Whole,
    ) -> None:
        self._shards = shards
        self._num_dims = num_dims
        self._settings = settings
        self._kinds = {name: settings.kinds(name, num_dims[name]) for name in shards}
        # By factor of the learning rate: filled before each step, so that nothing waits.
        self._rates: dict[float, Tensor] = {}
        self._device = device
        # Of those that do not count by themselves.
        self._updates = torch.zeros((), device=device)
        self._averages = {n: torch.zeros_like(s) for n, s in shards.items() if settings.ema}
        self._of: dict[str, Optimizer] = {}
        is_muon = settings.kind == "muon"
        matrices = [n for n in shards if is_muon and is_hidden_matrix(n, num_dims[n])]
        if matrices:
            self._add(matrices, partial(Muon, momentum=settings.momentum, whole=whole))
        rest = [name for name in shards if name not in self._of]
        if rest:
            self._add(rest, self._make_rest)
        self._optimizers = list(dict.fromkeys(self._of.values()))
        self._make_state()

    @property
    def waits_for_host(self) -> bool:
        """Whether the gate is read before each step."""
        return not all(map(_is_gated, self._optimizers))

    def step(self, *, skip: Tensor, grad_scale: Tensor, learning_rate: float) -> None:
        """On gradients divided by ``grad_scale``, unless ``skip`` is 1; FP32 scalars."""
        for factor, rate in self._rates.items():
            rate.fill_(learning_rate * factor)
        for optimizer in self._optimizers:
            if self._settings.make is not None:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate * group["rate"]
            if _is_gated(optimizer):
                set_gate(optimizer, skip=skip, grad_scale=grad_scale)
                optimizer.step()
            elif not skip.item():
                _divide(optimizer, grad_scale)
                optimizer.step()
        self._follow(skip)
        self._updates += 1.0 - skip

    def _follow(self, skip: Tensor) -> None:
        """Move the averages; the first update's weights are where they begin."""
        if self._settings.ema is None:
            return
        is_first = self._updates == 0
        for name, average in self._averages.items():
            shard = self._shards[name]
            moved = torch.where(is_first, shard, average.lerp(shard, 1 - self._settings.ema))
            average.copy_(opened(moved, average, skip))

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """The shards hold their averages meanwhile, where there are any. Waits once."""
        there = bool(self._averages) and bool(self._updates.item())
        kept = {name: shard.clone() for name, shard in self._shards.items()} if there else {}
        try:
            for name in kept:
                self._shards[name].copy_(self._averages[name])
            yield there
        finally:
            for name, values in kept.items():
                self._shards[name].copy_(values)

    def tensors(self) -> dict[str, Tensor]:
        """State by "kind/name"."""
        return {
            f"{kind}/{name}": self._state(name)[kind]
            for name, kinds in self._kinds.items()
            for kind in kinds
            if kind != AVERAGE
        } | {f"{AVERAGE}/{name}": average for name, average in self._averages.items()}

    def update_counts(self) -> dict[str, int]:
        """Applied updates by name. Waits once."""
        own = [self._state(name).get(_COUNT, self._updates) for name in self._shards]
        counts = [torch.as_tensor(count).to(self._device, torch.float32) for count in own]
        # In one copy: one by one each would wait for the device.
        values = torch.stack(counts).tolist() if counts else []
        return {name: int(count) for name, count in zip(self._shards, values, strict=True)}

    def set_update_counts(self, counts: Mapping[str, int]) -> None:
        """After a load."""
        for name in self._shards:
            state = self._state(name)
            if isinstance(state.get(_COUNT), Tensor):
                state[_COUNT].fill_(float(counts[name]))
            elif _COUNT in state:
                state[_COUNT] = counts[name]
        self._updates.fill_(float(max((counts[name] for name in self._shards), default=0)))

    def _state(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self._of[name].state[self._shards[name]]
        return state

    def _add(self, names: Sequence[str], make: Make) -> None:
        groups: dict[tuple[float, float | None], dict[str, Any]] = {}
        for name in names:
            rule = self._settings.rule(name)
            decay = self._settings.adamw.weight_decay if self._num_dims[name] >= 2 else 0.0
            if rule.weight_decay is not None or self._settings.make is not None:
                decay = rule.weight_decay  # type: ignore[assignment]
            group = groups.setdefault((rule.rate, decay), {"params": [], "names": []})
            group["rate"] = rule.rate
            if self._settings.make is None:
                zero = torch.zeros((), device=self._device)
                group["lr"] = self._rates.setdefault(rule.rate, zero)
            if decay is not None:
                group["weight_decay"] = decay
            group["params"].append(self._shards[name])
            group["names"].append(name)
        optimizer = make(list(groups.values()))
        self._of.update(dict.fromkeys(names, optimizer))

    def _make_rest(self, groups: Groups) -> Optimizer:
        settings, adamw = self._settings, self._settings.adamw
        if settings.make is not None:
            return settings.make(groups)
        if settings.kind == "sgd":
            return torch.optim.SGD(groups, momentum=settings.momentum, fused=True)
        if settings.kind == "lion":
            return Lion(groups, betas=(adamw.beta1, adamw.beta2))
        return adamw_over(groups, adamw)

    def _make_state(self) -> None:
        """Now, not in the first step: a checkpoint of step 0 and a load need it."""
        if self._settings.make is not None:
            for optimizer in self._optimizers:
                prime(optimizer)
            return
        for name, shard in self._shards.items():
            optimizer = self._of[name]
            if isinstance(optimizer, torch.optim.AdamW):
                make_state(optimizer, [shard])
                continue
            for kind in set(self._kinds[name]) - {AVERAGE}:
                optimizer.state[shard][kind] = torch.zeros_like(shard)


def _is_gated(optimizer: Optimizer) -> bool:
    """Whether it looks at ``found_inf`` by itself, and divides by ``grad_scale``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _divide(optimizer: Optimizer, grad_scale: Tensor) -> None:
    for group in optimizer.param_groups:
        for shard in group["params"]:
            if shard.grad is not None:
                shard.grad.div_(grad_scale)
