"""Checks that the first steps after a resume equal the recorded ones.

Steps after the newest checkpoint are computed again. If the machine repeats bits the lines must be
equal; otherwise they must be close. A resume with wrong moments agrees on its first step, since the
weights are right, and differs from the second on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.observe.metrics import MetricsLine
from runner.policy.decision.finding import Recorded, from_rows, recorded_in
from runner.policy.decision.history import Incident
from runner.policy.decision.signals import json_float
from runner.policy.restart import HARDWARE
from runner.system.json_lines import iter_lines
from runner.train.run import Run

KIND = "resume"
# Tolerances without repeated bits (other ranks or device): nats, and a share of the norm.
_NEAR_LOSS, _NEAR_NORM = 0.02, 0.1
_MOST_STEPS = 1000
# Fields of a start's journal line on which the bits of a step depend.
_OF_EACH_START = ("incarnation", "lost", "idle_seconds", "start_seconds", "tier")
_SAME = ("world_size", "hosts", "parallel", "device", "repeats_bits", "settings", "torch")


def recomputed(run: Run) -> dict[int, Recorded]:
    """The recorded steps that this start computes again, by step. Collective.

    Only the metrics from before they are cut have them.
    """
    path, resumed = run.group.run_dir.metrics, run.resumed
    first = resumed.step + 1
    rows = run.ranks.of_first(
        "reading the metrics",
        lambda: (
            recorded_in(iter_lines(path, start=resumed.metrics_bytes), first, first + _MOST_STEPS)
            if resumed.step
            else []
        ),
    )
    return from_rows(rows)


def tested_before(run: Run, rows: Mapping[int, Recorded], start: Incident) -> bool | None:
    """Whether bits repeat here, as the start before this one found; None where that says nothing.

    It does where the same supervisor has started the same again on the same machines, and that
    start has trained: what it tested of model, settings and machines is as it was, and the steps
    in ``rows`` are computed again and compared. Collective.

    Args:
        start: the line of this start, which the journal does not have yet.
    """
    since = _since_last_start(run)
    known = None
    if since and run.group.times.is_restart:
        before = since[0]
        is_same = all(
            before.detail.get(name) == value
            for name, value in start.detail.items()
            if name not in _OF_EACH_START
        )
        is_broken = any(line.detail.get("cause") == HARDWARE for line in since)
        if is_same and not is_broken and (rows or run.resumed.step > before.step):
            known = before.detail.get("repeats_bits")
    return known if run.ranks.sum([float(known is None)])[0] == 0 else None


def _since_last_start(run: Run) -> Sequence[Incident]:
    """The line of the start before this one, and those after it; empty where this is the first."""
    incidents = run.history.incidents
    starts = [at for at, line in enumerate(incidents) if line.kind == "start"]
    return incidents[starts[-1] :] if starts else []


def repeats_as_before(previous: Mapping[str, Any] | None, current: Mapping[str, Any]) -> bool:
    """Whether two starts compute the same bits, according to their journal lines."""
    if previous is None or not current.get("repeats_bits"):
        return False
    return all(previous.get(name) == current.get(name) for name in _SAME)


class ResumeCheck:
    """Compares each applied step with the recorded one; reports the first that differs.

    Args:
        rows: see :func:`recomputed`.
        start: the line of this start, which the journal does not have yet.
    """

    def __init__(self, run: Run, rows: Mapping[int, Recorded], start: Incident) -> None:
        since = _since_last_start(run)
        before = since[0].detail if since else None
        is_changed = any(line.kind == "setting_changed" for line in since)  # as allowed
        self._from = run.resumed.step
        self._rows = {} if is_changed else dict(rows)
        # Compared bit for bit.
        self._exactly = repeats_as_before(before, start.detail)
        self._report = run.written.report
        self.num_compared = 0

    def applied(self, line: MetricsLine) -> None:
        """Take one applied step."""
        row = self._rows.pop(line.step, None)
        if row is None:
            return
        if row.samples != tuple(line.samples) or row.learning_rate != line.lr:
            self._rows = {}  # not the same step: other samples or another rate
            return
        self.num_compared += 1
        if self._is_alike(row, line):
            return
        self._rows = {}
        how = "bit for bit" if self._exactly else "nearly"
        first = line.step == self._from + 1
        self._report(
            Incident(
                kind=KIND,
                step=line.step,
                decision="only reported: use an older checkpoint if the loss stays different",
                reason=f"step {line.step}, computed again after the resume at step {self._from}, "
                f"has loss {line.loss:.9g} and grad norm {line.grad_norm:.9g}; the recorded ones "
                f"are {row.loss:.9g} and {row.grad_norm:.9g}, and must be the same {how}: "
                + (
                    "the weights are not those that were saved"
                    if first
                    else f"{self.num_compared - 1} step(s) before it agreed, so the weights were "
                    "right: check moments, update counts and the schedule"
                ),
                samples=row.samples,
                detail={
                    "loss": json_float(line.loss),
                    "recorded_loss": json_float(row.loss),
                    "exactly": self._exactly,
                },
            )
        )

    def _is_alike(self, row: Recorded, line: MetricsLine) -> bool:
        if self._exactly:
            return (row.loss, row.grad_norm) == (line.loss, line.grad_norm)
        return abs(row.loss - line.loss) <= _NEAR_LOSS and abs(
            row.grad_norm - line.grad_norm
        ) <= _NEAR_NORM * max(row.grad_norm, 1e-12)
