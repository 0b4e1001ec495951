"""Probe D: the culprits and known samples once more, with the weights of the clean checkpoint.

A sample that stands out with these weights as well is bad by itself. One that does not may be the
first to show that the weights are becoming bad: where a few samples have most of the loss, known
ones may still be good.
"""

from __future__ import annotations

from runner.data.cursor import Indices
from runner.explain.case import Case, Evidence, listing
from runner.explain.probe import Bench
from runner.explain.reading import outstanding, usual
from runner.policy.decision.finding import Cause, Finding, Remedy

_STEPS = 2


def doubt_culprits(
    bench: Bench, case: Case, evidence: Evidence, *, indices: Indices, finding: Finding
) -> Finding:
    """The finding, or one that goes back first if no culprit is bad by itself. Collective.

    Args:
        indices: of the known samples.
        finding: of probe E.
    """
    if case.earlier is None or finding.cause is not Cause.data:
        return finding
    if evidence.left(bench) < _STEPS:
        evidence.not_tried.append("D: no computation is left for the weights of the checkpoint")
        return finding
    readings = case.earlier(lambda: (bench.known(indices), bench.compute(evidence.batches)))
    if readings is None:
        evidence.not_tried.append(
            "D: no clean checkpoint can be loaded, or there is no memory for a copy of the state"
        )
        return finding
    known, before = evidence.note("D known", readings[0]), evidence.note("D", readings[1])
    level = usual(known)
    if level is None or outstanding(before, level) & set(finding.positions):
        return finding
    return Finding(
        cause=Cause.unclear,
        remedy=Remedy.go_back,
        why=f"{len(finding.positions)} sample(s) (stream positions {listing(finding.positions)}) "
        "stand out with these weights, but not with those of the clean checkpoint: the weights may "
        "have become bad",
        fallback=finding,
    )
