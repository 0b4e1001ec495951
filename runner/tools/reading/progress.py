"""Too little progress, and its causes: plateau, learning rate, the schedule's floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runner.tools.reading.curve import (
    CORPUS_ENTROPY,
    ENTROPY,
    LAYER_RATIO,
    UPDATE_RATIO,
    Curve,
    Flags,
    Floats,
    Levels,
    Signature,
    levels,
    median_of,
    noise,
)
from runner.tools.reading.trouble import unit

_LEAST_ROWS = 60
_HIGH = 0.8  # of the loss of a model that knows only the frequencies of the tokens
_HARDLY = 0.03  # improvement of the last third, of the level
_UNTRAINED = 4.0  # nats: a model that starts above was not trained before
_SMALL_UPDATE, _LARGE_UPDATE = 6e-4, 2e-2  # of the weights' norm, per step
_VANISHING = 0.05  # norm of the first quarter of the layers over that of the last
_FEW_TOKENS = 0.6  # of the corpus' entropy
_AT_FLOOR, _FLOOR_ROWS = 0.02, 0.3
_NO_GRADIENT = 1e-2  # of the norm of the first rows
_STANDS = 0.015  # of the loss: a smaller gain over all rows at the floor is no progress
_AT_START = 0.97  # of the first loss: nothing was learned
_LOW_RATE, _HIGH_RATE = 5e-5, 2e-2  # for Adam, of an untrained model


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Levels of the loss: at the start, at one and two thirds, at the end; and their median."""

    start: float
    first: float
    second: float
    end: float
    usual: float
    error: float

    @property
    def total(self) -> float:
        return self.start - self.end

    @property
    def last_third(self) -> float:
        return self.second - self.end


def fall_of(curve: Curve, calm: Flags) -> Fall | None:
    """The levels of the loss; None with too few rows to call anything a plateau."""
    if int(calm.sum()) < _LEAST_ROWS:
        return None
    rows = np.flatnonzero(calm)
    loss = curve.loss[rows]
    smooth = levels(curve.loss, calm, most=12, least_rows=4)
    third = len(smooth) // 3
    return Fall(
        start=float(np.median(loss[: max(3, min(5, len(loss) // 100))])),
        first=float(np.mean(smooth.values[third - 1 : third + 1])),
        second=float(np.mean(smooth.values[2 * third - 1 : 2 * third + 1])),
        end=float(np.mean(smooth.values[-2:])),
        usual=float(np.median(smooth.values)),
        error=float(np.median(smooth.error)),
    )


def slow_progress(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """Find a plateau, and report it by its cause if the logged columns show one."""
    fall = fall_of(curve, calm)
    if fall is None or not _is_high(curve, fall):
        yield from _logged_causes(curve, calm, fall)
        return
    is_stalled = fall.last_third < max(_HARDLY * abs(fall.end), 3 * fall.error)
    causes = list(_logged_causes(curve, calm, fall))
    if causes:
        yield causes[0]
    elif _is_slow_and_steady(fall) or _is_hardly_moving(curve, fall):
        yield _too_low(curve, fall)
    elif (
        high_rate_finding := _stuck_after_peak(curve, calm) or _waits_for_the_fall(curve, calm)
    ) is not None:
        yield high_rate_finding
    elif (rate := curve.learning_rate) is not None and np.max(rate) >= _HIGH_RATE:
        yield _far_too_high(curve, fall, float(np.max(rate)))
    elif is_stalled:
        yield _plateau(curve, fall)


def _is_high(curve: Curve, fall: Fall) -> bool:
    entropy = curve.column(CORPUS_ENTROPY)
    if entropy is not None:
        return fall.end > _HIGH * median_of(entropy)
    # A loss that is above its start all the time has something added that the start lacks.
    is_in_its_unit = fall.usual < 1.02 * fall.start
    return is_in_its_unit and fall.start >= _UNTRAINED and fall.end > _HIGH * fall.start


def _logged_causes(curve: Curve, calm: Flags, fall: Fall | None) -> Iterator[Signature]:
    """Causes that a logged column shows by itself."""
    if fall is None:
        return
    is_high = _is_high(curve, fall)
    for cause in (
        _few_tokens(curve),
        _vanishing(curve, fall),
        _no_gradient(curve, fall, is_high),
        _long_warmup(curve, fall, is_high),
        _update_size(curve, fall, is_high),
        _high_rate(curve, calm),
    ):
        if cause is not None:
            yield cause


def _few_tokens(curve: Curve) -> Signature | None:
    entropy = curve.column(ENTROPY)
    if entropy is None:
        return None
    corpus = curve.column(CORPUS_ENTROPY)
    reference = median_of(corpus) if corpus is not None else float(np.nanquantile(entropy, 0.95))
    low_rows = np.flatnonzero(entropy < _FEW_TOKENS * reference)
    if len(low_rows) < max(3, 0.02 * len(curve)):
        return None
    return Signature(
        signature="degenerate_batches",
        first=int(low_rows[0]),
        last=int(low_rows[-1]),
        evidence=f"in {len(low_rows)} of {len(curve)} rows the tokens of a batch have an entropy "
        f"below {_FEW_TOKENS:g} of the corpus' {reference:.3g} nats, at the median "
        f"{float(np.median(entropy[low_rows])):.3g}",
        remedy="look at the batches of those steps: repeated or constant text, a broken shuffle, "
        "padding that counts",
        confidence="high",
    )


def _vanishing(curve: Curve, fall: Fall) -> Signature | None:
    ratio = curve.column(LAYER_RATIO)
    if ratio is None:
        return None
    late = median_of(ratio[len(ratio) // 2 :])
    if not late < _VANISHING:
        return None
    return Signature(
        signature="vanishing_gradients",
        first=len(curve) // 2,
        evidence=f"the gradient of the first quarter of the layers is {late:.2g} of that of the "
        f"last, while the loss is at {fall.end:.4g}",
        remedy="norm layers before attention and feed-forward (pre-norm), smaller initial weights "
        "of the output projections, no saturating activations",
        confidence="high",
    )


def _no_gradient(curve: Curve, fall: Fall, is_high: bool) -> Signature | None:
    """The total norm nearly vanished although much is left to learn."""
    norm = curve.grad_norm
    if not np.isfinite(norm).any() or not (is_high or fall.total < 0.1 * abs(fall.start)):
        return None
    begins, ends = median_of(norm[: max(5, len(norm) // 50)]), median_of(norm[-len(norm) // 3 :])
    if not 0 <= ends < max(_NO_GRADIENT * begins, 1e-6):
        return None
    return Signature(
        signature="vanishing_gradients",
        first=len(curve) - len(curve) // 3,
        evidence=f"the gradient norm went from {begins:.3g} to {ends:.3g} while the loss only "
        f"went from {fall.start:.4g} to {fall.end:.4g}",
        remedy="see which layers still get a gradient: dead or saturated activations, a loss that "
        "is masked nearly everywhere, frozen parameters (holdfast preflight names them)",
        confidence="high",
    )


def _long_warmup(curve: Curve, fall: Fall, is_high: bool) -> Signature | None:
    rate = curve.learning_rate
    if rate is None or len(rate) < _LEAST_ROWS:
        return None
    rises = rate[-1] >= 0.999 * np.max(rate) and rate[-1] > 1.05 * rate[-len(rate) // 3]
    if not (rises and is_high):
        return None
    return Signature(
        signature="warmup_too_long",
        first=0,
        evidence=f"after {len(curve)} rows the rate still rises (now {rate[-1]:.3g}) and the loss "
        f"only went from {fall.start:.4g} to {fall.end:.4g}",
        remedy="a shorter warm-up: 1-2 % of the steps, or about 2 / (1 - beta2) steps, is usual",
        confidence="high",
    )


def _update_size(curve: Curve, fall: Fall, is_high: bool) -> Signature | None:
    ratio = curve.column(UPDATE_RATIO)
    if ratio is None or not is_high:
        return None
    late = median_of(ratio[len(ratio) // 3 :])
    if late < _SMALL_UPDATE:
        return Signature(
            signature="rate_too_low",
            first=len(curve) // 3,
            evidence=f"a step changes the weights by {late:.2g} of their norm (1e-3 to 1e-2 is "
            f"usual), and the loss is still at {fall.end:.4g}",
            remedy="a rate 3 to 10 times higher; holdfast preflight has a rate range test",
            confidence="high",
        )
    if late > _LARGE_UPDATE:
        return Signature(
            signature="rate_too_high",
            first=len(curve) // 3,
            evidence=f"a step changes the weights by {late:.2g} of their norm (1e-3 to 1e-2 is "
            f"usual), and the loss stays at {fall.end:.4g}",
            remedy="a rate 3 to 10 times lower, or a longer warm-up",
            confidence="high",
        )
    return None


def _high_rate(curve: Curve, calm: Flags) -> Signature | None:
    """The loss rose while the rate was near its peak, and fell again when the rate fell."""
    rate = curve.learning_rate
    if rate is None or int(calm.sum()) < _LEAST_ROWS:
        return None
    smooth = levels(curve.loss, calm, most=24, least_rows=10)
    if len(smooth) < 10:
        return None
    values = smooth.values
    lowest_so_far = np.minimum.accumulate(values)
    rise = values - lowest_so_far
    top = int(np.argmax(rise))
    rates = rate[np.minimum(smooth.rows[:-1], len(rate) - 1)]
    ends_below = values[-1] < values[top] - 0.3 * rise[top]
    error = 1.25 * noise(curve.loss[calm]) / np.sqrt(int(calm.sum()) / len(smooth))
    needed = max(0.2 * unit(curve.loss), 0.04 * abs(lowest_so_far[top]), 8 * error)
    is_by_rate = rates[top] >= 0.5 * np.max(rate) and rate[-1] < 0.5 * rates[top]
    is_wide = _width(rise, top) >= 2 or rise[top] > 2 * needed
    if rise[top] <= needed or not is_by_rate or not ends_below or not is_wide:
        return None
    best = int(np.argmin(values[: top + 1]))
    return Signature(
        signature="rate_too_high",
        first=int(smooth.rows[best]),
        last=int(min(smooth.rows[top + 1], len(curve) - 1)),
        evidence=f"while the rate was near its peak ({rates[top]:.3g} of {np.max(rate):.3g}) the "
        f"loss rose from {values[best]:.4g} to {values[top]:.4g}; it ended at {values[-1]:.4g}",
        remedy="a peak rate 2 to 5 times lower, or a longer warm-up",
    )


def _width(rise: Floats, top: int) -> int:
    """The number of blocks around the top that are above half of its height."""
    is_up = rise > 0.5 * rise[top]
    before = int(np.argmin(is_up[: top + 1][::-1])) if not is_up[: top + 1].all() else top + 1
    after = int(np.argmin(is_up[top:])) if not is_up[top:].all() else len(rise) - top
    return before + after - 1


def _is_slow_and_steady(fall: Fall) -> bool:
    """Whether the last third gains nearly as much as the first: the curve does not bend yet."""
    middle = fall.first - fall.second
    return (
        fall.total > max(6 * fall.error, 0.002 * abs(fall.start))
        and fall.last_third > 0.15 * fall.total
        and fall.last_third > 0.4 * middle
        and fall.last_third > 3 * fall.error
    )


def _is_hardly_moving(curve: Curve, fall: Fall) -> bool:
    """Whether loss and gradients stay as at the start, at a rate low enough to explain it."""
    rate, norm = curve.learning_rate, curve.grad_norm
    if rate is None or np.max(rate) > _LOW_RATE or fall.end < _AT_START * fall.start:
        return False
    begins, ends = median_of(norm[: max(5, len(norm) // 50)]), median_of(norm[-len(norm) // 3 :])
    return not np.isfinite(begins) or 0.3 * begins < ends < 5 * begins


def _too_low(curve: Curve, fall: Fall) -> Signature:
    rate = curve.learning_rate
    at_rate = f" at a rate of {np.max(rate):.3g}" if rate is not None else ""
    return Signature(
        signature="rate_too_low",
        first=0,
        evidence=f"the loss fell from {fall.start:.4g} to {fall.end:.4g}{at_rate}, in the last "
        f"third by {fall.last_third:.3g}: slowly, and no faster or slower than before",
        remedy="a rate 3 to 10 times higher; holdfast preflight has a rate range test",
    )


def _stuck_after_peak(curve: Curve, calm: Flags) -> Signature | None:
    """The best level came before the rate reached its peak, and never again."""
    rate = curve.learning_rate
    smooth: Levels = levels(curve.loss, calm, most=40, least_rows=4)
    if rate is None or len(smooth) < 8:
        return None
    best = int(np.argmin(smooth.values))
    at_best = rate[min(int(smooth.rows[best + 1]), len(rate)) - 1]
    rose = smooth.values[-1] - smooth.values[best]
    is_early = best < len(smooth) // 3
    if not is_early or rose <= 3 * smooth.error[best] or at_best > np.max(rate):
        return None
    return Signature(
        signature="rate_too_high",
        first=int(smooth.rows[best]),
        evidence=f"the best level, {smooth.values[best]:.4g}, came at step "
        f"{curve.steps[smooth.rows[best]]} with a rate of {at_best:.3g}; with rates up to "
        f"{np.max(rate):.3g} the loss went to {smooth.values[-1]:.4g} and stayed",
        remedy="a peak rate 3 to 10 times lower",
    )


def _waits_for_the_fall(curve: Curve, calm: Flags) -> Signature | None:
    """The loss gained nothing after the first tenth until the rate fell."""
    rate = curve.learning_rate
    smooth = levels(curve.loss, calm, most=20, least_rows=6)
    if rate is None or len(smooth) < 10:
        return None
    tenth, half = len(smooth) // 10, len(smooth) // 2
    rates = rate[np.minimum(smooth.rows[:-1], len(rate) - 1)]
    begins, middle = float(smooth.values[tenth]), float(smooth.values[half])
    ends = float(np.mean(smooth.values[-2:]))
    error = float(np.median(smooth.error))
    is_by_rate = rates[half] > 0.4 * np.max(rate) and rates[-1] < 0.5 * rates[half]
    if not is_by_rate or middle - ends < 4 * error or begins - middle > 0.5 * (middle - ends):
        return None
    return Signature(
        signature="rate_too_high",
        first=int(smooth.rows[tenth]),
        evidence=f"while the rate was above {rates[half]:.3g} the loss stayed at about "
        f"{middle:.4g} ({begins:.4g} before), and only a lower rate brought it to {ends:.4g}",
        remedy="a peak rate 3 to 10 times lower",
        confidence="low",
    )


def _far_too_high(curve: Curve, fall: Fall, peak: float) -> Signature:
    return Signature(
        signature="rate_too_high",
        first=len(curve) - len(curve) // 3,
        evidence=f"the loss only went from {fall.start:.4g} to {fall.end:.4g}, at rates up to "
        f"{peak:.3g}; Adam's rate is rarely above {_HIGH_RATE:g}",
        remedy="if the optimizer is a kind of Adam, a rate 10 times lower; holdfast preflight "
        "has a rate range test",
        confidence="low",
    )


def _plateau(curve: Curve, fall: Fall) -> Signature:
    return Signature(
        signature="plateau",
        first=len(curve) - len(curve) // 3,
        evidence=f"the loss went from {fall.start:.4g} to {fall.end:.4g} and by "
        f"{max(fall.last_third, 0):.2g} in the last third of {len(curve)} rows",
        remedy="holdfast preflight: is one batch memorised, does every parameter get a "
        "gradient, what rate does the range test find; then look at the tokens of a batch",
    )


def floor_early(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """The rate has long been at its minimum, and the loss stopped falling when it got there."""
    rate = curve.learning_rate
    if rate is None or len(curve) < _LEAST_ROWS:
        return
    floor, peak = float(np.min(rate[len(rate) // 10 :])), float(np.max(rate))
    above = np.flatnonzero(rate > floor + _AT_FLOOR * max(floor, 0.01 * peak))
    since = int(above[-1]) + 1 if len(above) else len(rate)
    num_rows = len(rate) - since
    if floor > peak / 3 or num_rows < _FLOOR_ROWS * len(rate) or since < _LEAST_ROWS // 3:
        return
    length = min(num_rows, 3 * since // 4)
    before = _gain(curve, calm, since - length, since)
    after = _gain(curve, calm, since, since + length)
    if before is None or after is None:
        return
    gain_at_floor = _gain(curve, calm, since, len(curve))
    is_stalled = gain_at_floor is not None and gain_at_floor[0] < max(
        _STANDS * abs(curve.loss[since]), 2 * gain_at_floor[1]
    )
    is_slower = before[0] > 3 * before[1] and after[0] < before[0] / 3
    if not is_slower and not (is_stalled and floor < peak / 20):
        return
    yield Signature(
        signature="floor_early",
        first=since,
        evidence=f"the rate is at its floor of {floor:.3g} (peak {peak:.3g}) since step "
        f"{curve.steps[since]}, {100 * num_rows / len(rate):.0f} % of the rows; in the {length} "
        f"rows before, the loss fell by {before[0]:.3g}, in as many rows after, by {after[0]:.3g}",
        remedy="a decay as long as the run (schedule.total), or a higher floor; the schedule "
        "causes such a plateau, not the model",
        confidence="high" if floor < peak / 10 else "medium",
    )


def _gain(curve: Curve, calm: Flags, begin: int, end: int) -> tuple[float, float] | None:
    """How much the loss fell between two rows, and the standard error of that."""
    quarter = (end - begin) // 4
    is_calm = calm[begin:end]
    if quarter < 5:
        return None
    loss = curve.loss[begin:end]
    head, tail = loss[:quarter][is_calm[:quarter]], loss[-quarter:][is_calm[-quarter:]]
    if len(head) < 4 or len(tail) < 4:
        return None
    spread = float(np.median(np.abs(np.diff(loss[is_calm])))) * 1.05
    return float(np.median(head) - np.median(tail)), 1.25 * spread * float(
        np.sqrt(1 / len(head) + 1 / len(tail))
    )


RULES = (slow_progress, floor_early)
