"""Measures a step of a user's loop: loss and gradient norm, agreed by all ranks."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from runner.checkpoint.jobs import JobProgress
from runner.data.cursor import BatchPlan
from runner.distributed.agreement import FINGERPRINT_SIZE, Ranks
from runner.embed.geometry import local
from runner.embed.state import LoopState
from runner.policy.decision.signals import Limits, StepSignals
from runner.train.step import StepInfo, Suspect

_LOSS, _GRAD_SQUARE, _NONFINITE, _STOP, _KEPT, _TOKENS = range(6)
_FINGERPRINT = 6
_JOBS = _FINGERPRINT + FINGERPRINT_SIZE
_NUM_LOUDEST = 3
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def plan_of(start: int, stop: int) -> BatchPlan:
    """A plan for the batches ``[start, stop)``, whose positions are their numbers."""
    numbers = np.arange(start, stop, dtype=np.int64)
    return BatchPlan(positions=numbers, indices=numbers)


class Measurer:
    """Measures and clips gradients on one rank.

    Args:
        clip: bound of the global gradient norm; None: gradients stay as they are.
    """

    def __init__(self, state: LoopState, ranks: Ranks, *, clip: float | None) -> None:
        self._state = state
        self._ranks = ranks
        self._clip = clip
        self._own: tuple[bool, float] = (True, 0.0)
        self._norm: torch.Tensor | None = None
        self._sizes: list[int] = []
        self._trained: list[tuple[torch.Tensor, int]] = []

    def step(
        self,
        loss: torch.Tensor | float,
        *,
        step: int,
        batches: tuple[int, int],
        limits: Limits,
        identity: Mapping[str, Any],
        flags: tuple[bool, bool, int],
        progress: JobProgress,
        began: float,
    ) -> StepInfo:
        """Agree on the step's numbers: one all-reduce. Collective.

        Args:
            flags: whether a stop is requested, whether lines cannot be written, and the number of
            tokens in this rank's batch.

        Raises:
            RankError: a rank is at another step than the others.
        """
        ranks, device = self._ranks, self._state.device
        mean_loss = _scalar(loss, device)
        square = self._square().to(device)
        is_bad = (~torch.isfinite(mean_loss)) | (~torch.isfinite(square))
        own_numbers = torch.stack([mean_loss, square, is_bad.double()])
        stop, keeps_lines, tokens = flags
        other_numbers = [
            float(stop),
            float(keeps_lines),
            float(tokens),
            *ranks.fingerprint(identity),
        ]
        other_numbers += progress.counts
        packed = torch.cat(
            [own_numbers, torch.tensor(other_numbers, dtype=torch.float64, device=device)]
        )
        if ranks.world_size > 1:
            own_copy = own_numbers.clone()
            ranks.all_reduce(packed)
            numbers = torch.cat([packed, own_copy]).tolist()
            sums, own_values = numbers[:-3], numbers[-3:]
        else:
            sums = packed.tolist()
            own_values = sums[:3]
        # Only the loss shows which rank is at fault: a reduced gradient is the same on all ranks.
        self._own = (math.isfinite(own_values[0]), own_values[0])
        ranks.require_alike(sums[_FINGERPRINT:_JOBS], identity)
        return self._info(sums, step, batches, limits, progress, began)

    def _info(
        self,
        numbers: Sequence[float],
        step: int,
        batches: tuple[int, int],
        limits: Limits,
        progress: JobProgress,
        began: float,
    ) -> StepInfo:
        signals = StepSignals(
            step=step,
            start=batches[0],
            stop=batches[1],
            loss=numbers[_LOSS] / self._ranks.world_size,
            grad_norm=math.sqrt(numbers[_GRAD_SQUARE]) if numbers[_GRAD_SQUARE] >= 0 else math.nan,
            tokens=int(numbers[_TOKENS]),
            nonfinite_ranks=int(numbers[_NONFINITE]),
            gated=False,
        )
        if limits.exceeded(signals):
            signals = replace(signals, gated=True)
        return StepInfo(
            signals=signals,
            batch=plan_of(*batches),
            stop_requested=numbers[_STOP] > 0,
            keeps_lines=numbers[_KEPT] > 0,
            jobs=progress.jobs,
            job_counts=tuple(numbers[_JOBS:]),
            seconds=time.monotonic() - began,
        )

    def _parameters(self) -> list[tuple[torch.Tensor, int]]:
        """Each trained parameter, and how many ranks hold the same part of it."""
        sizes = [
            len(group["params"]) for one in self._state.optimizers for group in one.param_groups
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
                is_sharded = is_sharded or isinstance(grad, DTensor)
                by_copies[copies].append(local(grad))
        self._norm = None
        total = torch.zeros((), dtype=torch.float64)
        for copies, grads in by_copies.items():
            norm = get_total_norm(grads)
            if not is_sharded:
                self._norm = norm  # the same bits that torch's own clipping uses
            total = total.to(norm.device) + norm.double().square() / copies
        return total

    def clip(self, grad_norm: float) -> None:
        """Clip the gradients that were measured last, as torch does."""
        if self._clip is None:
            return
        trained = [parameter for parameter, _ in self._parameters()]
        if self._norm is not None:
            clip_grads_with_norm_(trained, self._clip, self._norm)
            return
        factor = min(1.0, self._clip / (grad_norm + _CLIP_EPS))
        grads = [local(p.grad) for p in trained if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def forget_gradients(self) -> None:
        """Drop the gradients of a step that is not applied."""
        for parameter, _ in self._parameters():
            parameter.grad = None

    def suspects(self, plan: BatchPlan) -> list[Suspect]:
        """The ranks whose last loss was not finite, or else those with the highest. Collective."""
        is_finite, loss = self._own
        by_rank = self._ranks.gather(
            [is_finite, min(loss, sys.float_info.max) if is_finite else 0.0]
        )
        rows = [
            (rank, bool(is_finite), float(loss)) for rank, (is_finite, loss) in enumerate(by_rank)
        ]
        bad = [row for row in rows if not row[1]]
        chosen = bad or sorted(rows, key=lambda row: -row[2])[:_NUM_LOUDEST]
        return [
            Suspect(rank=rank, position=plan.start, name=f"batch {plan.start}", is_finite=finite)
            for rank, finite, _ in chosen
        ]


def _scalar(loss: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """The mean loss as an FP64 scalar on ``device``."""
    if not isinstance(loss, torch.Tensor):
        return torch.tensor(float(loss), dtype=torch.float64, device=device)
    value = loss.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.double().mean().to(device)
