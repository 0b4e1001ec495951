"""Compares a resume on another number of ranks: the samples of each step, and the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from runner.prove.compare import is_near
from runner.prove.judge import Finding, Judgement, loss_difference, mean_loss
from runner.prove.record import Step, Trajectory

_LOSS = 0.01  # relative; sums over other ranks are rounded otherwise, BF16 in its third digit


def compare_ranks(reference: Trajectory, resumed: Trajectory, saved: int) -> Judgement:
    """
    Args:
        resumed: numbered from 1; its first step follows the newest checkpoint.
        saved: the step after which that was written.
    """
    moved = resumed.moved(saved)
    findings: list[Finding] = []
    last = min(moved.last, reference.last)
    for step in range(saved + 1, last + 1):
        sentence, kind = "", "data_other"
        expected, got = samples(reference.steps[step]), samples(moved.steps[step])
        if got != expected:
            lost, more = (expected - got).total(), (got - expected).total()
            sentence = (
                f"On {resumed.world_size} ranks step {step} reads other samples than on "
                f"{reference.world_size}: {lost} of {expected.total()} are missing, {more} are new."
            )
        else:
            one, two = mean_loss(reference.steps[step]), mean_loss(moved.steps[step])
            if one is not None and two is not None and not is_near(one, two, _LOSS):
                kind = "gradients"
                sentence = f"The loss of step {step} is {two:.6g}, was {one:.6g}, on equal samples."
        if sentence:
            findings.append(Finding(kind=kind, step=step, rank=0, names=(), sentence=sentence))
            break
    since = findings[0].step if findings else saved + 1
    return Judgement(
        start=saved + 1,
        last=last,
        findings=tuple(findings),
        loss_difference=loss_difference(reference, moved, since),
    )


def samples(ranks: Mapping[int, Step]) -> Counter[str]:
    """How often each sample is in the batches of all ranks."""
    return Counter(row for step in ranks.values() for batch in step.batches for row in batch)
