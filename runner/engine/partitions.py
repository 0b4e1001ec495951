"""An optimizer for each of DeepSpeed's flat FP32 partitions.

DeepSpeed lays the parameters of a group one after the other into one long tensor, and each rank
updates a part of it, cut anywhere. So an element's update may depend on that element alone; what
looks at rows, matrices or all parameters is refused. Gate, counts, averages and what is kept are
those of :class:`runner.engine.optimizer.ShardOptimizer`, and so is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.engine.optimizer import OptimizerSettings, ShardOptimizer, grouped
from runner.engine.user_optimizer import is_same_when_flat, probe_traits
from runner.system.error import ConfigError

_REMEDY = (
    "use parallel=fsdp, which shards as zero3 does, or an optimizer that updates each element by "
    "itself: optim=adamw, sgd or lion"
)
_ALONE = "flat"  # the name of the partition for its own optimizer
_GROUP = "group."  # begins the name of a number that a whole group has


class _Handed(Optimizer):
    """What DeepSpeed is given.

    DeepSpeed puts its partitions in the place of the groups' parameters, and calls :meth:`step`
    with all of them, or with one after the other.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 0.0})
        self.optimizers: dict[Tensor, ShardOptimizer] = {}
        self.arguments: dict[str, Any] = {}  # of the next step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.optimizers:  # DeepSpeed is being made
            return
        for group in self.param_groups:
            for flat in group["params"]:
                self.optimizers[flat].step(**self.arguments)


class PartitionOptimizer:
    """The optimizers of this rank's partitions.

    Args:
        parameters: those that are trained, by name in the order of the other engines.
        num_dims: of each whole parameter.

    Raises:
        ConfigError: the optimizer needs more than single elements.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        num_dims: Mapping[str, int],
        settings: OptimizerSettings,
        device: torch.device,
    ) -> None:
        require_elementwise(settings, frozenset(num_dims[name] for name in parameters))
        self._settings = settings
        self._device = device
        groups = grouped(parameters, num_dims, settings)
        self._rules = list(groups)
        self._names = list(groups.values())
        self._group_of = {n: at for at, names in enumerate(self._names) for n in names}
        self.handed = _Handed(
            [{"params": [parameters[name] for name in names]} for names in self._names]
        )
        self._of: list[list[ShardOptimizer]] = [[] for _ in groups]

    def take(self, flats: Sequence[Tensor], groups: Sequence[int]) -> None:
        """The partitions that DeepSpeed has made, and of which group each is."""
        for flat, number in zip(flats, groups, strict=True):
            rate, decay = self._rules[number]
            rule = {"match": "", "rate": rate, "weight_decay": decay}
            optim = replace(self._settings.optim, groups=[rule])
            optimizer = ShardOptimizer(
                {_ALONE: flat},
                {_ALONE: tuple(flat.shape)},
                replace(self._settings, optim=optim),
                self._device,
                never_whole,
                is_cut=True,
            )
            self.handed.optimizers[flat] = optimizer
            self._of[number].append(optimizer)

    @property
    def waits_for_host(self) -> bool:
        """Whether the gate is read before each step."""
        return any(optimizer.waits_for_host for optimizer in self.handed.optimizers.values())

    def prepare(self, *, skip: Tensor, grad_scale: Tensor, learning_rate: float) -> None:
        """Say what the next step is to do, see :meth:`ShardOptimizer.step`."""
        numbers = {"grad_scale": grad_scale, "learning_rate": learning_rate}
        self.handed.arguments = {"skip": skip, **numbers}

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        """The partitions hold what is to be evaluated meanwhile; whether that is anything else."""
        with ExitStack() as stack:
            entered = [stack.enter_context(o.averaged()) for o in self._all()]
            yield any(entered)

    def tensors(self, name: str, flat: Tensor) -> dict[str, Tensor]:
        """Of the partition ``flat``, which has a part of the parameter: its state, 1-D, by kind.

        Nothing of the parameter may be here: then that of its group's first partition.
        """
        optimizer = self.handed.optimizers.get(flat, self._of[self._group_of[name]][0])
        return {_kind(label): values for label, values in optimizer.tensors().items()}

    def uncut(self, *, is_loaded: bool = False) -> dict[str, Tensor]:
        """Numbers that every rank has, of parameters and of groups; see
        :meth:`ShardOptimizer.uncut`.

        Those of each group's first partition, whose numbers the others get after a load.
        """
        numbers: dict[str, Tensor] = {}
        for group, names in enumerate(self._names):
            for label, values in self._of[group][0].uncut(is_loaded=is_loaded).items():
                owners = [str(group)] if label.startswith(_GROUP) else names
                numbers |= {f"{_kind(label)}/{owner}": values for owner in owners}
        return numbers

    def update_counts(self) -> set[int]:
        """Applied updates of each partition. Waits once for each."""
        return {optimizer.update_counts()[_ALONE] for optimizer in self._all()}

    def set_update_count(self, count: int) -> None:
        """After a load of what :meth:`uncut` has."""
        for first, *others in self._of:
            for label, loaded in first.uncut(is_loaded=True).items():
                for optimizer in others:
                    optimizer.uncut(is_loaded=True)[label].copy_(loaded)
        for optimizer in self._all():
            optimizer.set_update_counts({_ALONE: count})

    def _all(self) -> list[ShardOptimizer]:
        return list(self.handed.optimizers.values())


def _kind(label: str) -> str:
    return label.partition("/")[0]


def never_whole(name: str, part: Tensor) -> tuple[Tensor, int]:
    """For a :class:`ShardOptimizer` that needs no whole parameters."""
    raise AssertionError(f"{name}: is never gathered")


def require_elementwise(settings: OptimizerSettings, dims: frozenset[int]) -> None:
    """Of ours :func:`runner.config.validate.check` has refused muon.

    Raises:
        ConfigError: it looks at more than single elements, or at shapes.
    """
    where = "ZeRO updates flat partitions, in which no parameter has its shape"
    if settings.make is None:
        return
    traits = probe_traits(settings.make, dims, settings.name)
    key = f"optim._target_={settings.name}"
    if not traits.is_separable:
        why = "updates a parameter by the others too (a norm or an estimate over all of them)"
    elif not traits.is_elementwise:
        why = "needs whole parameters (rows, matrices, or blocks of them)"
    elif not is_same_when_flat(settings.make, dims):
        why = "treats matrices and vectors differently"
    else:
        return
    raise ConfigError(f"{key}: {why}, and {where}; {_REMEDY}")
