"""The numbers of one computation of a step from all ranks, and its outliers. Pure.

Samples are compared one by one and not by the global norm: on a CPU a sample's loss has the same
bits on whichever rank it is computed, the norm has not (the order of its sums is another).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.policy.decision.finding import relative_difference
from runner.policy.decision.signals import Limits

# A culprit must stand out by itself: to omit the loudest sample lowers any loss and proves nothing.
_NATS_ABOVE = 0.5
_NORMS_ABOVE = 4.0
# Results that differ by at most this many noise floors count as equal (issue 17, trap 1).
_FLOORS = 20.0
# A fault that closes the gate is larger; a device may repeat its bits three times, then not.
_LEAST_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sample.

    Attributes:
        rank: which computed it.
        loss: summed nats over ``count`` terms: tokens, or what a model's own losses count.
        norm: of the gradient at the embedding's output.
    """

    rank: int
    loss: float
    norm: float
    count: float

    @property
    def level(self) -> float:
        """Nats per token."""
        return self.loss / (self.count or 1)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's sums (see :class:`runner.engine.protocol.LocalSums`)."""

    loss: float
    square: float
    nonfinite: bool
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One computation of a step.

    ``rows`` are by position in the stream, without padding; samples from elsewhere have negative
    numbers. ``shares`` are by rank. ``tokens`` is the divisor of loss and norm: that of the whole
    batch, also if samples are left out. Those then count with ``usual_loss`` nats per token and a
    gradient of zero. ``unit`` is what the guard takes for a nat: a model's losses may have others.
    """

    rows: Mapping[int, SampleRow]
    shares: Sequence[Share]
    tokens: float
    usual_loss: float | None = None
    unit: float = 1.0

    @property
    def loss(self) -> float:
        """Nats per token, as the gate sees it."""
        total, count = sum(share.loss for share in self.shares), self._count
        if self.usual_loss is not None and self.tokens > count:
            total, count = total + self.usual_loss * (self.tokens - count), self.tokens
        return total / max(count, 1.0)

    @property
    def grad_norm(self) -> float:
        square = sum(share.square for share in self.shares)
        return math.sqrt(square) / self.tokens if square >= 0 else math.nan

    @property
    def nonfinite_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, share in enumerate(self.shares) if share.nonfinite)

    def is_good(self, limits: Limits) -> bool:
        """Whether the gate would apply the step."""
        loss, norm = self.loss, self.grad_norm
        return (
            math.isfinite(loss)
            and math.isfinite(norm)
            and not self.nonfinite_ranks
            and loss <= limits.loss
            and norm <= limits.grad_norm
        )

    @property
    def _count(self) -> float:
        return sum(share.count for share in self.shares)

    def to_json(self) -> dict[str, Any]:
        """The numbers; the writer encodes those that are not finite."""
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "nonfinite_ranks": list(self.nonfinite_ranks),
            "ranks": [[s.loss, s.square, s.nonfinite, s.count] for s in self.shares],
            "samples": {str(p): [r.rank, r.loss, r.norm, r.count] for p, r in self.rows.items()},
        }


@dataclass(frozen=True, slots=True)
class Usual:
    """The largest level (nats per token) and gradient norm among samples known to be good.

    ``above``: how far above that level a sample stands out.
    """

    level: float
    norm: float
    above: float = _NATS_ABOVE

    def excess(self, row: SampleRow) -> float:
        """How far a finite sample lies above; it stands out from 1 on."""
        return max((row.level - self.level) / self.above, row.norm / (self.norm * _NORMS_ABOVE))

    def stands_out(self, row: SampleRow) -> bool:
        """Whether the sample is bad by itself."""
        return (
            not row.is_finite
            or row.level > self.level + self.above
            or row.norm > self.norm * _NORMS_ABOVE
        )


def usual(known: Reading, *, without: Collection[int] = ()) -> Usual | None:
    """The usual level of known samples, without those that the ranks ``without`` computed.

    None if there are none, or one is not finite.
    """
    rows = [row for row in known.rows.values() if row.rank not in without]
    if not rows or not all(row.is_finite for row in rows):
        return None
    levels = [row.level for row in rows]
    above = max(_NATS_ABOVE * known.unit, statistics.pstdev(levels))
    return Usual(max(levels), max(row.norm for row in rows), above)


def outstanding(reading: Reading, level: Usual) -> set[int]:
    """Positions of the samples that stand out by themselves."""
    return {position for position, row in reading.rows.items() if level.stands_out(row)}


def ranks_of(reading: Reading, positions: Iterable[int]) -> set[int]:
    """The ranks that computed them, and ranks with NaN or Inf."""
    return {reading.rows[position].rank for position in positions} | set(reading.nonfinite_ranks)


def noise_floor(readings: Sequence[Reading]) -> float:
    """The largest relative difference between repeated computations of the same samples."""
    first, *others = readings
    return max((_largest_difference(first, other) for other in others), default=0.0)


def differing_ranks(reading: Reading, others: Sequence[Reading], floor: float) -> set[int]:
    """Ranks whose own numbers differ from those in all ``others`` by more than noise.

    ``floor``: see :func:`noise_floor`.

    The square of the reduced gradient belongs to no single rank.
    """

    def differs(rank: int, other: Reading) -> bool:
        share, their = reading.shares[rank], other.shares[rank]
        own = {p: row for p, row in reading.rows.items() if row.rank == rank}
        pairs = [(share.loss, their.loss), *_pairs(own, other)]
        return share.nonfinite is not their.nonfinite or _largest(pairs) > _tolerance(floor)

    ranks = range(len(reading.shares))
    return {rank for rank in ranks if all(differs(rank, other) for other in others)}


def is_beyond(one: Reading, other: Reading, floor: float) -> bool:
    """Whether two computations of the same samples differ by more than noise."""
    return _largest_difference(one, other) > _tolerance(floor)


def _tolerance(floor: float) -> float:
    return max(_FLOORS * floor, _LEAST_TOLERANCE)


def _largest_difference(one: Reading, other: Reading) -> float:
    pairs = [(one.loss, other.loss), (one.grad_norm, other.grad_norm), *_pairs(one.rows, other)]
    pairs += [(a.loss, b.loss) for a, b in zip(one.shares, other.shares, strict=True)]
    return _largest(pairs)


def _pairs(rows: Mapping[int, SampleRow], other: Reading) -> list[tuple[float, float]]:
    """The numbers of samples, and theirs in another reading."""
    both = [(row, other.rows[position]) for position, row in rows.items()]
    return [pair for a, b in both for pair in ((a.loss, b.loss), (a.norm, b.norm))]


def _largest(pairs: Iterable[tuple[float, float]]) -> float:
    return max(relative_difference(a, b) for a, b in pairs)
