"""Measures a step of a user's loop: loss and gradient norm, agreed by all ranks."""

from __future__ import annotations

import math
import sys
from collections import defaultdict

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from runner.data.cursor import BatchPlan
from runner.distributed.agreement import Ranks
from runner.embed.loop.loop_order import LoopOrder
from runner.embed.state.geometry import local
from runner.embed.state.loop_state import LoopState
from runner.policy.decision.signals import Bounds
from runner.system.error import ConfigError
from runner.train.agreed_step import (
    GRAD_SQUARE,
    LOSS,
    AgreedStep,
    RankReport,
    StepInfo,
    Suspect,
    on_device,
)
from runner.train.gate import is_closed

_TWO = 2
_NUM_LOUDEST = 3
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def plan_of(start: int, stop: int) -> BatchPlan:
    """A plan for the batches ``[start, stop)``, whose positions are their numbers."""
    numbers = np.arange(start, stop, dtype=np.int64)
    return BatchPlan(positions=numbers, indices=numbers)


class Measurer:
    """Measures and clips gradients on one rank.

    Attributes:
        reads_draw: on some rank reading batches has drawn from the random generators.

    Args:
        clip: bound of the global gradient norm; None: gradients stay as they are.
    """

    def __init__(self, state: LoopState, ranks: Ranks, *, clip: float | None) -> None:
        self._state = state
        self._ranks = ranks
        self._clip = clip
        self.reads_draw = False
        self._own: tuple[bool, float] = (True, 0.0)
        # Of the step's batches but the last, by number; and those of the step measured last.
        self._noted: dict[int, torch.Tensor] = {}
        self._judged: dict[int, torch.Tensor] = {}
        self._norm: torch.Tensor | None = None
        self._sizes: list[int] = []
        self._trained: list[tuple[torch.Tensor, int]] = []
        self._plain_square = 0.0  # of the gradients of plain tensors, while they are compared
        self._order: LoopOrder | None = LoopOrder(state.parameters, ranks)

    def note(self, loss: torch.Tensor | float, number: int) -> None:
        """Record the loss of one micro-batch of an accumulated step."""
        self._noted[number] = _scalar(loss, self._state.compute_device)

    def adds_differently_at_first(self) -> bool:
        """Whether the first backward of a process may reduce gradients in another order.

        DistributedDataParallel rebuilds its buckets after the first. With two ranks any order gives
        the same sum.
        """
        return self._ranks.world_size > _TWO and any(
            not isinstance(parameter, DTensor) for parameter, _ in self._parameters()
        )

    def begin_step(self) -> None:
        """Begin a step: its first batch was read."""
        self._noted = {}
        if self._order is not None:
            self._order.begin()

    def require_unchanged(self) -> None:
        """
        Raises:
            ConfigError: a weight has changed since the step began.
        """
        if self._order is not None:
            self._order.require_unchanged()

    def launch(
        self,
        loss: torch.Tensor | float,
        *,
        step: int,
        batches: tuple[int, int],
        tokens: int,
        bounds: Bounds | None,
        report: RankReport,
        draws: bool = False,
    ) -> AgreedStep:
        """Agree on the step's numbers, and decide on the device: one all-reduce. Collective.

        Nothing here waits for the device where the loss is on it.

        Args:
            step: number of the update.
            tokens: in this rank's batch.
            bounds: None lets every step be applied.
            draws: whether reading this rank's batches drew random numbers.
        """
        ranks, device = self._ranks, self._state.compute_device
        value = self._loss_of_step(loss, batches)
        square = self._square().to(device)
        if self._order is not None and self._order.is_compared:
            self._order.require_unchanged()
            if ranks.world_size > 1:
                self._order.require_alike(self._plain_square)
        is_bad = (~torch.isfinite(value)) | (~torch.isfinite(square))
        own = torch.stack([value, square, is_bad.double()])
        gate_before = 0.0  # not compared between ranks
        rest = [float(tokens), gate_before, *report.numbers(ranks), float(draws)]
        packed = torch.cat([own, on_device(rest, device)])
        ranks.all_reduce(packed)
        mean, norm = packed[LOSS] / ranks.world_size, packed[GRAD_SQUARE].sqrt()
        closed = is_closed(packed, mean, norm, bounds)
        decided = torch.stack([value, mean, norm, closed.double()])
        numbers = torch.cat([packed, decided])
        return AgreedStep(step=step, batch=plan_of(*batches), report=report, numbers=numbers)

    def read(self, agreed: AgreedStep) -> StepInfo:
        """Read the numbers of a step, in the order of launching.

        Raises:
            RankError: a rank stands elsewhere than the others.
        """
        info, (drawn, own) = agreed.read(self._ranks)
        # By the loss alone: a gradient that was reduced is everybody's.
        self._own = (math.isfinite(own), own)
        self.reads_draw = self.reads_draw or drawn > 0
        return info

    def _loss_of_step(self, loss: torch.Tensor | float, batches: tuple[int, int]) -> torch.Tensor:
        """The mean over the losses of this rank's micro-batches."""
        value = _scalar(loss, self._state.compute_device)
        judged, self._noted = self._noted, {}
        if judged:
            judged[batches[1] - 1] = value
            value = torch.stack(list(judged.values())).mean()
        self._judged = judged
        return value

    def _parameters(self) -> list[tuple[torch.Tensor, int]]:
        """Each trained parameter, and how many ranks hold the same part of it."""
        sizes = [
            len(group["params"])
            for optimizer in self._state.optimizers
            for group in optimizer.param_groups
        ]
        if sizes != self._sizes:
            self._sizes = sizes
            self._trained = [
                (parameter, self._state.geometry_of(parameter, f"parameter {number}").copies)
                for number, parameter in enumerate(self._state.trained())
            ]
        return self._trained

    def _square(self) -> torch.Tensor:
        """This rank's share of the squared norm of all gradients, an FP64 scalar."""
        by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
        is_sharded = False
        for parameter, copies in self._parameters():
            grad = parameter.grad
            if grad is not None:
                is_sharded = is_sharded or isinstance(grad, DTensor) or grad.is_sparse
                by_copies[copies].append(_values(parameter))
        self._norm = None
        if self._order is not None and self._order.is_compared:
            self._plain_square = self._square_of_plain()
        shares = []
        for copies, grads in by_copies.items():
            norm = get_total_norm(grads)
            if not is_sharded:
                self._norm = norm  # the same bits that torch's own clipping uses
            shares.append(norm.double().square() / copies)
        if not shares:
            raise ConfigError(
                "guard.ok: no parameter of the optimizers has a gradient. Call it after "
                "loss.backward() and before the optimizer's step and zero_grad(). An optimizer "
                "that steps in backward (by a hook) cannot be guarded. fully_shard(model) comes "
                "before its optimizer and before Guard(...)"
            )
        return torch.stack(shares).sum()

    def _square_of_plain(self) -> float:
        grads = [
            _values(parameter)
            for parameter, _ in self._parameters()
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor)
        ]
        return float(get_total_norm(grads)) ** 2 if grads else 0.0

    def clip(self, grad_norm: torch.Tensor) -> None:
        """Clip the gradients that were measured last, as torch does."""
        if self._clip is None:
            return
        trained = [parameter for parameter, _ in self._parameters()]
        if self._norm is not None:
            clip_grads_with_norm_(trained, self._clip, self._norm)
            return
        if not any(p.grad is not None and p.grad.is_sparse for p in trained):
            # Sharded: torch adds the shards' norms in its own way, so in a collective of its own.
            clip_grad_norm_(trained, self._clip)
            return
        factor = (self._clip / (grad_norm + _CLIP_EPS)).clamp(max=1.0)
        grads = [_values(p) for p in trained if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))

    def forget_gradients(self) -> None:
        """Drop the gradients of a step that is not applied."""
        for parameter, _ in self._parameters():
            parameter.grad = None

    def forget_late_gradients(self) -> None:
        """Drop gradients that the loop computed after its step was discarded."""
        self.forget_gradients()

    def suspects(self, plan: BatchPlan) -> list[Suspect]:
        """The ranks whose last loss was not finite, or else those with the highest. Collective."""
        is_finite, loss = self._own
        number = self._worst_of(plan)
        by_rank = self._ranks.gather(
            [is_finite, min(loss, sys.float_info.max) if is_finite else 0.0, number]
        )
        rows = [
            (rank, bool(is_finite), float(loss), int(number))
            for rank, (is_finite, loss, number) in enumerate(by_rank)
        ]
        bad = [row for row in rows if not row[1]]
        chosen = bad or sorted(rows, key=lambda row: -row[2])[:_NUM_LOUDEST]
        return [
            Suspect(rank=rank, position=number, name=f"batch {number}", is_finite=finite)
            for rank, finite, _, number in chosen
        ]

    def _worst_of(self, plan: BatchPlan) -> int:
        """This rank's batch of the step that is not finite, or has the highest loss."""
        if not self._judged:
            return plan.start
        losses = dict(
            zip(self._judged, torch.stack([*self._judged.values()]).tolist(), strict=True)
        )
        bad = [number for number, loss in losses.items() if not math.isfinite(loss)]
        return bad[0] if bad else max(losses, key=lambda number: losses[number])


def _values(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter's gradient; of a sparse one the rows that it has."""
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        if not grad.is_coalesced():
            parameter.grad = grad = grad.coalesce()
        return grad._values()
    return local(grad)


def _scalar(loss: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """The mean loss as an FP64 scalar on ``device``.

    Raises:
        ConfigError: it is no number.
    """
    if not isinstance(loss, torch.Tensor):
        try:
            return torch.tensor(float(loss), dtype=torch.float64, device=device)
        except (TypeError, ValueError):
            raise _no_loss(f"{type(loss).__name__} {loss!r:.60}") from None
    value = loss.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not value.numel() or value.is_complex():
        raise _no_loss(f"a tensor of shape {list(value.shape)}, {value.dtype}")
    return value.double().mean().to(device)


def _no_loss(what: str) -> ConfigError:
    return ConfigError(
        f"guard.ok: the loss is {what}; give a real number, or a tensor of them with a scalar or "
        "one value for each sample"
    )
