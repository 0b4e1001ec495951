"""What a loop may change while it runs: parameter groups, frozen parameters, modes of modules.

Freezing, unfreezing and groups added later are part of the state: a rollback undoes them, and a
restart finds them as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from runner.system.error import CheckpointError, ConfigError


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
        """Inverse of :meth:`to_json`; checkpoints of an older version have none."""
        if "frozen" not in stored:
            return
        frozen, evaluating = set(stored["frozen"]), set(stored["evaluating"])
        for name, parameter in self._parameters.items():
            if parameter.requires_grad is (name in frozen):
                parameter.requires_grad_(name not in frozen)
        for name, module in self._modules.items():
            module.training = name not in evaluating


class ParameterGroups:
    """The parameters in each group of one optimizer, by name.

    A checkpoint also has the groups with which its script began. Where a script begins with the
    same, its groups become those of the checkpoint; else the script itself has changed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        parameters: Mapping[str, torch.Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._names = names
        self._parameters = parameters
        self._first = self.members()

    def members(self) -> list[list[str]]:
        """Names of the parameters of each group.

        Raises:
            ConfigError: a parameter has no name.
        """
        try:
            return [
                [self._names[id(parameter)] for parameter in group["params"]]
                for group in self._optimizer.param_groups
            ]
        except KeyError:
            raise ConfigError(
                f"{type(self._optimizer).__name__} was given a parameter after Guard(...) that is "
                "in none of the guard's models, so that it would not be saved; create its module "
                "before, and give it to Guard(model=...)"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """The current groups, and the first ones of this start."""
        return {"members": self.members(), "first": self._first}

    def load_json(self, stored: Mapping[str, Any]) -> None:
        """Regroup as in the checkpoint.

        Raises:
            CheckpointError: the script begins with other groups than the one that made it.
        """
        members = stored.get("members")  # none in a checkpoint of an older version
        if members is None or _alike(members, self.members()):
            return
        if not _alike(stored["first"], self._first):
            raise CheckpointError(
                f"{type(self._optimizer).__name__} began with other groups of parameters "
                f"({_sizes(stored['first'])} parameters, now {_sizes(self._first)}); make them as "
                "before, or choose another out"
            )
        groups = self._optimizer.param_groups
        del groups[len(members) :]
        groups.extend({} for _ in range(len(members) - len(groups)))
        for group, names in zip(groups, members, strict=True):
            group["params"] = [self._parameters[name] for name in names]


def _alike(a: Sequence[Sequence[str]], b: Sequence[Sequence[str]]) -> bool:
    return [sorted(names) for names in a] == [sorted(names) for names in b]


def _sizes(groups: Sequence[Sequence[str]]) -> str:
    return " + ".join(str(len(names)) for names in groups)
