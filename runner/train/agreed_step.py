"""A step's numbers: one vector that is packed, summed over all ranks once a step, and read.

A rank packs ``LOSS`` to ``JOBS``, the progress of the ring's jobs, the user's own metrics, and what
its loop adds: loss and terms of each source of a mixture; in a user's own loop, whether reading a
batch drew random numbers. The gate and the judge read the sums, to which the device appends
``LOSS_PER_TOKEN``, ``GRAD_NORM`` and ``CLOSED``, so that both see the same bits.

A name of a user's own metrics has its place in the packed vector from the step after the first
that has it; that first step costs one more collective, in which the ranks agree on the name. Equal
on all ranks: which steps have a name, and so what is packed, raised and written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from runner.checkpoint.jobs import JobProgress
from runner.data.cursor import BatchPlan
from runner.data.feed import MicroBatch
from runner.distributed.agreement import FINGERPRINT_SIZE, Ranks
from runner.policy.columns import EVALUATED, is_held_out, is_ours
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import Bounds, Limits, StepSignals
from runner.policy.decision.skip_ledger import Unreadable
from runner.system.error import ConfigError

LOSS, GRAD_SQUARE, NONFINITE, TOKENS, GATES = range(5)
STOP, UNREADABLE, KEPT, OBSERVERS, SLOW, ADVICE = range(5, 11)
FINGERPRINT = 11
JOBS = FINGERPRINT + FINGERPRINT_SIZE  # two counts per background queue: done, failed
LOSS_PER_TOKEN, GRAD_NORM, CLOSED = range(-3, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements of all ranks at one step.

    :class:`runner.explain.layers.LayerWatch` has the order of the numbers.
    """

    step: int
    numbers: tuple[float, ...]
    length: int
    tokens: int
    grad_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """The result of one attempted step, equal on all ranks except for seconds and ``share``.

    Args:
        batch: the computed batch; None if nothing was computed.
        known: the discard that a restart repeats from the journal without computing.
        stop_requested: whether any rank received a stop request.
        keeps_lines: whether rank 0 keeps lines in memory because it cannot write a file.
        observer_failed: whether an observer has failed on some rank.
        is_advised: whether a checkpoint is wanted soon.
        is_slow: whether steps are so slow that each micro-batch looks at the request to stop.
        learning_rate: the rate of its plan.
        jobs: the ring's jobs that ``job_counts`` (sums of :attr:`JobProgress.counts`) describe.
        source_sums: for each source of a mixture, its summed loss and number of terms.
        cause: the cause of a bad step found by replays, see
            :meth:`runner.policy.decision.finding.Finding.to_json`; None without replays.
        unreadable: samples that could not be read. If any, the step was not applied, and its other
            numbers are meaningless.
        shares: number of samples assigned to each rank; given with ``unreadable``.
        measured: measurements inside the model, at this step or, on CUDA, an earlier one.
        metrics: the user's own, by name.
        share: this rank's part of the batch, on the host; it differs by rank, as seconds do.
    """

    signals: StepSignals
    batch: BatchPlan | None = None
    known: Incident | None = None
    stop_requested: bool = False
    keeps_lines: bool = False
    observer_failed: bool = False
    is_slow: bool = False
    is_advised: bool = False
    jobs: Sequence[int] = ()
    job_counts: tuple[float, ...] = ()
    learning_rate: float = 0.0
    source_sums: tuple[tuple[float, float], ...] = ()
    seconds: float = 0.0
    wait_seconds: float = 0.0
    unreadable: tuple[Unreadable, ...] = ()
    shares: tuple[int, ...] = ()
    cause: Mapping[str, Any] | None = None
    measured: Measured | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    share: Sequence[MicroBatch] = ()

    @property
    def noted_cause(self) -> Mapping[str, Any]:
        """The cause, also of a step known from the journal; empty without replays."""
        known = None if self.known is None else self.known.detail.get("cause")
        return self.cause or (known if isinstance(known, Mapping) else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A suspicious sequence, and why."""

    rank: int
    position: int
    name: str
    is_finite: bool


class HostNumbers:
    """A tensor that is copied to the host; nothing waits for it until it is read.

    Args:
        numbers: a vector on the device; on a CPU it is read as it is.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._on_host = numbers
        self._arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._on_host.copy_(numbers, non_blocking=True)
            # Blocking: waiting leaves the core to hashing threads.
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[float]:
        """The numbers. Waits until the device has finished what they depend on."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [float(value) for value in self._on_host.tolist()]


def on_device(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    """FP64 on ``device``, without waiting for it."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    # Only a copy from pinned memory does not wait.
    pinned = torch.tensor(numbers, dtype=torch.float64, pin_memory=True)
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank tells the others with a step, beside its sums.

    Args:
        identity: what must be alike on all ranks.
        progress: of the ring's jobs.
    """

    identity: Mapping[str, Any]
    progress: JobProgress
    stop: bool
    keeps_lines: bool
    is_unreadable: bool = False
    observer_failed: bool = False
    is_slow: bool = False
    is_advised: bool = False

    def numbers(self, ranks: Ranks) -> list[float]:
        """As packed from ``STOP`` on."""
        flags = [self.stop, self.is_unreadable, self.keeps_lines, self.observer_failed]
        flags += [self.is_slow, self.is_advised]
        return [*map(float, flags), *ranks.fingerprint(self.identity), *self.progress.counts]


@dataclass(kw_only=True)
class AgreedStep:
    """A step that the ranks agreed on and the gate decided on; the host has not read its numbers.

    Args:
        step: number of the update that it makes.
        report: this rank's.
        numbers: FP64 on the device: the sums, then loss, gradient norm and gate.
        metrics: the user's own, packed behind the progress of the ring's jobs.
        withheld: why the engine itself skipped an update that the gate let through.
    """

    step: int
    batch: BatchPlan
    report: RankReport
    numbers: torch.Tensor
    metrics: PackedMetrics
    withheld: str | None = None

    def __post_init__(self) -> None:
        self._on_host = HostNumbers(self.numbers)

    def on_host(self) -> list[float]:
        """The numbers on the host. Waits until the device has finished this step."""
        return self._on_host.read()

    def read(self, ranks: Ranks) -> tuple[StepInfo, list[float]]:
        """Read the numbers, in the order of launching; also the sums of what the loop has added.

        Collective where metrics of the user's have new names.

        Raises:
            RankError: a rank stands elsewhere than the others.
            ConfigError: the user's metrics are called otherwise on another rank.
        """
        numbers = self.on_host()
        ranks.require_alike(numbers[FINGERPRINT:JOBS], self.report.identity)
        own = JOBS + len(self.report.progress.counts)
        added = own + self.metrics.length
        signals = StepSignals(
            step=self.step,
            start=self.batch.start,
            stop=self.batch.stop,
            loss=numbers[LOSS_PER_TOKEN],
            grad_norm=numbers[GRAD_NORM],
            tokens=int(numbers[TOKENS]),
            nonfinite_ranks=int(numbers[NONFINITE]),
            gated=numbers[CLOSED] > 0 or self.withheld is not None,
            withheld=self.withheld,
        )
        info = StepInfo(
            signals=signals,
            batch=self.batch,
            stop_requested=numbers[STOP] > 0,
            keeps_lines=numbers[KEPT] > 0,
            observer_failed=numbers[OBSERVERS] > 0,
            is_slow=numbers[SLOW] > 0,
            is_advised=numbers[ADVICE] > 0,
            jobs=self.report.progress.jobs,
            job_counts=tuple(numbers[JOBS:own]),
            metrics=self.metrics.read(numbers[own:added]),
        )
        return info, numbers[added:LOSS_PER_TOKEN]


_LARGEST = sys.float_info.max


def is_closed(
    packed: torch.Tensor,
    loss: torch.Tensor,
    norm: torch.Tensor,
    bounds: Bounds | None,
    *,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """True where the update must not be applied; a bool scalar on the device.

    The limits are kernel arguments, so that nothing is copied.

    Args:
        packed: FP64, the sums over all ranks.
        loss, norm: FP64 scalars on the device: loss per token, gradient norm before clipping.
        bounds: None applies every step whose samples could be read.
        before: the previous step's numbers, if the host has not read them. The gate stays closed if
            that step was not applied, or carries a stop request.
    """
    closed = packed[UNREADABLE] > 0
    if before is not None:
        closed = closed | (before[CLOSED] > 0) | (before[STOP] > 0)
    if bounds is None:
        return closed
    bounded = is_within(bounds.usual, loss, norm)
    if before is not None:
        was_low = before[LOSS_PER_TOKEN] <= bounds.high
        bounded = torch.where(was_low, bounded, is_within(bounds.after_high, loss, norm))
    return ~(bounded & (packed[NONFINITE] == 0)) | closed


def is_within(limits: Limits, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Whether both are finite and within the limits: NaN and Inf exceed the largest number."""
    low_enough = (loss <= min(limits.loss, _LARGEST)) & (norm <= min(limits.grad_norm, _LARGEST))
    return low_enough & (loss >= -_LARGEST)  # a norm is not negative


# By name: sum and count, FP64 scalars of this rank.
Sums = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
_NAME = re.compile(r"[A-Za-z][\w.-]*(/[\w.-]+)*")
_MOST_NAMES, _LONGEST = 256, 100


def check_name(name: object, where: str, *, is_evaluated: bool) -> None:
    """
    Args:
        is_evaluated: whether ``eval_`` and the name is the metric in an evaluation.

    Raises:
        ConfigError: it cannot be the name of a metric.
    """
    if not isinstance(name, str) or len(name) > _LONGEST or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {name!r:.120} is no name of a metric; give up to {_LONGEST} letters, "
            "digits, '_', '.', '-' and '/', a letter first"
        )
    is_own = is_ours(name) and (is_evaluated or not is_held_out(name))
    if is_own or (is_evaluated and name.startswith(EVALUATED)):
        raise ConfigError(
            f"{where}: a metric cannot be called {name!r}: columns of metrics.jsonl are called so "
            f"already; give it another name, such as {'own_' + name.replace('/', '_')!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMetrics:
    """This rank's metrics of one step, and the names that had places when they were packed.

    Attributes:
        flags: whether there are new names, and whether each known one was given.
        sums: of the known ones, each with its count, FP64 on the device. To be summed over ranks
            behind the flags, which lie on the host: they go to the device with the step's others.
    """

    flags: tuple[float, ...]
    sums: torch.Tensor
    names: tuple[str, ...]
    own: Sums
    _agreed: MetricNames

    @property
    def length(self) -> int:
        return 1 + 3 * len(self.names)

    def read(self, totals: Sequence[float]) -> dict[str, float]:
        """The metrics by name: sum by count over all ranks; none that counted nothing.

        Collective where a rank has a new name, or some ranks lack one.

        Args:
            totals: :attr:`flags` and :attr:`sums`, summed over the ranks.

        Raises:
            ConfigError: the ranks give different names, or one that cannot be; on all ranks.
        """
        num = len(self.names)
        is_new, given, sums = totals[0] > 0, totals[1 : 1 + num], totals[1 + num :]
        if is_new or not self._agreed.are_complete(given):
            return self._agreed.agree(self.own)
        return _means(zip(self.names, sums[::2], sums[1::2], strict=True))


class MetricNames:
    """The names that all ranks have agreed on since this start.

    Args:
        where: who gives the metrics, for messages.
        are_evaluated: whether ``eval_`` and a name is kept for the metric in an evaluation.
        groups: of samples, whose metrics are called ``NAME/GROUP``.

    Attributes:
        names: those agreed on.
    """

    def __init__(
        self, ranks: Ranks, where: str, *, are_evaluated: bool, groups: Sequence[str] = ()
    ) -> None:
        self._ranks = ranks
        self._where = where
        self._are_evaluated = are_evaluated
        self._groups = groups
        self.names: tuple[str, ...] = ()

    def pack(self, own: Sums, device: torch.device) -> PackedMetrics:
        """Pack this rank's metrics. Waits for nothing."""
        names = self.names
        flags = (float(bool(own.keys() - set(names))), *(float(name in own) for name in names))
        sums = torch.zeros(0, dtype=torch.float64, device=device)
        if names:
            nothing = torch.zeros((), dtype=torch.float64, device=device)
            pairs = [own.get(name, (nothing, nothing)) for name in names]
            sums = torch.stack([one for pair in pairs for one in pair])
        return PackedMetrics(flags=flags, sums=sums, names=names, own=own, _agreed=self)

    def are_complete(self, given: Sequence[float]) -> bool:
        """Whether each name was given by all ranks or by none."""
        return all(count in (0.0, self._ranks.world_size) for count in given)

    def agree(self, own: Sums) -> dict[str, float]:
        """Agree on the names of one step; returns its metrics. Collective.

        Raises:
            ConfigError: see :meth:`PackedMetrics.read`.
        """
        by_rank = self._ranks.gather(
            {name: [float(one) for one in pair] for name, pair in own.items()}
        )
        first, *others = by_rank
        for rank, other in enumerate(others, start=1):
            for name in sorted(first.keys() ^ other.keys()):
                has, lacks = (0, rank) if name in first else (rank, 0)
                raise ConfigError(
                    f"{self._where}: rank {has} gives the metric {name!r} and rank {lacks} does "
                    "not, in the same step; give the same names on all ranks, one that has "
                    "nothing to count as (0, 0)"
                )
        names = sorted({*self.names, *first})
        by_group = {f"{name}/{group}" for name in names for group in self._groups}
        for name in sorted(first.keys() - by_group):
            check_name(name, self._where, is_evaluated=self._are_evaluated)
        if len(set(names) - by_group) > _MOST_NAMES:
            raise ConfigError(
                f"{self._where}: {len(names)} metrics by different names, such as {names[-1]!r}; "
                f"at most {_MOST_NAMES}; leave numbers of steps and samples out of names"
            )
        self.names = tuple(names)
        sums = (
            (name, *(sum(of_rank[name][at] for of_rank in by_rank) for at in (0, 1)))
            for name in sorted(first)
        )
        return _means(sums)


def _means(sums: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    return {name: total / count for name, total, count in sums if count}
