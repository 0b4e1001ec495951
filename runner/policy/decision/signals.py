"""The numbers of a step that all ranks agree on, and their test for equality.

A fingerprint that must be equal everywhere is summed, not gathered: each rank contributes its lanes
and their squares, and all values are equal exactly if ``ranks * sum(x^2) == sum(x)^2``. Every rank
computes that from the same sums, so all ranks reach the same result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

NUM_LANES = 3
_LANE_BITS = 12  # ranks^2 * 2^24 stays below 2^53 (exact in FP64) up to 23,000 ranks


def lanes(identity: str) -> tuple[int, ...]:
    """36 bits of SHA-256 as three numbers, small enough to be summed exactly in FP64."""
    bits = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    mask = (1 << _LANE_BITS) - 1
    return tuple((bits >> (_LANE_BITS * lane)) & mask for lane in range(NUM_LANES))


def all_equal(sums: Sequence[float], sums_of_squares: Sequence[float], ranks: int) -> bool:
    """Whether the summed lanes came from equal values on all ranks."""
    return all(
        ranks * square == total * total for total, square in zip(sums, sums_of_squares, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignals:
    """One attempted step, equal on all ranks.

    ``step`` is the number the update gets if it is applied (1 is the first); ``start`` and
    ``stop`` the half-open span of sample positions it read. ``loss`` is nats per token,
    ``grad_norm`` the global norm before clipping. ``gated``: the device did not apply it.
    ``nonfinite_ranks`` counts ranks that saw NaN or Inf in their own numbers. ``withheld``: why
    the engine itself did not apply a step that the gate had let through.
    """

    step: int
    start: int
    stop: int
    loss: float
    grad_norm: float
    tokens: int
    nonfinite_ranks: int
    gated: bool
    withheld: str | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the numbers are finite; an engine withholds what overflows."""
        return (
            math.isfinite(self.loss)
            and math.isfinite(self.grad_norm)
            and not self.nonfinite_ranks
            and self.withheld is None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The gate's bounds for one step: a finite step at or below both is applied."""

    loss: float = math.inf
    grad_norm: float = math.inf

    def exceeded(self, signals: StepSignals) -> bool:
        """Which bound is exceeded. The device's gate decides the same from the same numbers."""
        return (
            not signals.is_finite or signals.loss > self.loss or signals.grad_norm > self.grad_norm
        )

    def to_json(self) -> list[float | None]:
        """The loss and the norm; None for no limit."""
        pair = (self.loss, self.grad_norm)
        return [finite(limit) for limit in pair]


def finite(value: float) -> float | None:
    """The number, or None for NaN and Infinity."""
    return value if math.isfinite(value) else None


def json_float(value: float) -> float | str:
    """A number as a word if JSON lacks it (NaN, Infinity); float() reads it back."""
    return value if math.isfinite(value) else repr(value)


def limits_of(pair: Sequence[float | None]) -> Limits:
    """Inverse of :meth:`Limits.to_json`."""
    loss, norm = (math.inf if limit is None else limit for limit in pair)
    return Limits(loss=loss, grad_norm=norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits among which the gate chooses if the host has not read the previous step.

    ``after_high`` applies unless the previous loss was at or below ``high``, else ``usual``. If all
    earlier steps are known, both are the same.
    """

    usual: Limits
    after_high: Limits
    high: float = math.inf
