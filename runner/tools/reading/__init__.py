"""What a training curve shows: named signatures, with the rows and the evidence for each.

Owns the rules and their sentences. Pure functions of arrays: knows numpy, but no file, run or
torch. Callers that read files or runs pass columns, see :meth:`Curve.of`. :func:`read` applies all
rules to one curve, and decides which finding is shown if two have one cause.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from runner.tools.reading import held_out, progress, repeats, trouble
from runner.tools.reading.curve import SIGNATURES, Curve, Signature

LEAST_ROWS = 20  # with fewer rows, only losses that are not finite are reported
# Each hides others, which are other effects of the same cause.
_HIDES = {
    "divergence": "rate_too_high rate_too_low norm_creep overfitting plateau oscillation",
    "level_shift": "plateau rate_too_high",
    "oscillation": "overfitting",
    "data_order": "rate_too_high",
    "overfitting": "held_out_stalls epoch_steps norm_creep",
    "forgetting": "overfitting held_out_stalls",
    "rate_too_high": "norm_creep",
    "floor_early": "plateau",
    "epoch_steps": "data_order",
}


def read(curve: Curve) -> list[Signature]:
    """The findings in a curve, in the order of :data:`SIGNATURES`; empty for a healthy one."""
    if not len(curve):
        return []
    findings = list(trouble.not_finite(curve))
    if int(curve.finite.sum()) >= LEAST_ROWS:
        with np.errstate(all="ignore"):  # an overflow compares as false
            findings += _rules(curve)
    hidden = {name for finding in findings for name in _HIDES.get(finding.signature, "").split()}
    order = list(SIGNATURES)
    shown = [finding for finding in findings if finding.signature not in hidden]
    return sorted(shown, key=lambda finding: order.index(finding.signature))


def _rules(curve: Curve) -> Iterator[Signature]:
    jumps = trouble.jumps(curve)
    calm = trouble.calm_rows(curve, jumps)
    yield from trouble.spikes(curve, jumps)
    yield from trouble.divergence(curve, calm, jumps)
    for rule in (*progress.RULES, *held_out.RULES, *repeats.RULES):
        yield from rule(curve, calm)
