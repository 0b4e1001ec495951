"""Applies all rules to one curve, and decides which finding is shown if two have one cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from runner.tools.reading import held_out, progress, repeats, trouble
from runner.tools.reading.curve import Curve
from runner.tools.reading.signature import SIGNATURES, Signature

LEAST_ROWS = 20  # with fewer rows, only losses that are not finite are reported
# The first hides the second, which is another effect of the same cause.
_HIDES = (
    ("divergence", "rate_too_high"),
    ("divergence", "rate_too_low"),
    ("divergence", "norm_creep"),
    ("divergence", "overfitting"),
    ("divergence", "plateau"),
    ("divergence", "oscillation"),
    ("level_shift", "plateau"),
    ("level_shift", "rate_too_high"),
    ("oscillation", "overfitting"),
    ("data_order", "rate_too_high"),
    ("overfitting", "held_out_stalls"),
    ("overfitting", "epoch_steps"),
    ("rate_too_high", "norm_creep"),
    ("overfitting", "norm_creep"),
    ("floor_early", "plateau"),
    ("epoch_steps", "data_order"),
)


def read(curve: Curve) -> list[Signature]:
    """The findings in a curve, in the order of :data:`SIGNATURES`; empty for a healthy one."""
    if not len(curve):
        return []
    findings = list(trouble.not_finite(curve))
    if int(curve.finite.sum()) >= LEAST_ROWS:
        with np.errstate(all="ignore"):  # an overflow compares as false
            findings += _rules(curve)
    names = {one.signature for one in findings}
    hidden = {second for first, second in _HIDES if first in names}
    order = list(SIGNATURES)
    last = len(curve) - 1
    shown = [
        replace(one, last=last) if one.last < 0 else one
        for one in findings
        if one.signature not in hidden
    ]
    return sorted(shown, key=lambda one: order.index(one.signature))


def _rules(curve: Curve) -> Iterator[Signature]:
    jumps = trouble.jumps(curve)
    calm = trouble.calm_rows(curve, jumps)
    return chain(
        trouble.spikes(curve, jumps),
        trouble.divergence(curve, calm, jumps),
        progress.slow_progress(curve, calm),
        progress.floor_early(curve, calm),
        repeats.norm_creep(curve, calm),
        held_out.overfitting(curve, calm),
        held_out.far_below(curve, calm),
        held_out.stalls(curve, calm),
        held_out.memorised(curve, calm),
        held_out.oscillation(curve, calm),
        repeats.epoch_steps(curve, calm),
        repeats.data_order(curve, calm),
    )
