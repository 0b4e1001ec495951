"""One attempted step: compute, agree, gate, apply or not. It judges nothing.

fetch -> forward/backward -> one packed all-reduce -> gate on the device -> gated update

A step is launched, and read: on CUDA the numbers travel to the host meanwhile, and the next
step may be launched before they are looked at. Its gate stays closed when the step before was
not applied, or was asked to be the last: whatever the host decides about that one then, the
state is as if the later one had never been begun, and it is launched again if it is wanted.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runner.checkpoint.work import Told
from runner.data.cursor import BatchPlan
from runner.data.dataset import Dataset
from runner.data.feed import Feed, Fetched
from runner.dist.agree import Ranks
from runner.dist.heartbeat import Heartbeat
from runner.dist.meet import difference
from runner.engine.protocol import Engine, LocalSums, Sequences, Work
from runner.error import RankError
from runner.fault.inject import FaultInjector
from runner.policy.ledger import Ledger
from runner.policy.signals import NUM_LANES, Bounds, Limits, StepSignals, all_equal, lanes

# Places in the packed FP64 vector that is summed over ranks once a step.
_LOSS, _GRAD_SQUARE, _NONFINITE, _TOKENS, _STOP, _UNREADABLE, _DONE, _FAILED = range(8)
_LANES = 8
_SQUARES = _LANES + NUM_LANES
# Appended to it on the device.
_LOSS_PER_TOKEN, _GRAD_NORM, _CLOSED = range(-3, 0)
_LARGEST = sys.float_info.max
_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
_MAX_SUSPECTS = 8  # told by one rank
_NUM_LOUDEST = 3
_REMEMBERED = 256  # steps whose seconds are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step told, on all ranks alike but for the seconds."""

    signals: StepSignals
    stop_requested: bool
    num_done: float
    num_failed: float
    seconds: float
    wait_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a step is to do, equal on all ranks but for ``stop`` and ``told``.

    ``step`` is the number of the update it makes; ``told`` what the ring has to tell;
    ``decisions`` tells in words what was decided so far, as far as the host knows.
    """

    plan: BatchPlan
    step: int
    bounds: Bounds
    learning_rate: float
    stop: bool
    told: Told
    decisions: str


class Pending:
    """A launched step whose numbers the host has not looked at.

    ``numbers`` FP64 on the device: the agreed vector, then loss, grad norm and the gate.
    ``withheld``: why the engine itself did not apply what the gate let through, if it did not.
    """

    def __init__(
        self,
        *,
        order: Order,
        fetched: Fetched,
        identity: dict[str, Any],
        sequences: Sequences,
        numbers: torch.Tensor,
        withheld: str | None,
        seconds: float,
    ) -> None:
        self.order = order
        self.fetched = fetched
        self.identity = identity
        self.sequences = sequences
        self.numbers = numbers
        self.withheld = withheld
        self.seconds = seconds  # that the host spent on launching it
        self._arrived: torch.cuda.Event | None = None
        self._on_host = numbers
        if numbers.is_cuda:
            self._on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._on_host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def on_host(self) -> list[float]:
        """The numbers. Waits for the device, and for no more than this step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [float(value) for value in self._on_host.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A sequence that stands out, and why."""

    rank: int
    position: int
    name: str
    is_finite: bool


class Stepper:
    """Runs attempted steps on one rank.

    Args:
        clip: bound of the global gradient norm; 0 switches clipping off.
        config_digest, code: digests of the settings and of this package; equal on all ranks.
        guarded: False lets every step be applied, whatever its numbers.
        before_update: called before the weights may change.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        feed: Feed,
        dataset: Dataset,
        ranks: Ranks,
        faults: FaultInjector,
        seed: int,
        clip: float,
        guarded: bool,
        config_digest: str,
        code: str,
        heart: Heartbeat,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._feed = feed
        self._dataset = dataset
        self._ranks = ranks
        self._faults = faults
        self._seed = seed
        self._clip = clip
        self._guarded = guarded
        self._config_digest = config_digest
        self._code = code
        self._heart = heart
        self._before_update = before_update
        self._host_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._newest: Pending | None = None

    def has_drill(self, step: int) -> bool:
        """Whether a fault on purpose is bound to this step: it happens once, so not in vain."""
        return self._faults.is_due(step)

    def launch(self, order: Order, ledger: Ledger, *, after: Pending | None = None) -> Pending:
        """Compute one global batch and update the weights unless the gate closes.

        Args:
            after: the step before, where its numbers were not read: the gate stays closed when
                that one was not applied, or told that a rank is asked to stop.
        """
        began = time.monotonic()
        self._heart.begin_step(order.step)
        self._faults.before_step(order.step)
        fetched = self._feed.fetch(order.plan, ledger)
        if self._faults.flips_bit():
            _flip_bit(self._engine.replicated()[1])
        self._host_seconds.append(time.monotonic() - began)
        self._heart.enter("compute")
        sums = self._engine.accumulate(self._works(order.plan, fetched))
        identity = self._identity(order, fetched)
        told = [
            float(sum(batch.num_counted for batch in fetched.micro_batches)),
            float(order.stop),
            float(fetched.failure is not None),
            order.told.done,
            order.told.failed,
            *_lane_numbers(identity),
        ]
        numbers, withheld = self._agree_and_apply(sums, told, order, after)
        return Pending(
            order=order,
            fetched=fetched,
            identity=identity,
            sequences=sums.sequences,
            numbers=numbers,
            withheld=withheld,
            seconds=time.monotonic() - began,
        )

    def read(self, pending: Pending) -> Outcome:
        """What a launched step told. Read in the order of launching.

        Raises:
            RankError: a rank could not read a sample, or stands elsewhere than the others.
        """
        began = time.monotonic()
        self._heart.enter("read", step=pending.order.step)
        numbers = pending.on_host()
        seconds = pending.seconds + time.monotonic() - began
        self._step_seconds.append(seconds)
        self._newest = pending
        self._raise_alike(numbers, pending)
        return Outcome(
            signals=_signals(numbers, pending),
            stop_requested=numbers[_STOP] > 0,
            num_done=numbers[_DONE],
            num_failed=numbers[_FAILED],
            seconds=seconds,
            wait_seconds=pending.fetched.wait_seconds,
        )

    def drop(self, pending: Pending) -> float:
        """Leave alone what a step told that was launched in vain; the seconds it has cost."""
        began = time.monotonic()
        pending.on_host()
        return pending.seconds + time.monotonic() - began

    def take_seconds(self) -> tuple[list[float], list[float]]:
        """Of the steps since the last call: before the first collective, and in all."""
        taken = list(self._host_seconds), list(self._step_seconds)
        self._host_seconds.clear()
        self._step_seconds.clear()
        return taken

    def _works(self, plan: BatchPlan, fetched: Fetched) -> list[Work]:
        works = []
        for batch in fetched.micro_batches:
            first = next((p for p in batch.positions if p is not None), plan.start)
            works.append(
                Work(
                    batch=batch.to(self._engine.device),
                    # From (seed, cursor) alone, so that a replay drops the same units.
                    seed=(self._seed * 1_000_003 + first) & ((1 << 63) - 1),
                    disturbance=self._faults.disturbance(batch.positions),
                )
            )
        return works

    def _identity(self, order: Order, fetched: Fetched) -> dict[str, Any]:
        wrong = self._faults.claims_other_identity()
        return {
            "step": order.step + int(wrong),
            "samples": [order.plan.start, order.plan.stop],
            "config": self._config_digest,
            "code": self._code,
            "decisions": order.decisions,
            "shapes": [list(batch.tokens.shape) for batch in fetched.micro_batches],
        }

    def _agree_and_apply(
        self, sums: LocalSums, told: list[float], order: Order, after: Pending | None
    ) -> tuple[torch.Tensor, str | None]:
        """See :class:`Pending`. Nothing here waits for the device."""
        self._heart.enter("agree")
        self._faults.at("agree", order.step)
        computed = torch.stack([sums.loss, sums.grad_square, sums.nonfinite])
        packed = torch.cat([computed, self._on_device(told)])
        self._all_reduce(packed)
        tokens = packed[_TOKENS]
        loss = packed[_LOSS] / tokens
        norm = packed[_GRAD_SQUARE].sqrt() / tokens
        closed = self._gate(packed, loss, norm, order.bounds, after)
        scale = tokens
        if self._clip > 0:
            scale = tokens * ((norm + _CLIP_EPS) / self._clip).clamp(min=1.0)
        self._heart.enter("apply")
        self._faults.at("apply", order.step)
        self._before_update()
        withheld = self._engine.apply(
            skip=closed.float(), grad_scale=scale.float(), learning_rate=order.learning_rate
        )
        # Loss and norm too, so that the judge sees the gate's own bits.
        return torch.cat([packed, torch.stack([loss, norm, closed.double()])]), withheld

    def _on_device(self, told: list[float]) -> torch.Tensor:
        device = self._engine.device
        if device.type != "cuda":
            return torch.tensor(told, dtype=torch.float64, device=device)
        # Only from page-locked memory does a copy not wait.
        pinned = torch.tensor(told, dtype=torch.float64, pin_memory=True)
        return pinned.to(device, non_blocking=True)

    def _all_reduce(self, packed: torch.Tensor) -> None:
        wrong = self._faults.wrong_collective()
        if wrong == "other_shape":
            packed = torch.cat([packed, packed[:1]])
        if wrong == "other_collective":
            dist.broadcast(packed, src=dist.get_rank())
        elif wrong != "skip_collective":
            dist.all_reduce(packed)

    def _gate(
        self,
        packed: torch.Tensor,
        loss: torch.Tensor,
        norm: torch.Tensor,
        bounds: Bounds,
        after: Pending | None,
    ) -> torch.Tensor:
        """1 where the update must not be applied; computed on the device, nothing waits.

        The limits are arguments of the comparisons' kernels: nothing is copied for them.
        """
        closed = packed[_UNREADABLE] > 0
        if after is not None:
            closed = closed | (after.numbers[_CLOSED] > 0) | (after.numbers[_STOP] > 0)
        if not self._guarded:
            return closed
        bounded = is_within(bounds.usual, loss, norm)
        if after is not None:
            was_low = after.numbers[_LOSS_PER_TOKEN] <= bounds.high
            bounded = torch.where(was_low, bounded, is_within(bounds.again, loss, norm))
        return ~(bounded & (packed[_NONFINITE] == 0)) | closed

    def _raise_alike(self, numbers: Sequence[float], pending: Pending) -> None:
        if numbers[_UNREADABLE] > 0:
            said = self._ranks.gather(pending.fetched.failure)
            words = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
            raise RankError(f"a sample could not be read: {words}")
        equal = all_equal(
            numbers[_LANES:_SQUARES],
            numbers[_SQUARES : _SQUARES + NUM_LANES],
            self._ranks.world_size,
        )
        if not equal:
            told = self._ranks.gather(pending.identity)
            raise RankError(f"ranks drifted apart: {difference(told)}")

    def suspects(self, plan: BatchPlan) -> list[Suspect]:
        """Who was at fault in the step read last. Collective.

        Sequences that were not finite, or else the loudest.
        """
        own = self._own_suspects(plan)
        told = [[rank, *row] for rank, rows in enumerate(self._ranks.gather(own)) for row in rows]
        bad = [row for row in told if not row[2]]
        chosen = bad or sorted(told, key=lambda row: -row[3])[:_NUM_LOUDEST]
        where = {int(p): int(i) for p, i in zip(plan.positions, plan.indices, strict=True)}
        return [
            Suspect(
                rank=rank,
                position=position,
                name=self._dataset.describe(where[position]),
                is_finite=finite,
            )
            for rank, position, finite, _ in chosen
        ]

    def _own_suspects(self, plan: BatchPlan) -> list[list[Any]]:
        """[position, is finite, loudness] of this rank's sequences that matter."""
        assert self._newest is not None, "no step was read"
        told = self._newest.sequences.told()
        norms = told.gradient_norms or [0.0] * len(told.losses)
        rows = []
        for position, loss, norm in zip(
            self._feed.own_positions(plan), told.losses, norms, strict=True
        ):
            if position is not None:
                finite = bool(torch.isfinite(torch.tensor([loss, norm])).all())
                rows.append([position, finite, loss if finite else 0.0])
        rows.sort(key=lambda row: (row[1], -row[2]))
        return rows[:_MAX_SUSPECTS]


def is_within(limits: Limits, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Finite, and at or below both: NaN and Inf are not below the largest number."""
    low_enough = (loss <= min(limits.loss, _LARGEST)) & (norm <= min(limits.grad_norm, _LARGEST))
    return low_enough & (loss >= -_LARGEST)  # a norm is not negative


def _flip_bit(copies: list[torch.Tensor]) -> None:
    if copies:
        words = copies[0].view(-1).view(torch.int16)
        words[0] ^= 1


def _lane_numbers(identity: dict[str, Any]) -> list[float]:
    numbers = lanes(repr(identity))
    return [float(n) for n in numbers] + [float(n * n) for n in numbers]


def _signals(numbers: Sequence[float], pending: Pending) -> StepSignals:
    plan = pending.order.plan
    return StepSignals(
        step=pending.order.step,
        start=plan.start,
        stop=plan.stop,
        loss=numbers[_LOSS_PER_TOKEN],
        grad_norm=numbers[_GRAD_NORM],
        tokens=int(numbers[_TOKENS]),
        nonfinite_ranks=int(numbers[_NONFINITE]),
        gated=numbers[_CLOSED] > 0 or pending.withheld is not None,
        withheld=pending.withheld,
    )
