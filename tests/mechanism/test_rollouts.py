"""Rewards that fail are no zeros. Without TRL: tests/drills/test_trainers.py runs its trainers."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.integrations.hf import Rollouts
from runner.system.error import ConfigError

NUM = 4


class Scored:
    """What of a trainer is used: its functions, and how it calls them."""

    def __init__(self, *functions: Any, generation: int = 2, iterations: int = 1) -> None:
        self.reward_funcs = list(functions)
        self.reward_func_names = [f"f{n}" for n in range(len(functions))]
        self.args = SimpleNamespace(
            steps_per_generation=generation,
            num_iterations=iterations,
            gradient_accumulation_steps=2,
        )

    def _calculate_rewards(self) -> torch.Tensor:
        columns = []
        for function in self.reward_funcs:
            if isinstance(function, torch.nn.Module):
                columns.append(function().logits)
                continue
            given = function(completions=["x"] * NUM)
            given = asyncio.run(given) if asyncio.iscoroutine(given) else given
            columns.append(torch.tensor([math.nan if one is None else one for one in given]))
        return torch.stack(columns, dim=1)


class Model(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> Any:
        return SimpleNamespace(logits=torch.full((NUM,), self.value))


def gives(*values: float | None) -> Any:
    return lambda completions: list(values)


def raises(completions: Any) -> Any:
    raise TimeoutError("no answer")


async def later(completions: Any) -> Any:
    raise TimeoutError("no answer later")


FINE = gives(0.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([FINE], ""),
        ([gives(1, 1, 1, 1)], ""),  # constant: no signal, but no failure
        ([FINE, gives(None, None, 2, None)], ""),  # another function has scored them
        ([Model(0.5)], ""),
        ([gives(0.0, None, 1.0, 1.0)], "all functions no function gave a reward"),
        ([FINE, gives(0.0, math.nan, 1.0, 1.0)], "f1 gave the reward nan"),
        ([gives(0.0, math.inf, 1.0, 1.0)], "f0 gave the reward inf"),
        ([FINE, raises], "f1 raised TimeoutError: no answer"),
        ([FINE, later], "f1 raised TimeoutError: no answer later"),
        ([Model(math.nan)], "f0 gave a reward that is not finite"),
    ],
)
def test_a_reward_that_failed_is_seen_and_forgotten_with_its_rollouts(
    functions: list[Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Scored(*functions)
    rollouts = Rollouts.of(trainer)
    assert rollouts is not None and rollouts.numbers() == {}
    rewards = trainer._calculate_rewards()
    assert rewards.shape == (NUM, len(functions))
    assert rollouts.have_failed == bool(words)
    assert words in caplog.text
    assert set(rollouts.numbers()) == {f"rewards/f{n}" for n in range(len(functions))}
    trainer.reward_funcs[:] = [FINE]
    trainer._calculate_rewards()
    assert not rollouts.have_failed


def test_trainers_without_rewards_are_left_alone() -> None:
    assert Rollouts.of(SimpleNamespace()) is None


@pytest.mark.parametrize(("generation", "iterations"), [(4, 1), (1, 1), (2, 2)])
def test_rollouts_that_several_steps_use_are_refused(generation: int, iterations: int) -> None:
    with pytest.raises(ConfigError, match="set steps_per_generation to gradient_accumulation"):
        Rollouts.of(Scored(FINE, generation=generation, iterations=iterations))
