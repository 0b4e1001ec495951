"""Repeating patterns: drops at epochs, patterns of the data order; and rising gradient norms."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from runner.tools.reading.curve import EPOCH, Curve, Flags, Floats, Ints, Signature, levels

_EPOCH_ROWS = 20
_FIT_ROWS = 200  # on each side of a boundary
_STEP, _SIGMAS = 0.03, 3.0
_CREEP, _CREEP_BLIND = 1.5, 3.0  # with and without a rate to correct by
_MOST_ROWS = 1 << 16
_LEAST_PERIODS = 4
_CORRELATION = 0.35


def epoch_steps(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """Straight lines fitted before and after an epoch's begin do not meet there."""
    epoch = curve.column(EPOCH)
    if epoch is None:
        return
    steps = []
    boundaries = _boundaries(epoch)
    for index, row in enumerate(boundaries):
        begin = boundaries[index - 1] if index else 0
        end = boundaries[index + 1] if index + 1 < len(boundaries) else len(curve)
        step = _step(curve, calm, (begin, row, end))
        if step is not None:
            steps.append((row, *step))
    if not steps:
        return
    sigmas = sorted((step / error for _, step, error in steps), reverse=True)
    if sigmas[0] < 5 and len(steps) < 2:
        return
    worst = max(steps, key=lambda one: one[1])
    count_text = f"; {len(steps)} such boundaries" if len(steps) > 1 else ""
    yield Signature(
        signature="epoch_steps",
        first=steps[0][0],
        last=steps[-1][0],
        evidence=f"at step {curve.steps[worst[0]]}, where an epoch begins, the loss falls by "
        f"{worst[1]:.3g} at once ({worst[1] / worst[2]:.2g} standard errors){count_text}",
        remedy="the model memorises the samples: judge by the held-out loss, use fewer "
        "epochs or more data",
        confidence="high" if sigmas[0] >= 5 else "medium",
    )


def _boundaries(epoch: Floats) -> list[int]:
    whole = np.floor(epoch + 1e-6)
    return [int(row) for row in np.flatnonzero(np.diff(whole) >= 1) + 1]


def _step(curve: Curve, calm: Flags, around: tuple[int, int, int]) -> tuple[float, float] | None:
    """How far the loss drops at the row, and the standard error of that; None for no drop."""
    begin, row, end = around
    before = np.flatnonzero(calm[max(begin, row - _FIT_ROWS) : row]) + max(begin, row - _FIT_ROWS)
    after = np.flatnonzero(calm[row : min(end, row + _FIT_ROWS)]) + row
    if min(len(before), len(after)) < _EPOCH_ROWS:
        return None
    left, left_error = _line_at(before, curve.loss[before], row)
    right, right_error = _line_at(after, curve.loss[after], row)
    step, error = left - right, float(np.hypot(left_error, right_error))
    return (step, error) if step > max(_SIGMAS * error, _STEP * abs(left)) else None


def _line_at(rows: Ints, loss: Floats, row: int) -> tuple[float, float]:
    """The least-squares line's value at a row, and its standard error."""
    x = (rows - row).astype(np.float64)
    center = x.mean()
    square = float(np.sum((x - center) ** 2))
    slope = float(np.sum((x - center) * loss) / square)
    value = float(loss.mean() - slope * center)
    rest = loss - value - slope * x
    sigma = float(np.sqrt(np.sum(rest**2) / max(len(x) - 2, 1)))
    return value, max(sigma * float(np.sqrt(1 / len(x) + center**2 / square)), 1e-12)


def norm_creep(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """Each quarter of the run has a larger gradient norm than the one before.

    Under weight decay and norm layers the norm is proportional to rate ** -0.5 (arXiv
    2506.02285), so the part of a rise that the schedule causes is subtracted.
    """
    use = calm & np.isfinite(curve.grad_norm) & (curve.grad_norm > 0)
    if int(use.sum()) < 80:
        return
    height = np.log(np.where(use, curve.grad_norm, 1.0))
    rate = curve.learning_rate
    if rate is not None:
        use &= rate > 0.01 * np.max(rate)
        use[: int(np.argmax(rate >= 0.99 * np.max(rate)))] = False
        height = height + 0.5 * np.log(np.maximum(rate, 1e-30) / np.max(rate))
    rows = np.flatnonzero(use)
    if len(rows) < 80:
        return
    use[rows[: len(rows) // 20]] = (
        False  # the norms of the first steps depend on the initial weights
    )
    quarters = levels(height, use, most=4)
    rise = float(np.exp(quarters.values[-1] - quarters.values[0]))
    is_ordered = bool((np.diff(quarters.values) > 0).all())
    if not is_ordered or rise < (_CREEP if rate is not None else _CREEP_BLIND):
        return
    if _goes_well(curve, calm) and rise < 4 * _CREEP:
        return
    norms = [float(np.median(curve.grad_norm[use][part])) for part in _quarters(int(use.sum()))]
    yield Signature(
        signature="norm_creep",
        first=int(quarters.rows[0]),
        evidence="the gradient norm rises from quarter to quarter: "
        + ", ".join(f"{norm:.3g}" for norm in norms)
        + (", also when corrected for the rate" if rate is not None else "; no rate was logged"),
        remedy="a lower rate or more weight decay, before the run diverges; look at the "
        "layers' norms and at the attention logits",
        confidence="medium" if rate is not None else "low",
    )


def _quarters(number: int) -> list[slice]:
    edges = np.linspace(0, number, 5).astype(int)
    return [slice(int(a), int(b)) for a, b in pairwise(edges)]


def _goes_well(curve: Curve, calm: Flags) -> bool:
    """Whether the last quarter is the best one."""
    quarters = levels(curve.loss, calm, most=4)
    return bool(np.argmin(quarters.values) == len(quarters) - 1)


def data_order(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """The loss around its trend correlates with itself a fixed number of rows before."""
    rows = np.flatnonzero(calm)
    if len(rows) < 100:
        return
    loss = curve.loss[rows][-_MOST_ROWS:]
    loss = loss[len(loss) // 10 :]
    rest = _detrended(loss)
    lag, strength = _period(rest)
    if lag == 0:
        return
    epoch = curve.column(EPOCH)
    per_epoch = len(curve) / (epoch[-1] - epoch[0]) if epoch is not None and epoch[-1] > 1 else 0
    is_epoch = bool(per_epoch and abs(lag / per_epoch - 1) < 0.1)
    swing = float(2 * np.sqrt(2) * np.std(rest) * np.sqrt(strength))
    yield Signature(
        signature="data_order",
        first=int(rows[0]),
        last=int(rows[-1]),
        evidence=f"the loss repeats itself every {lag} rows (correlation {strength:.2g}), by about "
        f"{swing:.2g} up and down" + (": an epoch" if is_epoch else ""),
        remedy="shuffle over the whole corpus (sorted or blocked files, a small shuffle buffer); "
        "check whether something that runs periodically changes the state",
    )


def _detrended(loss: Floats) -> Floats:
    """The loss minus a piecewise linear trend, with outliers clipped to four deviations."""
    number = 8
    edges = np.linspace(0, len(loss), number + 1).astype(int)
    centers = (edges[:-1] + edges[1:]) / 2
    medians = [np.median(loss[a:b]) for a, b in pairwise(edges)]
    rest = loss - np.interp(np.arange(len(loss)), centers, medians)
    spread = 1.4826 * float(np.median(np.abs(rest)))
    clipped = np.clip(rest, -4 * spread, 4 * spread)
    centered: Floats = clipped - clipped.mean()
    return centered


def _period(rest: Floats) -> tuple[int, float]:
    """The lag and height of the highest autocorrelation peak that recurs at twice the lag."""
    number = len(rest)
    size = 1 << (2 * number - 1).bit_length()
    power = np.abs(np.fft.rfft(rest, size)) ** 2
    total = np.fft.irfft(power, size)[: number // 2]
    if total[0] <= 0:
        return 0, 0.0
    correlation = total / total[0] * (number / np.arange(number, number - len(total), -1))
    most = number // _LEAST_PERIODS
    if most <= 8:
        return 0, 0.0
    below = np.flatnonzero(correlation[:most] < 0.05)
    if not len(below):
        return 0, 0.0
    first = max(int(below[0]), 4)
    if first >= most:
        return 0, 0.0
    lag = first + int(np.argmax(correlation[first:most]))
    near = max(1, lag // 20)
    again = float(np.max(correlation[2 * lag - near : min(2 * lag + near + 1, len(correlation))]))
    dip = float(np.min(correlation[lag : 2 * lag]))
    strength = float(correlation[lag])
    has_period = strength > _CORRELATION and again > 0.7 * strength and dip < 0.3 * strength
    return (lag, strength) if has_period else (0, 0.0)


RULES = (norm_creep, epoch_steps, data_order)
