"""Rules that compare the held-out loss with the training loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runner.tools.reading.curve import (
    EPOCH,
    HELD_OUT,
    Confidence,
    Curve,
    Flags,
    Floats,
    Signature,
    median_of,
    noise,
    smoothed,
)

_LEAST, _MANY = 5, 7  # evaluations: for any finding, for one of high confidence
_ROWS = 20  # of training before an evaluation, for its level
_WORSE = 0.03  # of the lowest held-out loss
_ERRORS = 2.5  # standard errors of that rise; the lowest of many is low partly by chance
_TRAINING_FELL = 0.25  # of the rise of the held-out loss
_FAR_BELOW = 0.6  # of the training loss
_SWINGS = 0.03
_AT_RATE = 0.3  # of the peak; below, the rate cannot cause the swings
_KNOWN = 0.05  # of the loss at the start
_EPOCHS = 5


def _training_levels(curve: Curve, calm: Flags) -> Floats:
    """Float64 [m]: the training loss just before each evaluation; NaN without calm rows."""
    medians = np.full(len(curve.held_out), np.nan)
    last_row = -1
    for index, row in enumerate(curve.held_out_rows.tolist()):
        first = max(last_row + 1, row + 1 - _ROWS)
        calm_losses = curve.loss[first : row + 1][calm[first : row + 1]]
        if len(calm_losses):
            medians[index] = np.median(calm_losses)
        last_row = row
    return medians


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rise:
    """A held-out loss that rose: evaluation ``best`` had the ``lowest``, and ``end`` is its level
    at the end."""

    best: int
    lowest: float
    end: float
    confidence: Confidence


def _rise(losses: Floats) -> _Rise | None:
    """How losses [m] rose from their lowest; None if they did not."""
    if len(losses) < _LEAST or not np.isfinite(losses).all():
        return None
    smooth = smoothed(losses)
    best = int(np.argmin(smooth[:-1]))
    num_last = min(3, len(smooth) - 1 - best)
    lowest, end = float(smooth[best]), float(np.median(smooth[-num_last:]))
    error = noise(losses) * np.sqrt(1.0 / num_last + 1.0 / 3.0)
    if end - lowest <= max(_WORSE * abs(lowest), _ERRORS * float(error)):
        return None
    is_sure = len(losses) >= _MANY and end - lowest > 2 * _WORSE * abs(lowest)
    return _Rise(best=best, lowest=lowest, end=end, confidence="high" if is_sure else "medium")


def overfitting(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """The held-out loss has a minimum and then rises, while the training loss keeps falling."""
    rise = _rise(curve.held_out)
    if rise is None:
        return
    training = _training_levels(curve, calm)
    fell = _fell(curve, calm, training, rise.best)
    rose = rise.end - rise.lowest
    if not (fell > _TRAINING_FELL * rose or fell > 0.2 * abs(training[rise.best])):
        return
    first = int(curve.held_out_rows[rise.best])
    yield Signature(
        signature="overfitting",
        first=first,
        last=int(curve.held_out_rows[-1]),
        evidence=f"the held-out loss was lowest at step {curve.steps[first]} with "
        f"{rise.lowest:.4g} and is {rise.end:.4g} at the end, while the training loss fell by "
        f"{fell:.3g}",
        remedy="take the checkpoint of that step; fewer epochs, more data, dropout or weight "
        "decay, a lower rate",
        confidence=rise.confidence,
    )


def _gain(losses: Floats, since: int) -> float:
    """How much losses [m] fell since an evaluation; 0 where it is little."""
    then = float(np.median(losses[max(0, since - 1) : since + 2]))
    fell = then - float(np.median(losses[-3:]))
    is_clear = fell > max(_WORSE * abs(then), _ERRORS * noise(losses) * np.sqrt(2.0 / 3.0))
    return fell if is_clear else 0.0


def forgetting(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """The loss of one held-out set has a minimum and then rises, while another's falls."""
    sets = {
        name.partition("/")[2]: values[curve.held_out_rows]
        for name, values in curve.columns.items()
        if name.startswith(f"{HELD_OUT}/")
    }
    for name, losses in sets.items():
        rise = _rise(losses)
        if rise is None:
            continue
        gains = {other: _gain(values, rise.best) for other, values in sets.items()}
        gained = max(gains, key=lambda other: gains[other])
        if gains[gained] <= 0:
            continue
        first = int(curve.held_out_rows[rise.best])
        yield Signature(
            signature="forgetting",
            first=first,
            last=int(curve.held_out_rows[-1]),
            evidence=f"the loss of the held-out set {name} was lowest at step "
            f"{curve.steps[first]} with {rise.lowest:.4g} and is {rise.end:.4g} at the end, while "
            f"that of {gained} fell by {gains[gained]:.3g}",
            remedy=f"mix data like {name} into the training again, a few per cent; a lower rate or "
            "fewer steps; adapters (model.lora)",
            confidence=rise.confidence,
        )


def _fell(curve: Curve, calm: Flags, training: Floats, best: int) -> float:
    """How much the training loss fell since the best evaluation."""
    at_end = training[-1]
    if not np.isfinite(at_end):
        tail = curve.loss[calm][-_ROWS:]
        at_end = float(np.median(tail)) if len(tail) else np.nan
    fell = training[best] - at_end
    return float(fell) if np.isfinite(fell) else 0.0


def far_below(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """The held-out loss is a fraction of the training loss from the first evaluation on."""
    if len(curve.held_out) < 3:
        return
    training = _training_levels(curve, calm)
    usable = np.isfinite(training) & (training > 0) & (curve.held_out > 0)
    ratio = curve.held_out[usable] / training[usable]
    if len(ratio) < 3 or np.median(ratio) >= _FAR_BELOW or np.max(ratio) >= 0.75:
        return
    factor = 1.0 / float(np.median(ratio))
    is_steady = float(np.std(ratio) / np.mean(ratio)) < 0.1 and abs(factor - round(factor)) < 0.15
    hint = f"; the ratio is steady at 1 : {factor:.2g}, as for a sum" if is_steady else ""
    yield Signature(
        signature="held_out_below_training",
        first=int(curve.held_out_rows[0]),
        last=int(curve.held_out_rows[-1]),
        evidence=f"the held-out loss is {float(np.median(ratio)):.2g} of the training loss from "
        f"the first evaluation on{hint}",
        remedy="compare units first (a training loss summed over accumulated micro-batches is a "
        "multiple); then dropout and augmentation, which only training has; then whether "
        "held-out text is also trained on (holdfast preflight)",
        confidence="high" if len(ratio) >= _MANY else "medium",
    )


def stalls(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """The held-out loss stalls in the last half while the training loss keeps falling far below."""
    losses = curve.held_out
    if len(losses) < 2 * _LEAST:
        return
    training = _training_levels(curve, calm)
    half = len(losses) // 2
    quarter = max(2, half // 2)
    then, now = losses[half : half + quarter], losses[-quarter:]
    gain = float(np.median(then) - np.median(now))
    fell = median_of(training[half : half + quarter]) - median_of(training[-quarter:])
    gap = float(np.median(now)) - median_of(training[-quarter:])
    level = abs(float(np.median(now)))
    rises = -gain > _WORSE * level
    if not (fell > 0.1 * level and gap > 0.2 * level and gain < 0.1 * fell and not rises):
        return
    yield Signature(
        signature="held_out_stalls",
        first=int(curve.held_out_rows[half]),
        last=int(curve.held_out_rows[-1]),
        evidence=f"in the last half of the evaluations the held-out loss gained {gain:.2g} and "
        f"is at {float(np.median(now)):.4g}, while the training loss fell by {fell:.3g}",
        remedy="the run has learned what this data can teach about the held-out set: stop, or "
        "add other data; look for held-out text that training repeats (holdfast preflight)",
    )


def memorised(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """Many epochs, almost no training loss left, and nothing held out."""
    epoch = curve.column(EPOCH)
    if epoch is None or len(curve.held_out) or int(calm.sum()) < 20 or epoch[-1] <= _EPOCHS:
        return
    loss = curve.loss[calm]
    start = float(np.median(loss[: max(3, len(loss) // 100)]))
    end = float(np.median(loss[-max(5, len(loss) // 20) :]))
    if not 0 <= end < _KNOWN * start:
        return
    yield Signature(
        signature="memorised",
        first=int(np.argmax(epoch > _EPOCHS)),
        evidence=f"after {epoch[-1]:.3g} epochs the training loss is {end:.3g}, "
        f"{100 * end / start:.2g} % of its start, and no held-out loss shows what was learned",
        remedy="hold something out (data.held_out) and look at it; fewer epochs or more data",
        confidence="high",
    )


def oscillation(curve: Curve, calm: Flags) -> Iterator[Signature]:
    """The held-out loss goes up and down without improving, at a high rate."""
    losses, rows = curve.held_out, curve.held_out_rows
    rate = curve.learning_rate
    if rate is not None:
        is_high = rate[rows] > _AT_RATE * np.max(rate)
        losses, rows = losses[is_high], rows[is_high]
    losses, rows = losses[len(losses) // 4 :], rows[len(rows) // 4 :]
    if len(losses) < _MANY:
        return
    changes = np.diff(losses)
    turns = int(np.sum(np.sign(changes[1:]) != np.sign(changes[:-1])))
    size = float(np.median(np.abs(changes)))
    level = float(np.median(losses))
    half = len(losses) // 2
    trend = abs(float(np.median(losses[:half]) - np.median(losses[half:])))
    if size < _SWINGS * abs(level) or turns < 0.45 * (len(changes) - 1) or trend > 1.5 * size:
        return
    yield Signature(
        signature="oscillation",
        first=int(rows[0]),
        last=int(rows[-1]),
        evidence=f"the held-out loss swings by {100 * size / abs(level):.2g} % from one evaluation "
        f"to the next about {level:.4g}, in {len(losses)} evaluations, and does not improve",
        remedy="a lower rate or a larger batch (more accumulation); beta2 below 0.9 also causes it",
        confidence="high" if len(losses) >= 2 * _MANY else "medium",
    )


RULES = (overfitting, forgetting, far_below, stalls, memorised, oscillation)
