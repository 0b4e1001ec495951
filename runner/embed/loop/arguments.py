"""What a guard is given, checked before it opens the run: kinds of models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from runner.distributed.agreement import Ranks
from runner.embed.state.stages import Stages
from runner.system.error import ConfigError

# Optimizers whose state lies in another object, or on other ranks; by name, so that nothing is
# imported.
_REFUSED_OPTIMIZERS = {
    "ZeroRedundancyOptimizer": "each rank holds the state of a part of the parameters in an "
    "optimizer of its own; use FSDP2 (fully_shard), or a DeepSpeed engine of stage 1",
    "PostLocalSGDOptimizer": "the ranks' weights differ between its averages",
    "DistributedOptimizer": "its parameters lie in other processes",
}


def check_arguments(
    models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any], *, is_a_stage: bool
) -> None:
    """
    Raises:
        ConfigError: an argument is of a kind that cannot be guarded.
    """
    for what, given in (("model", models), ("optimizer", optimizers)):
        if not given:
            raise ConfigError(f"Guard: {what}= is empty; give the loop's {what}, or several")
    for model in models:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"Guard: model={_kind(model)}: must be a torch.nn.Module, or several in a list"
            )
        _check_model(model)
    for optimizer in optimizers:
        _check_optimizer(optimizer, optimizers)
    for scheduler in schedulers:
        if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
            raise ConfigError(
                f"Guard: scheduler={_kind(scheduler)}: needs state_dict() and load_state_dict()"
            )
        if is_a_stage and isinstance(scheduler, torch.amp.GradScaler) and scheduler.is_enabled():
            raise ConfigError(
                "Guard: pipeline= with a GradScaler, which sees overflows of its own stage alone: "
                "the others would make their update, and their scales part; use BF16"
            )


def _check_model(model: nn.Module) -> None:
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise ConfigError(
            "Guard: FSDP1 (FullyShardedDataParallel), whose parameters are views of flat buffers; "
            "use FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ConfigError(
                f"Guard: parameter {name!r} has no values yet; "
                "run one batch through the model, or load its weights, before Guard(...)"
            )


def _check_optimizer(optimizer: Any, given: Sequence[Any]) -> None:
    name = type(optimizer).__name__
    if name in _REFUSED_OPTIMIZERS:
        raise ConfigError(f"Guard: optimizer={name}: {_REFUSED_OPTIMIZERS[name]}")
    if not all(hasattr(optimizer, needed) for needed in ("param_groups", "state", "step")):
        raise ConfigError(
            f"Guard: optimizer={_kind(optimizer)}: must be a torch.optim.Optimizer, or several in "
            "a list"
        )
    for key, inner in vars(optimizer).items():
        is_another = isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state
        if is_another and all(inner is not other for other in given):
            raise ConfigError(
                f"Guard: optimizer={name}: has an optimizer with a state of its own, .{key} "
                f"({type(inner).__name__}), that would not be saved; give both: "
                f"optimizer=[{name.lower()}, {name.lower()}.{key}]"
            )


def check_clip(clip: Any, optimizers: Sequence[Any]) -> None:
    """
    Raises:
        ConfigError: it is no bound, or an optimizer computes gradients after they were clipped.
    """
    if clip is None:
        return
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0:
        raise ConfigError(f"clip={clip!r}: must be greater than 0, or None for no clipping")
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                f"clip={clip}: {type(optimizer).__name__} computes its gradients again in "
                "step(closure), where nothing clips them; leave clip out, and clip in the closure"
            )


def check_alike(
    parameters: dict[str, torch.Tensor], optimizers: Sequence[Any], ranks: Ranks, stages: Stages
) -> None:
    """All ranks of a stage train the same parameters, in as many groups. Collective.

    Raises:
        ConfigError: a parameter has another name, shape or dtype on some rank.
    """
    groups = [len(optimizer.param_groups) for optimizer in optimizers]
    own = {name: f"{p.dtype} {list(p.shape)}" for name, p in parameters.items()}
    by_rank = ranks.gather([groups, own])
    for rank, (other, _) in enumerate(by_rank):
        if other != by_rank[0][0]:
            raise ConfigError(
                f"Guard: the optimizers have {by_rank[0][0]} groups of parameters on rank 0, "
                f"{other} on rank {rank}; give all ranks as many, also if some are empty"
            )
    for members in stages.members:
        first = by_rank[members[0]][1]
        for rank in members[1:]:
            _require_same(first, by_rank[rank][1], members[0], rank)


def _require_same(
    first: Mapping[str, str], other: Mapping[str, str], first_rank: int, rank: int
) -> None:
    for name in sorted({*first, *other}):
        here, there = first.get(name, "none"), other.get(name, "none")
        if here != there:
            raise ConfigError(
                f"Guard: {name!r} is {here} on rank {first_rank}, {there} on rank {rank}: all "
                "ranks must train the same parameters. Stages of a pipeline are given with "
                'pipeline=mesh["pp"]; experts that only some ranks have are DTensors on a mesh '
                "of all ranks, or cannot be guarded"
            )


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
