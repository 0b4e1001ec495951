"""A DeepSpeed engine of ZeRO stage 1 or 2 in a user's loop.

Its optimizer keeps FP32 weights and moments in flat tensors, of which each rank has its own part.
They are saved as one tensor with one row per rank. DeepSpeed makes the update, clips and steps its
schedule. To refuse a step, its gradients are set to NaN, and DeepSpeed skips it as it does on an
overflow. (The public ``safe_set_full_grad`` does not work: in 0.19.8 it writes into the BF16
gradients of stage 1, which are no longer read then, or it fails.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from runner.distributed.agreement import Ranks
from runner.embed.loop.measure import Logged, Measurer
from runner.embed.state.geometry import Geometry, row
from runner.embed.state.loop_state import LoopState
from runner.engine.forward import squared_norm
from runner.engine.whole_state import gather_flat
from runner.engine.zero import stage_of
from runner.system.error import CheckpointError, ConfigError

_SUPPORTED = ("BF16_Optimizer", "DeepSpeedZeroOptimizer")


def is_deepspeed(value: object) -> bool:
    """Whether it is a DeepSpeed object; does not import DeepSpeed."""
    return type(value).__module__.partition(".")[0] == "deepspeed"


def engine_in(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Any | None:
    """The DeepSpeed engine among a guard's arguments; None without DeepSpeed.

    Raises:
        ConfigError: the engine is of an unsupported kind.
    """
    if not any(map(is_deepspeed, [*models, *optimizers])):
        return None
    names = [type(given).__name__ for given in (*models, *optimizers)]
    if len(models) > 1 or len(optimizers) > 1 or names[0] != "DeepSpeedEngine":
        raise _unsupported(
            f"{' and '.join(names)}: give the engine as model= and its optimizer as optimizer=, "
            "one of each; pipelines are not supported"
        )
    engine: Any = models[0]
    _check_kind(engine)
    return engine


def _check_kind(engine: Any) -> None:
    wrapped = engine.optimizer
    name = type(wrapped).__name__
    if engine.zero_optimization_stage() not in (1, 2) or name not in _SUPPORTED:
        raise _unsupported(
            f"ZeRO stage {engine.zero_optimization_stage()} ({name}): stages 1 and 2 are "
            "supported; use python -m runner parallel=zero3, or FSDP2 (fully_shard)"
        )
    if engine.fp16_enabled():
        raise _unsupported("fp16: its loss scaling skips steps on purpose; use bf16")
    if getattr(wrapped, "cpu_offload", False):
        raise _unsupported("offload_optimizer: use python -m runner parallel=zero2")
    if (
        engine.has_moe_layers
        or dist.get_world_size(wrapped.dp_process_group) < dist.get_world_size()
    ):
        raise _unsupported("experts, or ranks that are not all data parallel")
    if name == "DeepSpeedZeroOptimizer" and not (
        wrapped.compute_grad_norm
        and (wrapped.check_grad_overflow or wrapped.dtype is not torch.bfloat16)
    ):
        raise _unsupported(
            "a gradient that is not finite would be applied: set bf16.check_grad_overflow=true "
            "(and leave zero_optimization.compute_grad_norm on) in DeepSpeed's settings"
        )


def _unsupported(why: str) -> ConfigError:
    return ConfigError(f"Guard: DeepSpeed engine, {why}")


class ZeroState(LoopState):
    """The weights of the engine's module, and the rows of its flat tensors."""

    def __init__(self, engine: Any, ranks: Ranks, device: torch.device) -> None:
        base = engine.basic_optimizer
        self._flat_ids = {id(flat) for group in base.param_groups for flat in group["params"]}
        super().__init__([engine.module], [base], ranks, device)
        self._flats = {n for n, p in self.parameters.items() if id(p) in self._flat_ids}

    def geometry_of(self, tensor: torch.Tensor, name: str, like: str | None = None) -> Geometry:
        if like not in self._flats:
            return super().geometry_of(tensor, name, like)
        return row([tensor.numel()], self._ranks.rank, self._ranks.world_size)

    def expect(self, tensors: Mapping[str, Any]) -> None:
        for name in sorted(self._flats):
            stored = tensors.get(f"param/{name}")
            if stored is not None and stored[1][0] != self._ranks.world_size:
                raise CheckpointError(
                    f"the checkpoint is of a DeepSpeed engine on {stored[1][0]} ranks, this run "
                    f"has {self._ranks.world_size}: its parts only fit as many ranks as they were "
                    "made on; start on as many, or use python -m runner parallel=zero1|zero2|zero3"
                )
        super().expect(tensors)

    def _whole(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if tensor.dim() != 1 or tensor.shape not in {self.parameters[n].shape for n in self._flats}:
            return tensor
        rows = tensor.new_empty(self._ranks.world_size * math.prod(tensor.shape))
        gather_flat(rows, tensor.contiguous())
        return rows


class ZeroMeasurer(Measurer):
    """Measures the gradients that DeepSpeed has reduced, and makes it skip refused steps."""

    def __init__(self, state: ZeroState, ranks: Ranks, logged: Logged, engine: Any) -> None:
        super().__init__(state, ranks, logged, clip=None)
        self._order = None  # DeepSpeed has reduced the gradients, and holds the weights
        self._engine = engine
        self._stage = stage_of(engine.optimizer)

    def _square(self) -> torch.Tensor:
        gradients = [gradient.float() for gradient in self._stage.gradients()]
        return squared_norm(gradients, self._state.device)

    def adds_differently_at_first(self) -> bool:
        """False: DeepSpeed's buckets stay as they are."""
        return False

    def forget_late_gradients(self) -> None:
        """Nothing to drop: DeepSpeed has ended the step."""

    def forget_gradients(self) -> None:
        """Make DeepSpeed skip the step as on an overflow; nothing else changes. Collective.

        Raises:
            ConfigError: DeepSpeed applied the step even so.
        """
        for gradient in self._stage.gradients():
            gradient.fill_(math.nan)
        self._engine.step()
        if self._engine.was_step_applied():
            raise _unsupported("it applied a step that should be skipped; nothing was saved")
