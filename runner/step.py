"""One attempted step: compute, agree, gate, apply or not. It judges nothing.

fetch -> forward/backward -> one packed all-reduce -> gate on the device -> gated update
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from runner.data.cursor import BatchPlan
from runner.data.dataset import Dataset
from runner.data.feed import Feed, Fetched
from runner.dist.agree import Ranks
from runner.dist.heartbeat import Heartbeat
from runner.dist.meet import difference
from runner.engine.protocol import Engine, LocalSums, Work
from runner.error import RankError
from runner.fault.inject import FaultInjector
from runner.policy.ledger import Ledger
from runner.policy.signals import NUM_LANES, Limits, StepSignals, all_equal, lanes

# Places in the packed FP64 vector that is summed over ranks once a step.
_LOSS, _GRAD_SQUARE, _NONFINITE, _TOKENS, _STOP, _UNREADABLE, _DONE, _FAILED = range(8)
_SENT, _UNSENT = 8, 9
_LANES = 10
_SQUARES = _LANES + NUM_LANES
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
    num_sent: float
    num_unsent: float
    seconds: float
    wait_seconds: float


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
        self._host_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def attempt(
        self,
        plan: BatchPlan,
        *,
        step: int,
        ledger: Ledger,
        limits: Limits,
        learning_rate: float,
        stop: bool,
        work_done: tuple[float, float, float, float],
        decisions: str,
    ) -> Outcome:
        """Compute one global batch and update the weights unless the gate closes.

        Args:
            decisions: what was decided so far, in words that must be equal on all ranks.

        Raises:
            RankError: a rank could not read a sample, or stands elsewhere than the others.
        """
        began = time.monotonic()
        self._heart.begin_step(step)
        self._faults.before_step(step)
        fetched = self._feed.fetch(plan, ledger)
        if self._faults.flips_bit():
            _flip_bit(self._engine.replicated()[1])
        self._host_seconds.append(time.monotonic() - began)
        self._heart.enter("compute")
        sums = self._engine.accumulate(self._works(plan, fetched))
        identity = self._identity(plan, step, decisions, fetched)
        told = [
            float(sum(batch.num_counted for batch in fetched.micro_batches)),
            float(stop),
            float(fetched.failure is not None),
            *work_done,
            *_lane_numbers(identity),
        ]
        numbers, withheld = self._agree_and_apply(sums, told, limits, learning_rate)
        self._step_seconds.append(time.monotonic() - began)
        self._raise_alike(numbers, fetched, identity)
        return Outcome(
            signals=_signals(numbers, plan, step, withheld),
            stop_requested=numbers[_STOP] > 0,
            num_done=numbers[_DONE],
            num_failed=numbers[_FAILED],
            num_sent=numbers[_SENT],
            num_unsent=numbers[_UNSENT],
            seconds=time.monotonic() - began,
            wait_seconds=fetched.wait_seconds,
        )

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

    def _identity(
        self, plan: BatchPlan, step: int, decisions: str, fetched: Fetched
    ) -> dict[str, Any]:
        wrong = self._faults.claims_other_identity()
        return {
            "step": step + int(wrong),
            "samples": [plan.start, plan.stop],
            "config": self._config_digest,
            "code": self._code,
            "decisions": decisions,
            "shapes": [list(batch.tokens.shape) for batch in fetched.micro_batches],
        }

    def _agree_and_apply(
        self, sums: LocalSums, told: list[float], limits: Limits, learning_rate: float
    ) -> tuple[list[float], str | None]:
        """The agreed vector, then loss, grad norm and the gate as the device had them.

        And why the engine itself did not apply what the gate let through, if it did not.
        """
        self._heart.enter("agree")
        self._faults.at("agree", self._heart.step)
        device = self._engine.device
        computed = torch.stack([sums.loss, sums.grad_square, sums.nonfinite])
        packed = torch.cat([computed, torch.tensor(told, dtype=torch.float64).to(device)])
        self._all_reduce(packed)
        tokens = packed[_TOKENS]
        loss = packed[_LOSS] / tokens
        norm = packed[_GRAD_SQUARE].sqrt() / tokens
        closed = self._gate(packed, loss, norm, limits)
        scale = tokens
        if self._clip > 0:
            scale = tokens * ((norm + _CLIP_EPS) / self._clip).clamp(min=1.0)
        self._heart.enter("apply")
        self._faults.at("apply", self._heart.step)
        withheld = self._engine.apply(
            skip=closed.float(), grad_scale=scale.float(), learning_rate=learning_rate
        )
        # One copy to the host; loss and norm too, so that the judge sees the gate's own bits.
        told_back = torch.cat([packed, torch.stack([loss, norm, closed.double()])])
        return [float(value) for value in told_back.tolist()], withheld

    def _all_reduce(self, packed: torch.Tensor) -> None:
        wrong = self._faults.wrong_collective()
        if wrong == "other_shape":
            packed = torch.cat([packed, packed[:1]])
        if wrong == "other_collective":
            dist.broadcast(packed, src=dist.get_rank())
        elif wrong != "skip_collective":
            dist.all_reduce(packed)

    def _gate(
        self, packed: torch.Tensor, loss: torch.Tensor, norm: torch.Tensor, limits: Limits
    ) -> torch.Tensor:
        """1 where the update must not be applied; computed on the device, nothing waits."""
        broken = packed[_UNREADABLE] > 0
        if not self._guarded:
            return broken
        bounded = (loss <= limits.loss) & (norm <= limits.grad_norm)
        finite = torch.isfinite(loss) & torch.isfinite(norm) & (packed[_NONFINITE] == 0)
        return ~(bounded & finite) | broken

    def _raise_alike(
        self, numbers: Sequence[float], fetched: Fetched, identity: dict[str, Any]
    ) -> None:
        if numbers[_UNREADABLE] > 0:
            said = self._ranks.gather(fetched.failure)
            words = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
            raise RankError(f"a sample could not be read: {words}")
        equal = all_equal(
            numbers[_LANES:_SQUARES],
            numbers[_SQUARES : _SQUARES + NUM_LANES],
            self._ranks.world_size,
        )
        if not equal:
            raise RankError(f"ranks drifted apart: {difference(self._ranks.gather(identity))}")

    def suspects(self, plan: BatchPlan) -> list[Suspect]:
        """Who was at fault: sequences that were not finite, or else the loudest. Collective."""
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
        told = self._engine.suspects()
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


def _flip_bit(copies: list[torch.Tensor]) -> None:
    if copies:
        words = copies[0].view(-1).view(torch.int16)
        words[0] ^= 1


def _lane_numbers(identity: dict[str, Any]) -> list[float]:
    numbers = lanes(repr(identity))
    return [float(n) for n in numbers] + [float(n * n) for n in numbers]


def _signals(
    numbers: Sequence[float], plan: BatchPlan, step: int, withheld: str | None
) -> StepSignals:
    loss, norm, closed = numbers[-3:]
    return StepSignals(
        step=step,
        start=plan.start,
        stop=plan.stop,
        loss=loss,
        grad_norm=norm,
        tokens=int(numbers[_TOKENS]),
        nonfinite_ranks=int(numbers[_NONFINITE]),
        gated=closed > 0 or withheld is not None,
        withheld=withheld,
    )
