"""The columns of one training as arrays, and the robust statistics that all rules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Column = Sequence[float | None] | Floats

# The names of further columns that Curve.of accepts.
LEARNING_RATE = "lr"
EPOCH = "epoch"
HELD_OUT = "eval_loss"
UPDATE_RATIO = "update_ratio"
ENTROPY = "entropy"
CORPUS_ENTROPY = "corpus_entropy"
LAYER_RATIO = "layer_ratio"
FURTHER = (LEARNING_RATE, EPOCH, HELD_OUT, UPDATE_RATIO, ENTROPY, CORPUS_ENTROPY, LAYER_RATIO)
_SIGMA_OF_MAD = 1.4826  # of a normal distribution
_MEDIAN_ERROR = 1.2533  # the standard error of a median over that of a mean, sqrt(pi / 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One training with one row per logged step.

    Args:
        steps: int64 [n].
        loss: float64 [n], in nats or any other unit; NaN and infinite values are kept.
        grad_norm: float64 [n], before clipping; NaN where it was not logged.
        columns: further float64 [n] by name, NaN where empty; a column without values is absent.
        held_out_rows: int64 [m], the last row of training at or before each evaluation.
        held_out: float64 [m], the finite held-out losses.
    """

    steps: Ints
    loss: Floats
    grad_norm: Floats
    columns: Mapping[str, Floats]
    held_out_rows: Ints
    held_out: Floats

    @classmethod
    def of(
        cls,
        steps: Column,
        loss: Column,
        grad_norm: Column,
        further: Mapping[str, Column] | None = None,
    ) -> Curve:
        """Build a curve from equally long columns in the order of the file; empty cells are None.

        A row without a loss passes its held-out loss to the row before. Rows that a rollback undid
        are left out: where the steps go back, the later row of a step counts.
        """
        losses = _floats(loss)
        further_columns = {name: _floats(column) for name, column in (further or {}).items()}
        has_loss = np.fromiter((value is not None for value in loss), bool, len(losses))
        whole_steps = _integer_steps(_floats(steps))
        is_last = _is_last_of_its_step(whole_steps)
        rows = np.flatnonzero(has_loss & is_last)
        held_out = further_columns.pop(HELD_OUT, np.full(len(losses), np.nan))
        evaluation_rows = np.flatnonzero(np.isfinite(held_out) & is_last)
        columns = {
            name: _filled(values)[rows]
            for name, values in further_columns.items()
            if np.isfinite(values).any()
        }
        return cls(
            steps=whole_steps[rows],
            loss=losses[rows],
            grad_norm=_floats(grad_norm)[rows],
            columns=columns,
            held_out_rows=np.maximum(np.searchsorted(rows, evaluation_rows, side="right") - 1, 0),
            held_out=held_out[evaluation_rows],
        )

    def __len__(self) -> int:
        return len(self.loss)

    def column(self, name: str) -> Floats | None:
        """A further column, if it has at least one number; else None."""
        return self.columns.get(name)

    @cached_property
    def learning_rate(self) -> Floats | None:
        """The learning rate, if it was logged and not always zero; else None."""
        rate = self.columns.get(LEARNING_RATE)
        return rate if rate is not None and np.nanmax(rate) > 0 else None

    @cached_property
    def finite(self) -> Flags:
        return np.isfinite(self.loss)


def _floats(column: Column) -> Floats:
    if isinstance(column, np.ndarray):
        return column.astype(np.float64)
    return np.array([np.nan if value is None else value for value in column], dtype=np.float64)


def _filled(values: Floats) -> Floats:
    """Fill empty cells with the last value before, or with the first value at the start."""
    is_finite = np.isfinite(values)
    last_finite = np.maximum.accumulate(np.where(is_finite, np.arange(len(values)), -1))
    filled: Floats = values[np.where(last_finite < 0, np.argmax(is_finite), last_finite)]
    return filled


def _integer_steps(steps: Floats) -> Ints:
    """Steps as integers; row numbers if no step was logged."""
    if not np.isfinite(steps).any():
        return np.arange(len(steps))
    bounded = np.clip(_filled(steps), -(2.0**62), 2.0**62)
    return bounded.astype(np.int64)


def _is_last_of_its_step(steps: Ints) -> Flags:
    """False for rows that a rollback or a restart undid.

    Steps that restart at their smallest, like a counter within the epoch, undo nothing.
    """
    resets = np.flatnonzero(np.diff(steps) < 0) + 1
    if not len(resets) or (steps[resets] <= steps[0]).any():
        return np.ones(len(steps), dtype=bool)
    # Neighbouring rows of one step stay together; they count if no later row has a step as small.
    ends = np.flatnonzero(np.append(np.diff(steps) != 0, True))
    end_of_row = ends[np.searchsorted(ends, np.arange(len(steps)))]
    lowest_later = np.append(np.minimum.accumulate(steps[::-1])[::-1], np.iinfo(np.int64).max)
    kept: Flags = steps < lowest_later[end_of_row + 1]
    return kept


# -- statistics ------------------------------------------------------------------------------------


def noise(values: Floats) -> float:
    """Standard deviation of a row about its trend, from the differences of neighbours; >= 0."""
    if len(values) < 3:
        return 0.0
    return float(_SIGMA_OF_MAD * np.median(np.abs(np.diff(values))) / np.sqrt(2))


@dataclass(frozen=True, kw_only=True, eq=False)
class Levels:
    """Medians of blocks of equally many rows.

    Args:
        rows: int64 [k + 1], the first row of each block, and the end of the last.
        values: float64 [k].
        error: float64 [k], the standard error of each value.
    """

    rows: Ints
    values: Floats
    error: Floats

    def __len__(self) -> int:
        return len(self.values)


def levels(values: Floats, use: Flags, most: int = 50, least_rows: int = 8) -> Levels:
    """Medians of ``values`` [n] where ``use`` [n] holds, in at most ``most`` blocks."""
    rows = np.flatnonzero(use)
    num_blocks = int(np.clip(len(rows) // least_rows, 1, most))
    edges = np.linspace(0, len(rows), num_blocks + 1).astype(np.int64)
    medians, errors = np.full(num_blocks, np.nan), np.full(num_blocks, np.inf)
    for block in range(num_blocks):
        in_block = values[rows[edges[block] : edges[block + 1]]]
        if len(in_block):
            medians[block] = np.median(in_block)
            errors[block] = _MEDIAN_ERROR * noise(in_block) / np.sqrt(len(in_block))
    begins = (
        np.append(rows, len(values))[edges] if len(rows) else np.zeros(num_blocks + 1, np.int64)
    )
    return Levels(rows=begins.astype(np.int64), values=medians, error=errors)


def median_of(values: Floats) -> float:
    """The median of the finite values; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def smoothed(values: Floats) -> Floats:
    """Running median of three; of two at the ends."""
    return np.array([np.median(values[max(0, at - 1) : at + 2]) for at in range(len(values))])


Confidence = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One signature found in a curve.

    Args:
        signature: one of :data:`SIGNATURES`.
        first: the first row of the curve that shows it.
        last: the last row that shows it; -1: the curve's last.
        evidence: one sentence with the observed numbers.
        remedy: what to try.
        confidence: how rarely healthy curves look like this.
    """

    signature: str
    first: int
    evidence: str
    remedy: str
    last: int = -1
    confidence: Confidence = "medium"

    def to_json(self, curve: Curve) -> dict[str, Any]:
        """Plain values; rows count from 0, and ranges of rows and steps include both ends."""
        return {
            "signature": self.signature,
            "rows": [self.first, range(len(curve))[self.last]],
            "steps": [int(curve.steps[self.first]), int(curve.steps[self.last])],
            "evidence": self.evidence,
            "try": self.remedy,
            "confidence": self.confidence,
        }


# Each signature and its meaning, in the order in which findings are listed.
SIGNATURES = {
    "not_finite": "a loss that is NaN or infinite",
    "divergence": "the loss ends well above its best",
    "spike": "the loss jumps and comes back",
    "level_shift": "the loss jumps once and continues from the new level",
    "rate_too_high": "the loss rises or stalls while the rate is high",
    "rate_too_low": "the loss falls slowly, and as steadily at the end as at the start",
    "warmup_too_long": "the rate still rises while the loss has hardly moved",
    "vanishing_gradients": "little or no gradient, in all layers or in the first ones",
    "degenerate_batches": "batches with few distinct tokens",
    "plateau": "the loss stays high, and nothing logged explains it",
    "floor_early": "the rate reaches its floor early, and progress ends there",
    "norm_creep": "the gradient norm rises through the whole run",
    "overfitting": "the held-out loss rises while the training loss falls",
    "forgetting": "the loss of one held-out set rises while that of another falls",
    "held_out_below_training": "the held-out loss is far below the training loss",
    "held_out_stalls": "the held-out loss stalls while the training loss keeps falling",
    "memorised": "the training data is memorised, and nothing is held out",
    "epoch_steps": "the loss drops where an epoch begins",
    "oscillation": "the held-out loss swings without a trend",
    "data_order": "the loss repeats a pattern again and again",
}
