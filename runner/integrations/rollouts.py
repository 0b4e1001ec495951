"""Rewards of trainers that train on what they sample (TRL's GRPO and RLOO): a failure is no zero.

TRL gives a completion without a reward the advantage 0, and adds up rewards without those that are
NaN; so it trains on what nobody has scored. Here the step of such rollouts is discarded.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from runner.system.error import ConfigError

_log = logging.getLogger(__name__)


class Rollouts:
    """Watches the rewards of one trainer on one rank.

    Attributes:
        have_failed: whether a reward of the rollouts that are trained on now failed: its function
            raised or gave NaN or Inf, or no function gave any.
        rewards: FP32 ``[completions of all ranks, functions]``, of these rollouts.

    Args:
        trainer: has ``reward_funcs``.

    Raises:
        ConfigError: rollouts are trained on in other steps than the one that made them.
    """

    def __init__(self, trainer: Any) -> None:
        _require_one_step(trainer.args)
        self.have_failed = False
        self.rewards: torch.Tensor | None = None
        self._calculate = trainer._calculate_rewards
        self._names: Sequence[str] = trainer.reward_func_names
        trainer.reward_funcs = [
            self._watched(function, name)
            for function, name in zip(trainer.reward_funcs, self._names, strict=True)
        ]
        trainer._calculate_rewards = self._begin

    @classmethod
    def of(cls, trainer: Any) -> Rollouts | None:
        """None for a trainer that samples nothing."""
        return cls(trainer) if hasattr(trainer, "reward_funcs") else None

    def numbers(self) -> dict[str, float]:
        """The mean of each function's rewards, of completions that it has scored; by column."""
        if self.rewards is None:
            return {}
        means = self.rewards.double().nanmean(dim=0).tolist()
        return {f"rewards/{_column(n)}": m for n, m in zip(self._names, means, strict=True)}

    def _begin(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Replaces the trainer's ``_calculate_rewards``, which begins each set of rollouts."""
        self.have_failed = False
        rewards: torch.Tensor = self._calculate(*args, **kwargs)
        self.rewards = rewards
        if bool(rewards.isnan().all(dim=1).any()):
            self._failed("no function gave a reward for a completion", "all functions")
        return rewards

    def _watched(self, function: Any, name: str) -> Any:
        if isinstance(function, nn.Module):
            function.register_forward_hook(partial(self._at_model, name))
            return function
        if inspect.iscoroutinefunction(function):

            async def awaited(**given: Any) -> Any:
                try:
                    return self._checked(await function(**given), name)
                except Exception as error:  # a user's, on this rank alone
                    return self._raised(error, name, given)

            return awaited

        def called(**given: Any) -> Any:
            try:
                return self._checked(function(**given), name)
            except Exception as error:  # a user's, on this rank alone
                return self._raised(error, name, given)

        return called

    def _at_model(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not bool(torch.isfinite(output.logits).all()):
            self._failed("gave a reward that is not finite", name)

    def _checked(self, rewards: Sequence[float | None], name: str) -> Sequence[float | None]:
        odd = [one for one in rewards if one is not None and not math.isfinite(one)]
        if odd:
            self._failed(f"gave the reward {float(odd[0])}", name)
        return rewards

    def _raised(self, error: Exception, name: str, given: dict[str, Any]) -> list[None]:
        """The other ranks wait for these rewards, so that the error cannot leave this rank."""
        self._failed(f"raised {type(error).__name__}: {error}", name)
        return [None] * len(given["completions"])

    def _failed(self, what: str, name: str) -> None:
        self.have_failed = True
        _log.warning("reward function %s %s; the step is discarded", name, what)


def _require_one_step(args: Any) -> None:
    generation, iterations = args.steps_per_generation, args.num_iterations
    if generation * iterations != args.gradient_accumulation_steps:
        raise ConfigError(
            f"guard_trainer: steps_per_generation={generation} and num_iterations={iterations} "
            f"with gradient_accumulation_steps={args.gradient_accumulation_steps}: rollouts made "
            "in one step would be trained on in other steps too, which could not be skipped "
            "exactly; set steps_per_generation to gradient_accumulation_steps, and "
            "num_iterations=1"
        )


def _column(name: str) -> str:
    return "".join(one if one.isalnum() and one.isascii() else "_" for one in name)[:60] or "_"
