"""Runs one step: compute, agree, gate, apply or not. The judge comes later.

fetch -> forward/backward -> one packed all-reduce -> gate on the device -> gated update

A step is first launched, then read. On CUDA its numbers are copied to the host meanwhile, and the
next step may be launched before they are read. That step's gate stays closed if the previous step
was not applied or is the last one. So whatever the host decides about the earlier step, the state
is as if the later one had never begun; it is launched again if needed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from runner.checkpoint.jobs import JobProgress
from runner.data.cursor import BatchPlan
from runner.data.dataset import Dataset, describe
from runner.data.feed import Feed, RankBatch
from runner.data.mixture import MixtureOrder
from runner.distributed.agreement import Ranks
from runner.engine.protocol import Engine, LocalSums, MicroStep, Sequences
from runner.health.heartbeat import Heartbeat
from runner.policy.decision.signals import Bounds, StepSignals
from runner.policy.decision.skip_ledger import Ledger, Unreadable
from runner.system.error import RankError
from runner.train.agreed_step import (
    GATES,
    GRAD_SQUARE,
    LOSS,
    TOKENS,
    UNREADABLE,
    AgreedStep,
    HostNumbers,
    Measured,
    MetricNames,
    PackedMetrics,
    RankReport,
    StepInfo,
    Suspect,
    is_closed,
    on_device,
)

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
_MAX_SUSPECTS = 8  # of one rank
_NUM_LOUDEST = 3
_REMEMBERED = 256  # steps whose durations are kept


class WatchesLayers(Protocol):
    """The part of :class:`runner.explain.layers.LayerWatch` that is used here."""

    num_largest: int

    @property
    def length(self) -> int: ...
    def begin(self, step: int) -> bool: ...
    def before(self, counts: Sequence[torch.Tensor]) -> None: ...
    def after(self) -> torch.Tensor: ...


LookedAt = Callable[[Sequence[MicroStep]], Sequence[MicroStep]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of a step, equal on all ranks except ``stop``, ``keeps_lines``, ``observer_failed``,
    ``is_slow``, ``is_advised`` and ``progress``.

    ``step`` is the number of its update; ``progress`` the progress of the ring's jobs;
    ``decisions`` a text of the decisions that the host knows so far; ``is_wide`` computes the step
    in a wider precision than the run's.
    """

    batch: BatchPlan
    step: int
    bounds: Bounds
    learning_rate: float
    stop: bool
    keeps_lines: bool
    progress: JobProgress
    decisions: str
    is_wide: bool = False
    observer_failed: bool = False
    is_slow: bool = False
    is_advised: bool = False


@dataclass(kw_only=True)
class InFlightStep(AgreedStep):
    """A launched step; ``seconds``: of the host, for the launch; ``layers``: this rank's sums."""

    plan: StepPlan
    fetched: RankBatch
    sums: LocalSums
    seeds: tuple[int, ...]
    seconds: float
    layers: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Settings common to every step of a run.

    Args:
        seed: the run's seed.
        clip: bound on the global gradient norm; 0 switches clipping off.
        guarded: False applies every step, whatever its numbers.
        config_digest, code: digests of the settings and of this package; equal on all ranks.
        mixture: the order of the data's sources, whose losses are reported separately.
    """

    seed: int
    clip: float
    guarded: bool
    config_digest: str
    code: str
    mixture: MixtureOrder | None = None


class Stepper:
    """Runs attempted steps on one rank.

    Attributes:
        layers: measures the layers, from the next step on.

    Args:
        before_update: called before the weights may change.
        distrust: called collectively with a step: checkpoints of later steps must not be used
            again.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        feed: Feed,
        dataset: Dataset,
        ranks: Ranks,
        rules: StepRules,
        heart: Heartbeat,
        before_update: Callable[[], None] = lambda: None,
        distrust: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.layers: WatchesLayers | None = None
        self._late_layers: Callable[[], Measured] | None = None
        self._engine = engine
        self._feed = feed
        self._dataset = dataset
        self._ranks = ranks
        self._rules = rules
        self._metrics = MetricNames(ranks, "losses(batch)", are_evaluated=True)
        self._heart = heart
        self._before_update = before_update
        self._distrust = distrust
        self._host_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._newest: InFlightStep | None = None
        self._gate_before: torch.Tensor | None = None
        self._looked_at: LookedAt = list

    @property
    def newest_plan(self) -> BatchPlan | None:
        """The samples of the last step read; None before any."""
        return None if self._newest is None else self._newest.plan.batch

    @property
    def newest(self) -> InFlightStep:
        """The last step read."""
        assert self._newest is not None, "no step was read"
        return self._newest

    @contextmanager
    def aside(self, looked_at: LookedAt = list) -> Iterator[None]:
        """Launch and read steps inside that do not belong to the run.

        Args:
            looked_at: has the engine look at the stop request before each micro-batch.
        """
        saved, late = (self._newest, self._gate_before, self.layers), self._late_layers
        self.layers = self._late_layers = None
        self._looked_at = looked_at
        try:
            yield
        finally:
            (self._newest, self._gate_before, self.layers), self._late_layers = saved, late
            self._looked_at = list

    def may_be_speculative(self, step: int) -> bool:
        """Whether a step may be launched speculatively, to be discarded if the previous one
        fails."""
        return self._ranks.may_repeat(step)

    def launch(
        self,
        plan: StepPlan,
        ledger: Ledger,
        *,
        after: InFlightStep | None = None,
        looked_at: LookedAt | None = None,
    ) -> InFlightStep:
        """Compute one global batch and update the weights unless the gate closes.

        Args:
            after: the previous step, if its numbers were not read. The gate stays closed if that
                step was not applied, or carries a stop request.
            looked_at: has the engine look at the stop request before each micro-batch.
        """
        began = time.monotonic()
        self._heart.begin_step(plan.step)
        fetched = self._feed.fetch(plan.batch, ledger)
        self._host_seconds.append(time.monotonic() - began)
        self._heart.enter("compute")
        works = self._works(plan.batch, fetched)
        watched = None if plan.is_wide else self.layers
        watch = watched if watched and watched.begin(plan.step) else None
        sums = self._accumulate((looked_at or self._looked_at)(works), is_wide=plan.is_wide)
        if watch:
            watch.before(sums.sequences.counts)
        report = RankReport(
            identity={
                "step": plan.step,
                "samples": [plan.batch.start, plan.batch.stop],
                "config": self._rules.config_digest,
                "code": self._rules.code,
                "decisions": plan.decisions,
                "shapes": [batch.shape for batch in fetched.micro_batches],
            },
            progress=plan.progress,
            stop=plan.stop,
            is_unreadable=fetched.failure is not None or bool(fetched.unreadable),
            keeps_lines=plan.keeps_lines,
            observer_failed=plan.observer_failed,
            is_slow=plan.is_slow,
            is_advised=plan.is_advised,
        )
        metrics = self._metrics.pack(sums.metrics, self._engine.device)
        numbers, withheld = self._agree_and_apply(sums, report, metrics, plan, after)
        layers = watch.after() if watch else None
        return InFlightStep(
            step=plan.step,
            batch=plan.batch,
            report=report,
            numbers=numbers,
            withheld=withheld,
            metrics=metrics,
            plan=plan,
            fetched=fetched,
            sums=sums,
            seeds=tuple(work.seed for work in works),
            seconds=time.monotonic() - began,
            layers=layers,
        )

    def read(self, step: InFlightStep) -> StepInfo:
        """Read the numbers of a launched step, in the order of launching.

        Raises:
            RankError: a rank's loader failed, or a rank is at another step than the others.
        """
        began = time.monotonic()
        self._heart.enter("read", step=step.step)
        numbers = step.on_host()
        seconds = step.seconds + time.monotonic() - began
        self._step_seconds.append(seconds)
        self._newest = step
        info, sources = step.read(self._ranks)
        num_sources = len(sources) // 2
        self._require_one_gate(numbers[GATES], step.step)
        unreadable, shares = self._gather_unreadable(numbers, step)
        return replace(
            info,
            learning_rate=step.plan.learning_rate,
            source_sums=tuple(zip(sources[:num_sources], sources[num_sources:], strict=True)),
            seconds=seconds,
            wait_seconds=step.fetched.wait_seconds,
            unreadable=unreadable,
            shares=shares,
            measured=self._measured(step, info.signals),
            share=step.fetched.micro_batches,
        )

    def _measured(self, step: InFlightStep, signals: StepSignals) -> Measured | None:
        """The layer measurements that are available. Collective at a step that measured.

        The sums are reduced once the ranks are known to be at the same step; on CUDA they are on
        the host when the next step is read.
        """
        late, self._late_layers = self._late_layers, None
        if step.layers is not None and not signals.gated and self.layers is not None:
            num_sums = len(step.layers) - self.layers.num_largest
            self._ranks.all_reduce(step.layers[:num_sums])
            self._ranks.maximise(step.layers[num_sums:])
            numbers, length = HostNumbers(step.layers), self.layers.length

            def measured() -> Measured:
                """Waits for the device unless a later step was read."""
                return Measured(
                    step=signals.step,
                    numbers=tuple(numbers.read()),
                    length=length,
                    tokens=signals.tokens,
                    grad_norm=signals.grad_norm,
                )

            if not step.layers.is_cuda:
                return measured()
            self._late_layers = measured
        return late() if late is not None else None

    def _require_one_gate(self, gates: float, step: int) -> None:
        """
        Args:
            gates: number of ranks on which the previous step's gate was closed.

        Raises:
            RankError: it was closed on some ranks only. All decide from the same sums, so the sums
                must have differed in bits.
        """
        if gates not in (0.0, float(self._ranks.world_size)):
            self._distrust(max(0, step - 2))
            raise RankError(
                f"{gates:g} of {self._ranks.world_size} ranks withheld the update before step "
                f"{step} and the others applied it, from sums that must be equal bit for bit: a "
                "device or the network computes wrongly; the weights differ from here on"
            )

    def discard_speculative(self, step: InFlightStep) -> float:
        """Discard a speculative step. Returns the seconds it took."""
        began = time.monotonic()
        step.on_host()
        return step.seconds + time.monotonic() - began

    def take_seconds(self) -> tuple[list[float], list[float]]:
        """Seconds of the steps since the last call: before the first collective, and in total."""
        seconds = list(self._host_seconds), list(self._step_seconds)
        self._host_seconds.clear()
        self._step_seconds.clear()
        return seconds

    def _works(self, plan: BatchPlan, fetched: RankBatch) -> list[MicroStep]:
        works = []
        for batch in fetched.micro_batches:
            first = next((p for p in batch.positions if p is not None), plan.start)
            works.append(
                MicroStep(
                    batch=batch.to(self._engine.device),
                    # From (seed, cursor) only, so that a replay drops the same units.
                    seed=(self._rules.seed * 1_000_003 + first) & ((1 << 63) - 1),
                )
            )
        return works

    def _accumulate(self, works: Sequence[MicroStep], *, is_wide: bool) -> LocalSums:
        if not is_wide:
            return self._engine.accumulate(works)
        twin = self._engine.twin
        self._ranks.all_or_none("building the model in a wider precision", twin.open)
        return self._engine.accumulate_wider(works)

    def _agree_and_apply(
        self,
        sums: LocalSums,
        report: RankReport,
        metrics: PackedMetrics,
        plan: StepPlan,
        after: InFlightStep | None,
    ) -> tuple[torch.Tensor, str | None]:
        """Agree, gate and apply; see :class:`InFlightStep`. Does not wait for the device."""
        self._heart.enter("agree")
        # The previous step's gate, as computed by this rank's device; must be equal on all ranks.
        gate = torch.zeros_like(sums.loss) if self._gate_before is None else self._gate_before
        computed = [sums.loss, sums.grad_square, sums.nonfinite, sums.count, gate]
        packed = torch.cat(
            [
                torch.stack(computed),
                on_device([*report.numbers(self._ranks), *metrics.flags], self._engine.device),
                metrics.sums,
                *self._source_losses(plan.batch, sums.sequences),
            ]
        )
        self._ranks.all_reduce(packed)
        tokens = packed[TOKENS]
        loss = packed[LOSS] / tokens
        norm = packed[GRAD_SQUARE].sqrt() / tokens
        before = None if after is None else after.numbers
        bounds = plan.bounds if self._rules.guarded else None
        closed = is_closed(packed, loss, norm, bounds, before=before)
        scale = tokens
        if self._rules.clip > 0:
            scale = tokens * ((norm + _CLIP_EPS) / self._rules.clip).clamp(min=1.0)
        self._heart.enter("apply")
        self._before_update()
        withheld = self._engine.apply(
            skip=closed.float(), grad_scale=scale.float(), learning_rate=plan.learning_rate
        )
        self._gate_before = closed.double()
        # With loss and norm, so that the judge sees the same bits as the gate.
        return torch.cat([packed, torch.stack([loss, norm, self._gate_before])]), withheld

    def _source_losses(self, plan: BatchPlan, sequences: Sequences) -> list[torch.Tensor]:
        """This rank's sums for each source of a mixture: its loss, then its number of terms.

        FP64 ``[2 * sources]`` in a list, which is empty without sources. Does not wait.
        """
        order = self._rules.mixture
        if order is None:
            return []
        sources = order.sources(plan.indices).tolist()
        source_of = dict(zip(plan.positions.tolist(), sources, strict=True))
        positions = self._feed.own_positions(plan)
        rows = [-1.0 if at is None else float(source_of.get(at, -1)) for at in positions]
        values = torch.stack([torch.cat(sequences.losses), torch.cat(sequences.counts)]).double()
        of_row = on_device(rows, values.device)
        numbers = torch.arange(len(order.names), dtype=torch.float64, device=values.device)
        # Selected, not multiplied by a mask: a NaN row must affect its own source only.
        chosen = torch.where(of_row == numbers[:, None, None], values, 0.0)
        return [chosen.sum(dim=2).T.reshape(-1)]

    def _gather_unreadable(
        self, numbers: Sequence[float], step: InFlightStep
    ) -> tuple[tuple[Unreadable, ...], tuple[int, ...]]:
        """Gather the unreadable samples, and the number of samples of each rank."""
        if not numbers[UNREADABLE]:
            return (), ()
        fetched = step.fetched
        own = [asdict(one) for one in fetched.unreadable]
        by_rank = self._ranks.gather([fetched.failure, fetched.num_samples, own])
        failures = [f"rank {rank}: {error}" for rank, (error, _, _) in enumerate(by_rank) if error]
        if failures:
            raise RankError(f"loading samples failed: {'; '.join(failures)}")
        return (
            tuple(Unreadable(**row) for _, _, rows in by_rank for row in rows),
            tuple(int(share) for _, share, _ in by_rank),
        )

    def suspects(self, plan: BatchPlan) -> list[Suspect]:
        """Find the suspects of the last step read. Collective.

        Non-finite sequences, or else those with the largest numbers.
        """
        own = self._own_suspects(plan)
        by_loss = [
            [rank, *row] for rank, rows in enumerate(self._ranks.gather(own)) for row in rows
        ]
        nonfinite = [row for row in by_loss if not row[2]]
        chosen = nonfinite or sorted(by_loss, key=lambda row: -row[3])[:_NUM_LOUDEST]
        index_of = {int(p): int(i) for p, i in zip(plan.positions, plan.indices, strict=True)}
        return [
            Suspect(
                rank=rank,
                position=position,
                name=describe(self._dataset, index_of[position]),
                is_finite=finite,
            )
            for rank, position, finite, _ in chosen
        ]

    def _own_suspects(self, plan: BatchPlan) -> list[list[Any]]:
        """[position, is finite, magnitude] of this rank's most suspicious sequences."""
        measured = self.newest.sums.sequences.to_host()
        norms = measured.gradient_norms or [0.0] * len(measured.losses)
        rows = []
        for position, loss, norm in zip(
            self._feed.own_positions(plan), measured.losses, norms, strict=True
        ):
            if position is not None:
                finite = bool(torch.isfinite(torch.tensor([loss, norm])).all())
                rows.append([position, finite, loss if finite else 0.0])
        rows.sort(key=lambda row: (row[1], -row[2]))
        return rows[:_MAX_SUSPECTS]
