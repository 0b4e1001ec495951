"""Turns settings of ``optim`` and ``schedule`` into an optimizer and a learning rate."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runner.config.schema import RunConfig
from runner.engine.optimizer import Groups, OptimizerSettings
from runner.model.blueprint import Blueprint
from runner.policy.schedule import Rates, Schedule
from runner.system.error import ConfigError
from runner.system.user_code import call_target, find_target

_TARGET = "optim._target_"
_NAMED = 8  # parameters in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSchedule:
    """A learning rate from the user's function of ``updates`` and ``arguments``.

    ``offered`` has values for parameters of those names.
    """

    target: str
    arguments: Mapping[str, Any]
    offered: Mapping[str, Any]

    def rate(self, updates: int) -> float:
        """Learning rate of the update that follows ``updates`` applied ones.

        Raises:
            ConfigError: the function does not return a finite number of at least 0.
        """
        key = "schedule._target_"
        given = {"updates": updates, **self.arguments}
        value = call_target(key, self.target, given, self.offered)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise ConfigError(
                f"{key}={self.target}: returns {value!r} after {updates} updates; must be a finite "
                "learning rate of 0 or more"
            )
        return float(value)


def schedule(config: RunConfig) -> Rates:
    """Make the learning-rate schedule.

    Raises:
        ConfigError: ``schedule._target_`` cannot be called.
    """
    settings = config.schedule
    total = settings.total or config.steps
    if settings._target_ is not None:
        own = OwnSchedule(
            target=settings._target_,
            arguments=settings.arguments or {},
            offered={
                "peak": config.optim.lr,
                "total": total,
                "warmup": settings.warmup,
                "floor": settings.floor,
            },
        )
        own.rate(0)
        return own
    return Schedule(schedule=settings, peak=config.optim.lr, total=total)


def optimizer_settings(config: RunConfig) -> OptimizerSettings:
    """The settings of any optimizer.

    Raises:
        ConfigError: ``optim._target_`` cannot be found.
    """
    optim = config.optim
    target = optim._target_
    if target is None:
        return OptimizerSettings(optim)
    find_target(_TARGET, target)
    arguments, offered = optim.arguments or {}, {"lr": optim.lr}

    def make(groups: Groups) -> torch.optim.Optimizer:
        optimizer = call_target(_TARGET, target, {"params": groups, **arguments}, offered)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{_TARGET}={target}: returns {type(optimizer).__name__}; must be a "
                "torch.optim.Optimizer"
            )
        return optimizer

    return OptimizerSettings(optim, make)


def rules_matched(config: RunConfig, network: Blueprint) -> list[tuple[str, int]]:
    """Each rule's match in ``optim.groups``, and how many tensors take it.

    Raises:
        ConfigError: none takes a rule.
    """
    settings = optimizer_settings(config)
    names = [name for name, one in network.parameters().items() if one.is_trained]
    matched = [sum(settings.rule(name) is rule for name in names) for rule in settings.rules]
    for number, (rule, count) in enumerate(zip(settings.rules, matched, strict=True)):
        if count:
            continue
        fits = any(re.search(rule.match, name) for name in names)
        why = "an earlier rule takes all that it fits" if fits else "no trained parameter fits it"
        shown = ", ".join(names[:_NAMED]) + (", ..." if names[_NAMED:] else "")
        raise ConfigError(
            f"optim.groups[{number}]: match={rule.match!r} takes no tensor, because {why}; change "
            f"or remove it. The trained parameters are {shown}"
        )
    return [(rule.match, count) for rule, count in zip(settings.rules, matched, strict=True)]


def state_shapes(config: RunConfig, network: Blueprint) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of the tensors in a checkpoint of these settings.

    With ``optim._target_``, parameters only: its state is known once it is built.
    """
    settings = optimizer_settings(config)
    is_known = settings.make is None
    return {
        f"{kind}/{name}": parameter.shape
        for name, parameter in network.parameters().items()
        for kind in (
            "param",
            *(
                settings.kinds(name, len(parameter.shape))
                if parameter.is_trained and is_known
                else ()
            ),
        )
    }
