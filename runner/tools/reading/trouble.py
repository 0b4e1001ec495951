"""Sudden changes: losses that are not finite, spikes, shifts of the level; and divergence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from runner.system.units import counted
from runner.tools.reading.curve import Curve, Flags, Floats, Signature, levels, median_of, noise

_WINDOW = 64  # rows before; their median is the level
_LEAST = 8  # of them that are needed to call anything a jump
_SIGMAS, _SINGLE_ROW_SIGMAS = 6.0, 16.0  # for several rows, for a single row
_JUMP = 0.15  # of the level
_SPAN = 0.03  # of the range of the loss
_RECOVERED = 5  # rows whose median must be back
_RECOVERED_SHARE = 0.5  # of the jump
_MOST = 2000  # jumps that are examined one by one
_CHUNK = 1 << 14
_FREQUENT = 1e-3  # share of the rows, similar to OLMo 2's spike score
_RISE = 0.3  # nats
_SHIFT = 0.5  # of what was learned: other data does not cause more


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A jump; ``end`` is the first recovered row or the number of rows, ``level`` that before."""

    begin: int
    end: int
    is_back: bool
    level: float
    peak: float


def unit(loss: Floats) -> float:
    """The scale of thresholds in nats: 1 for a loss that starts at 3 or more, else less."""
    start = median_of(loss[: max(5, len(loss) // 100)])
    return float(np.clip(abs(start) / 3.0, 1e-9, 1.0)) if np.isfinite(start) else 1.0


def jumps(curve: Curve) -> list[Jump]:
    """Find rows where the loss rises above the level of the rows before.

    Rows count as a jump if they exceed the median of the 64 rows before by 15 % and by 6 standard
    deviations of the noise; a single row by 16, because losses of batches have heavy tails. The
    level is that at the onset, so bad rows cannot become the level that they are compared with.
    """
    rows = np.flatnonzero(curve.finite)
    loss = curve.loss[rows]
    if len(loss) < 2 * _LEAST:
        return []
    level, spread = _levels_before(loss)
    least = np.maximum(
        _JUMP * np.abs(level), _SPAN * float(np.subtract(*np.quantile(loss, [0.99, 0.01])))
    )
    limit = level + np.maximum(least, _SIGMAS * spread)
    single_row_limit = level + np.maximum(least, _SINGLE_ROW_SIGMAS * spread)
    candidates = np.flatnonzero(loss > limit)
    found_jumps: list[Jump] = []
    end = 0
    for begin in candidates:
        if begin < end or len(found_jumps) >= _MOST:
            continue
        before, window = level[begin], loss[begin : begin + _RECOVERED]
        if window[0] <= single_row_limit[begin] and int((window > limit[begin]).sum()) < 2:
            continue
        height = float(np.max(window)) - before
        recovered_below = before + min(_RECOVERED_SHARE * height, limit[begin] - before)
        end = _recovery(loss, int(begin), recovered_below)
        found_jumps.append(
            Jump(
                begin=int(rows[begin]),
                end=int(rows[end]) if end < len(loss) else len(curve),
                is_back=end < len(loss),
                level=float(before),
                peak=float(np.max(loss[begin:end])),
            )
        )
    return found_jumps


def _levels_before(loss: Floats) -> tuple[Floats, Floats]:
    """Float64 [n] each: level and noise before each row; NaN for the first rows."""
    stride = 1 + len(loss) // 50_000
    ends = np.arange(0, len(loss), stride)
    padded = np.concatenate([np.full(_WINDOW, np.nan), loss])
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)
    level, spread = np.empty(len(ends)), np.empty(len(ends))
    with np.errstate(all="ignore"):
        for begin in range(0, len(ends), _CHUNK):
            part = windows[ends[begin : begin + _CHUNK]]
            num_missing = np.isnan(part).sum(axis=1)
            ordered = np.sort(part, axis=1)  # NaN last
            middle = (_WINDOW - num_missing - 1) // 2
            level[begin : begin + len(part)] = np.take_along_axis(
                ordered, np.maximum(middle, 0)[:, None], axis=1
            )[:, 0]
            steps = np.sort(np.abs(np.diff(part, axis=1)), axis=1)
            count = _WINDOW - 1 - np.isnan(steps).sum(axis=1)
            spread[begin : begin + len(part)] = (
                1.4826
                / np.sqrt(2)
                * np.take_along_axis(steps, np.maximum((count - 1) // 2, 0)[:, None], axis=1)[:, 0]
            )
    level[ends < _LEAST] = np.nan
    spread[ends < _LEAST] = np.nan
    of_row = np.arange(len(loss)) // stride
    return level[of_row], spread[of_row]


def _recovery(loss: Floats, begin: int, below: float) -> int:
    """The first row from which the next rows' median is below; the number of rows if none."""
    row = begin
    while row < len(loss):
        recovered = np.flatnonzero(loss[row : row + _CHUNK] <= below)
        if not len(recovered):
            row += _CHUNK
            continue
        row += int(recovered[0])
        if np.median(loss[row : row + _RECOVERED]) <= below:
            return row
        row += 1
    return len(loss)


def calm_rows(curve: Curve, jumps: list[Jump]) -> Flags:
    """Bool [n]: finite rows outside of jumps that recovered, for the trends."""
    calm = curve.finite.copy()
    for jump in jumps:
        if jump.is_back and jump.end - jump.begin <= max(20, len(curve) // 10):
            calm[jump.begin : jump.end] = False
    return calm


def not_finite(curve: Curve) -> Iterator[Signature]:
    """Losses that are NaN or infinite."""
    bad = np.flatnonzero(~curve.finite)
    if not len(bad):
        return
    first = int(bad[0])
    continues = bool(curve.finite[bad[-1] + 1 :].any())
    is_to_the_end = bool((~curve.finite[first:]).all()) and len(bad) > 1
    extent = "every row since" if is_to_the_end else counted(len(bad), "row")
    ends = "the run continues after it" if continues else "the run ends there"
    yield Signature(
        signature="not_finite",
        first=first,
        last=int(bad[-1]),
        evidence=f"the loss is first not finite at step {curve.steps[first]}: {extent}, and {ends}",
        remedy="discard such steps (guard), then find the cause: the batch of that "
        "step, the step in FP32, a lower rate; go back to a checkpoint from before the step "
        "if the weights may be affected",
        confidence="high",
    )


def spikes(curve: Curve, jumps: list[Jump]) -> Iterator[Signature]:
    """All jumps that recovered, in one finding."""
    limit = max(20, len(curve) // 10)
    recovered = [jump for jump in jumps if jump.is_back and jump.end - jump.begin <= limit]
    if not recovered:
        return
    worst = max(recovered, key=lambda jump: jump.peak - jump.level)
    share = len(recovered) / len(curve)
    is_frequent = share > _FREQUENT and len(recovered) >= 5
    more = f"; {len(recovered)} such in {len(curve)} rows" if len(recovered) > 1 else ""
    yield Signature(
        signature="spike",
        first=worst.begin,
        last=worst.end - 1,
        evidence=f"at step {curve.steps[worst.begin]} the loss went from {worst.level:.4g} to "
        f"{worst.peak:.4g} and was back after {counted(worst.end - worst.begin, 'row')}{more}",
        remedy="frequent spikes: a peak rate lower by 20 %, a longer warm-up, beta2 of 0.95, "
        "clipping at 1" if is_frequent else "look at the samples of that step; discard the update "
        "(guard); clip the gradient norm at 1",
        confidence="high" if worst.peak - worst.level > 2 * _JUMP * abs(worst.level) else "medium",
    )  # fmt: skip


def clipping(curve: Curve, clip: float) -> str:
    """What clipping the gradient norm at ``clip`` does in this curve; empty without norms."""
    norms = curve.grad_norm[np.isfinite(curve.grad_norm)]
    if not len(norms) or clip <= 0:
        return ""
    share = float((norms > clip).mean())
    usual = float(np.median(norms))
    if not share:
        said = f"never engages: the largest norm is {norms.max():.3g}, the median {usual:.3g}"
    elif share == 1:
        said = f"always engages: each update is scaled down, to 1/{usual / clip:.3g} at the median"
    else:
        said = f"engages in {share:.3%} of the rows; the median norm is {usual:.3g}"
    begins = [jump.begin for jump in jumps(curve) if jump.is_back]
    # The update behind a jump is that of the row before it.
    unclipped = [
        row for row in begins if not curve.grad_norm[max(row - 1, 0) : row + 1].max() > clip
    ]
    if begins:
        said += f"; {len(unclipped)} of {len(begins)} spikes came with norms that it does not touch"
    if unclipped or share == 1:
        said += f"; try a clip of {2 * usual:.2g}, twice the median norm"
    return f"clipping at {clip:g} {said}"


def divergence(curve: Curve, calm: Flags, all_jumps: list[Jump]) -> Iterator[Signature]:
    """The last tenth of the run is well above the best level before it."""
    loss, size = curve.loss, unit(curve.loss)
    smooth = levels(loss, calm)
    if len(smooth) < 5 or int(calm.sum()) < 40:
        return
    tenth = max(1, len(smooth) // 10)
    earlier = smooth.values[:-tenth]
    best = int(np.argmin(earlier))
    rows = np.flatnonzero(calm)
    tail = loss[rows[-max(8, len(rows) // 10) :]]
    last, lowest = float(np.median(tail)), float(earlier[best])
    drop = max(float(smooth.values[0]) - lowest, 0.0)
    error = float(np.hypot(1.2533 * noise(tail) / np.sqrt(len(tail)), smooth.error[best]))
    excess = last - lowest
    needed = max(_RISE * size, 0.1 * abs(lowest), 0.15 * drop, 6 * error)
    open_jump = next((jump for jump in all_jumps if not jump.is_back), None)
    if excess <= needed:
        yield from _breakdown_at_the_end(curve, open_jump, drop, needed)
        return
    if open_jump is not None and _is_shift(curve, open_jump, drop):
        yield _level_shift(curve, open_jump)
        return
    first = int(smooth.rows[best + 1]) - 1
    yield Signature(
        signature="divergence",
        first=first if open_jump is None else open_jump.begin,
        evidence=f"the last tenth is at {last:.4g}, {excess:.3g} above the best level of "
        f"{lowest:.4g} at step {curve.steps[first]}",
        remedy="go back to a checkpoint from before the rise with a rate 3 to 10 times lower, or "
        "a longer warm-up; check that clipping is on; then look for numerics (attention logits, "
        "qk_norm, z_loss)",
        confidence="high" if excess > 2 * needed else "medium",
    )


def _breakdown_at_the_end(
    curve: Curve, jump: Jump | None, drop: float, needed: float
) -> Iterator[Signature]:
    """A jump in the last tenth that has not recovered yet."""
    if jump is None:
        return
    after = curve.loss[jump.begin :]
    level = median_of(after)
    if np.isfinite(after).sum() < _RECOVERED or level - jump.level < max(needed, 0.05 * drop):
        return
    yield Signature(
        signature="divergence",
        first=jump.begin,
        evidence=f"at step {curve.steps[jump.begin]} the loss went from {jump.level:.4g} to "
        f"{level:.4g} and has not recovered in the {len(after)} rows to the end",
        remedy="go back to a checkpoint from before that step; if it happens again, a lower rate",
    )


def _is_shift(curve: Curve, jump: Jump, drop: float) -> bool:
    """Whether the loss steps up once and then continues as smoothly as before."""
    before = curve.loss[max(0, jump.begin - 500) : jump.begin]
    after = curve.loss[jump.begin :]
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    if len(after) < max(20, len(curve) // 20) or len(before) < _LEAST:
        return False
    third = len(after) // 3
    begins, ends = float(np.median(after[:third])), float(np.median(after[-third:]))
    error = 3 * noise(after) / np.sqrt(third)
    return (
        begins - jump.level < _SHIFT * drop
        and ends <= begins + error
        and noise(after) < 3 * noise(before)
    )


def _level_shift(curve: Curve, jump: Jump) -> Signature:
    level = median_of(curve.loss[jump.begin :])
    return Signature(
        signature="level_shift",
        first=jump.begin,
        evidence=f"at step {curve.steps[jump.begin]} the loss went from {jump.level:.4g} to about "
        f"{level:.4g} in one step and continues smoothly from there",
        remedy="check whether data, mixture or the unit of the loss changed at that step, or "
        "a resume lost the optimizer's state",
    )
