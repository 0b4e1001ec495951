"""Measures a step of a user's loop: loss and gradient norm, agreed by all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from runner.data.cursor import BatchPlan
from runner.distributed.agreement import Ranks
from runner.embed.state.codec import pack, unpack
from runner.embed.state.geometry import local
from runner.embed.state.loop_state import LoopState
from runner.embed.state.staged_state import EXPERTS, differing_norms, norm_of
from runner.policy.decision.signals import Bounds, finite
from runner.system.error import ConfigError
from runner.train.agreed_step import (
    GRAD_SQUARE,
    LOSS,
    AgreedStep,
    MetricNames,
    RankReport,
    StepInfo,
    Sums,
    Suspect,
    check_name,
    is_closed,
    on_device,
)

# The metrics that a loop has handed over and that no step has taken yet.

_WHERE, _PAIR = "guard.log", 2


class Logged:
    """Sums and counts by name; state of the loop, because an evaluation goes with the next step.

    Attributes:
        sums: replaced at each change, so that holding it is a copy.
    """

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, values: Mapping[str, Any], device: torch.device) -> None:
        """See :meth:`runner.Guard.log`.

        Raises:
            ConfigError: a value is no number, or a name cannot be one.
        """
        sums = dict(self.sums)
        for name, value in values.items():
            check_name(name, _WHERE, is_evaluated=False)
            pair = value if isinstance(value, tuple | list) else (value, 1)
            if len(pair) != _PAIR:
                raise ConfigError(
                    f"{_WHERE}: {name!r} is {type(value).__name__} of {len(pair)}; give a number, "
                    "or (sum, count)"
                )
            total, count = (_number(name, one).to(device) for one in pair)
            if name in sums:
                total, count = total + sums[name][0], count + sums[name][1]
            sums[name] = total, count
        self.sums = sums

    def take(self) -> Sums:
        """The sums so far, which are let go."""
        taken, self.sums = self.sums, {}
        return taken

    def to_json(self) -> Any:
        """This rank's sums as JSON. Waits for the device where there are any."""
        return pack(
            {name: [float(one) for one in pair] for name, pair in self.sums.items()}, _WHERE
        )

    def load_json(self, stored: Any, device: torch.device) -> None:
        """Inverse of :meth:`to_json`; None: of a checkpoint that has none."""
        pairs = {} if stored is None else unpack(stored)
        self.sums = {
            name: (_number(name, total).to(device), _number(name, count).to(device))
            for name, (total, count) in pairs.items()
        }


def _number(name: str, value: Any) -> torch.Tensor:
    """A metric's value, or its sum or count, as an FP64 scalar. Does not wait for a device.

    Raises:
        ConfigError: it is no number.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        whole = value.detach()
        return (whole.full_tensor() if isinstance(whole, DTensor) else whole).double().reshape(())
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64)
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else None
    raise ConfigError(
        f"{_WHERE}: {name!r} is {what or f'{type(value).__name__} {value!r:.60}'}; give a number "
        "(or a tensor of one), or (sum, count) of two"
    )


_TWO = 2
_NUM_LOUDEST = 3
_CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_COMPARED = 3  # first steps, in which weights and gradients are compared by value
_PLAIN, _LAID_OUT = 1, 2  # gradients: reduced, and so the same; computed by each of its twins
_COMPARED_NORMS = (("weights", 1e-6), ("gradients", 1e-6), ("gradients", 1e-2))


def plan_of(start: int, stop: int) -> BatchPlan:
    """A plan for the batches ``[start, stop)``, whose positions are their numbers."""
    numbers = np.arange(start, stop, dtype=np.int64)
    return BatchPlan(positions=numbers, indices=numbers)


class Measurer:
    """Measures and clips gradients on one rank.

    Attributes:
        reads_draw: on some rank reading batches has drawn from the random generators.

    Args:
        logged: the loop's own metrics.
        clip: bound of the global gradient norm; None: gradients stay as they are.
    """

    def __init__(
        self, state: LoopState, ranks: Ranks, logged: Logged, *, clip: float | None
    ) -> None:
        self._state = state
        self._ranks = ranks
        self._clip = clip
        self.reads_draw = False
        self._own = 0.0  # loss: a reduced gradient shows no single rank
        # Of the step's batches but the last, by number; and those of the step measured last.
        self._noted: dict[int, torch.Tensor] = {}
        self._judged: dict[int, torch.Tensor] = {}
        self._logged = logged
        self._names = MetricNames(ranks, "guard.log", are_evaluated=False)
        self._norm: torch.Tensor | None = None
        self._part = torch.zeros(())  # of the squared norm
        self._sizes: list[int] = []
        self._trained: list[tuple[torch.Tensor, int]] = []
        self._order: LoopOrder | None = LoopOrder(state, ranks)
        self._giving = [True] * ranks.world_size  # by rank: whether it has a loss

    def note(self, loss: torch.Tensor | float | None, number: int) -> None:
        """Record the loss of one micro-batch of an accumulated step."""
        self._noted[number] = self._scalar(loss)

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
        loss: torch.Tensor | float | None,
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
        self._part = square = self._square().to(device)
        if self._order is not None and self._order.is_compared:
            self._learn_who_gives(is_giving=loss is not None)
            self._order.require_unchanged()
            if ranks.world_size > 1:
                self._order.require_alike()
        is_bad = (~torch.isfinite(value)) | (~torch.isfinite(square))
        own = torch.stack([self._share_of_mean(value, loss), square, is_bad.double()])
        gate_before = 0.0  # not compared between ranks
        metrics = self._names.pack(self._logged.take(), device)
        rest = [float(tokens), gate_before, *report.numbers(ranks), *metrics.flags, float(draws)]
        told = on_device(rest, device)  # in one copy
        packed = torch.cat([own, told[:-1], metrics.sums, told[-1:]])
        ranks.all_reduce(packed)
        mean, norm = packed[LOSS] / ranks.world_size, packed[GRAD_SQUARE].sqrt()
        closed = is_closed(packed, mean, norm, bounds)
        decided = torch.stack([value, mean, norm, closed.double()])
        return AgreedStep(
            step=step,
            batch=plan_of(*batches),
            report=report,
            numbers=torch.cat([packed, decided]),
            metrics=metrics,
        )

    def read(self, agreed: AgreedStep) -> StepInfo:
        """Read the numbers of a step, in the order of launching.

        Raises:
            RankError: a rank stands elsewhere than the others.
            ConfigError: the loop's metrics are called otherwise on another rank.
        """
        info, (drawn, own) = agreed.read(self._ranks)
        self._own = own
        self.reads_draw = self.reads_draw or drawn > 0
        return info

    def _learn_who_gives(self, *, is_giving: bool) -> None:
        """Collective where there is a pipeline.

        Raises:
            ConfigError: nobody gives a loss.
        """
        if self._state.stages.count == 1:
            return
        self._giving = self._ranks.gather(is_giving)
        if not any(self._giving):
            raise ConfigError(
                "guard.ok: the loss is None on all ranks; the ranks of the stage that computes it "
                "give theirs, the others None"
            )

    def _share_of_mean(
        self, value: torch.Tensor, loss: torch.Tensor | float | None
    ) -> torch.Tensor:
        """What to sum over ranks so that the sum over their number is the mean over losses.

        Raises:
            ConfigError: it has a loss where it had none in the first steps, or the contrary.
        """
        giving, rank = self._giving, self._ranks.rank
        if giving[rank] is not (loss is not None):
            raise ConfigError(
                f"guard.ok: rank {rank} gave {'a' if giving[rank] else 'no'} loss in the first "
                "steps of this start, and now the contrary; give it at each step, or never"
            )
        return value if all(giving) else value * (len(giving) / sum(giving))

    def _scalar(self, loss: torch.Tensor | float | None) -> torch.Tensor:
        """
        Raises:
            ConfigError: it is no number, or None where none is due.
        """
        if loss is None and self._state.stages.count > 1:
            return torch.zeros((), dtype=torch.float64, device=self._state.compute_device)
        return _scalar(loss, self._state.compute_device)

    def _loss_of_step(
        self, loss: torch.Tensor | float | None, batches: tuple[int, int]
    ) -> torch.Tensor:
        """The mean over the losses of this rank's micro-batches."""
        value = self._scalar(loss)
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
            if parameter.grad is not None:
                grad = _reduced(parameter)
                is_sharded = is_sharded or isinstance(grad, DTensor) or grad.is_sparse
                by_copies[copies].append(_values(parameter))
        self._norm = None
        is_whole = not is_sharded and self._state.stages.count == 1
        shares = []
        for copies, grads in by_copies.items():
            norm = get_total_norm(grads)
            if is_whole:
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

    def clip(self, grad_norm: torch.Tensor) -> None:
        """Clip the gradients that were measured last, as torch does."""
        if self._clip is None:
            return
        trained = [parameter for parameter, _ in self._parameters()]
        if self._norm is not None:
            clip_grads_with_norm_(trained, self._clip, self._norm)
            return
        meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in trained}
        is_one = len(meshes) == 1 and self._state.stages.count == 1
        if is_one and not any(p.grad is not None and p.grad.is_sparse for p in trained):
            # Sharded: torch adds the shards' norms in its own way, so in a collective of its own.
            # It takes the gradients of one mesh only.
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
        """The ranks whose last loss was not finite; else, where these are not all, those whose part
        of the gradients was not; else those with the highest losses, and with them all that have
        the same, because they compute a sample together. Collective."""
        is_finite, loss = math.isfinite(self._own), self._own
        has_fine_part = bool(self._part.isfinite())
        by_rank = self._ranks.gather(
            [is_finite, loss if is_finite else 0.0, self._worst_of(plan), has_fine_part]
        )
        ranks = [rank for rank, (is_fine, *_) in enumerate(by_rank) if not is_fine]
        holding = [rank for rank, (*_, is_fine) in enumerate(by_rank) if not is_fine]
        if not ranks and len(holding) < len(by_rank):
            ranks = holding
        if not ranks:
            giving = [rank for rank, gives in enumerate(self._giving) if gives]
            highest = sorted({by_rank[rank][1] for rank in giving})[-_NUM_LOUDEST:]
            ranks = [rank for rank in giving if by_rank[rank][1] in highest]
        return [
            Suspect(
                rank=rank,
                position=int(by_rank[rank][2]),
                name=f"batch {by_rank[rank][2]}",
                is_finite=bool(by_rank[rank][0]),
            )
            for rank in ranks
        ]

    def _worst_of(self, plan: BatchPlan) -> int:
        """This rank's batch of the step that is not finite, or has the highest loss."""
        losses = {number: float(loss) for number, loss in self._judged.items()} or {plan.start: 0.0}
        bad = [number for number, loss in losses.items() if not math.isfinite(loss)]
        return bad[0] if bad else max(losses, key=lambda number: losses[number])


def _reduced(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, laid out as the parameter.

    Partial sums (of sequence parallelism) are reduced here, once: an update would do it in each of
    its operations.

    Raises:
        ConfigError: one of them is sharded and the other is not.
    """
    grad = parameter.grad
    assert grad is not None
    if not isinstance(grad, DTensor) and not isinstance(parameter, DTensor):
        return grad
    if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
        raise ConfigError(
            f"guard.ok: a parameter of shape {list(parameter.shape)} is a "
            f"{type(parameter).__name__}, its gradient a {type(grad).__name__}; both are DTensors "
            "or none"
        )
    if grad.placements != parameter.placements:
        parameter.grad = grad = grad.redistribute(placements=parameter.placements)
    return grad


def _values(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter's gradient; of a sparse one the rows that it has."""
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        if not grad.is_coalesced():
            parameter.grad = grad = grad.coalesce()
        return grad._values()
    return local(grad)


def _scalar(loss: Any, device: torch.device) -> torch.Tensor:
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


class LoopOrder:
    """Watches the weights between a step's first batch and ``guard.ok``.

    An update made before the call could not be refused. In the first steps of a start values are
    compared, later torch's version counters of in-place changes.

    Args:
        state: whose parameters are watched.
    """

    def __init__(self, state: LoopState, ranks: Ranks) -> None:
        self._state, self._parameters = state, state.parameters
        self._ranks = ranks
        self._num_begun = 0
        self._versions: list[int] = []
        self._values: list[float | None] = []  # in the first steps

    @property
    def is_compared(self) -> bool:
        """Whether this is one of the first steps."""
        return 0 < self._num_begun <= _COMPARED

    def begin(self) -> None:
        """Remember the weights as a step's first batch finds them."""
        self._num_begun += 1
        self._versions = self._current_versions()
        self._values = self._current_values() if self.is_compared else []

    def require_unchanged(self) -> None:
        """
        Raises:
            ConfigError: a weight has changed since :meth:`begin`.
        """
        before, now = self._versions, self._current_versions()
        if before == now and self._values:
            before, now = self._values, self._current_values()  # type: ignore[assignment]
        pairs = zip(self._parameters, before, now, strict=True)
        changed = [name for name, old, new in pairs if old != new]
        if changed:
            others = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise ConfigError(
                f"guard.ok: {changed[0]!r}{others} changed between the batch and the "
                "question, so that a bad step could not be refused. Call guard.ok after backward "
                "and before whatever changes weights: an optimizer's step (also one in a hook of "
                "backward, or of an optimizer that perturbs weights first), an average of weights "
                "in forward (update it under `if guard.ok(loss)`)"
            )

    def require_alike(self) -> None:
        """What several ranks hold is the same on each of them, so far as norms say. Collective.

        Raises:
            ConfigError: weights or their gradients differ, so that the ranks train other models.
        """
        trained = {id(parameter) for parameter in self._state.trained()}
        norms: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [0.0] * 3)
        for value, parameter in zip(self._values, self._parameters.values(), strict=True):
            of = norms[self._state.holders_of(parameter)]
            of[0] += math.nan if value is None else value
            if parameter.grad is not None and id(parameter) in trained:
                grad = float(norm_of(_values(parameter))) ** 2
                of[_LAID_OUT if isinstance(parameter, DTensor) else _PLAIN] += grad
        # Told by what they hold, not by all their numbers: these are as many as ranks.
        own = {str(hash(ranks)): of for ranks, of in norms.items()}
        by_rank = self._ranks.gather(own)
        for number, (what, tolerance) in enumerate(_COMPARED_NORMS):
            numbers = [{key: norms[number] for key, norms in of.items()} for of in by_rank]
            if differ := differing_norms(numbers, tolerance):
                raise ConfigError(
                    f"guard.ok: the ranks' {what} differ (their norms: {differ}): wrap the model "
                    "in DistributedDataParallel or fully_shard, and let gradients be reduced "
                    f"before guard.ok is called. {EXPERTS}"
                )

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters.values()]

    @torch.no_grad()
    def _current_values(self) -> list[float | None]:
        """A number for each parameter that changes with its values."""
        sums = [norm_of(local(parameter)) for parameter in self._parameters.values()]
        return [finite(float(value)) for value in sums]
