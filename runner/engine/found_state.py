"""What an optimizer from elsewhere keeps for a parameter, found out by trying it on a small one.

A shard of the state is cut like its parameter, so it must be an FP32 tensor of the same shape; a
number beside it must be the count of updates. What is kept in another way is refused in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.system.error import ConfigError

_COUNT = "step"
_SIDE = 3
_STEPS = 3
_FIXED = ("params", "names", "rate")
Make = Callable[[list[dict[str, Any]]], Optimizer]


@functools.cache
def found_kinds(make: Make, num_dims: int, name: str) -> tuple[str, ...]:
    """Names of its tensors for a parameter of so many dimensions, sorted.

    Raises:
        ConfigError: it keeps what cannot be sharded, counted or begun before the weights are there.
    """
    key = f"optim._target_={name}"
    trials = [_tried(make, num_dims, value, key) for value in (0.25, -0.5)]
    (parameter, state), (_, other) = trials
    kinds = []
    for kind, kept in state.items():
        if kind == _COUNT:
            continue
        if not isinstance(kept, Tensor) or kept.shape != parameter.shape:
            raise ConfigError(
                f"{key}: keeps {kind!r} for a parameter of shape {tuple(parameter.shape)}, which "
                f"is {_described(kept)}; a checkpoint holds FP32 tensors in the parameter's shape "
                "and the count 'step'. Use adamw, sgd, lion, muon, or one that keeps such"
            )
        if kept.dtype != torch.float32:
            raise ConfigError(f"{key}: keeps {kind!r} in {kept.dtype}; only FP32 can be kept")
        if not torch.equal(kept, other[kind]):
            raise ConfigError(
                f"{key}: begins {kind!r} with the parameter's values, which are not there yet when "
                "its state is made"
            )
        kinds.append(kind)
    return tuple(sorted(kinds))


def require_elementwise(make: Make, name: str) -> None:
    """
    Raises:
        ConfigError: an element's update depends on its neighbours, of which a shard has a part.
    """
    generator = torch.Generator().manual_seed(1)
    grads = torch.randn(_STEPS, 2 * _SIDE, _SIDE, generator=generator)
    whole = torch.ones(2 * _SIDE, _SIDE)
    halves = [torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)]
    together, apart = (
        make([{"params": params, "names": ["trial"] * len(params), "rate": 1.0}])
        for params in ([whole], halves)
    )
    for grad in grads:
        whole.grad = grad.clone()
        for half, own in zip(halves, grad.chunk(2), strict=True):
            half.grad = own.clone()
        together.step()
        apart.step()
    if not torch.allclose(whole, torch.cat(halves), rtol=1e-5, atol=1e-7):
        raise ConfigError(
            f"optim._target_={name}: updates an element by its neighbours too (a norm or a factor "
            "of the whole parameter), of which each rank has a part only; use parallel=ddp, or "
            "one rank"
        )


def prime(optimizer: Optimizer) -> None:
    """Make its state by a step on gradients of zero, which leaves no trace in the parameters."""
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    before = [shard.clone() for shard in shards]
    for shard in shards:
        shard.grad = torch.zeros_like(shard)
    optimizer.step()
    for shard, values in zip(shards, before, strict=True):
        shard.copy_(values)
        shard.grad = None
        state = optimizer.state[shard]
        if isinstance(state.get(_COUNT), Tensor):
            state[_COUNT].zero_()
        elif _COUNT in state:
            state[_COUNT] = 0


def _tried(make: Make, num_dims: int, value: float, key: str) -> tuple[Tensor, dict[str, Any]]:
    parameter = torch.full((_SIDE,) * num_dims, value)
    try:
        optimizer = make([{"params": [parameter], "names": ["trial"], "rate": 1.0}])
        numbers = _numbers(optimizer)
        prime(optimizer)
    except ConfigError:
        raise
    except Exception as error:  # of somebody else's code
        raise ConfigError(
            f"{key}: cannot train a parameter of {num_dims} dimensions: {type(error).__name__}: "
            f"{error}"
        ) from error
    changed = sorted(name for name, one in _numbers(optimizer).items() if numbers.get(name) != one)
    if changed:
        raise ConfigError(
            f"{key}: keeps {', '.join(changed)} for all parameters together and changes it in a "
            "step; a checkpoint has no place for that"
        )
    return parameter, dict(optimizer.state[parameter])


def _numbers(optimizer: Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    return {name: repr(value) for name, value in group.items() if name not in _FIXED}


def _described(kept: object) -> str:
    return f"{kept.dtype} {tuple(kept.shape)}" if isinstance(kept, Tensor) else repr(kept)[:80]
