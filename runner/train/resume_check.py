"""Checks that the first steps after a resume equal the recorded ones.

Steps after the newest checkpoint are computed again. If the machine repeats bits the lines must be
equal; otherwise they must be close. A resume with wrong moments agrees on its first step, since the
weights are right, and differs from the second on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.observe.metrics import MetricsLine
from runner.policy.decision.history import Incident
from runner.system.json_lines import step_of

KIND = "resume"
# Tolerances without repeated bits (other ranks or device): nats, and a share of the norm.
_NEAR_LOSS, _NEAR_NORM = 0.02, 0.1
_MOST_STEPS = 1000
_NUMBERS, _LENGTH = ("loss", "grad_norm", "lr"), 6
# Fields of a start's journal line on which the bits of a step depend.
_SAME = ("world_size", "hosts", "parallel", "device", "repeats_bits", "settings", "torch")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step: [step, first sample, one past the last, loss, gradient norm, rate]."""

    step: int
    start: int
    stop: int
    loss: float
    grad_norm: float
    lr: float


def recorded(lines: Iterable[Mapping[str, Any]], after: int) -> list[list[float]]:
    """The applied steps after ``after`` as JSON, from the last line of each."""
    by_step: dict[int, list[float]] = {}
    for line in lines:
        step = step_of(dict(line))
        if line.get("action") != "apply" or not after < step <= after + _MOST_STEPS:
            continue
        samples = line.get("samples")
        row = [*samples, *map(line.get, _NUMBERS)] if isinstance(samples, list) else []
        if len(row) == _LENGTH - 1 and all(isinstance(value, int | float) for value in row):
            by_step[step] = [step, *(float(value) for value in row)]
    return [by_step[step] for step in sorted(by_step)]


def repeats_as_before(previous: Mapping[str, Any] | None, current: Mapping[str, Any]) -> bool:
    """Whether two starts compute the same bits, according to their journal lines."""
    if previous is None or not current.get("repeats_bits"):
        return False
    return all(previous.get(name) == current.get(name) for name in _SAME)


class ResumeCheck:
    """Compares each applied step with the recorded one; reports the first that differs.

    Args:
        step: the step at which the run resumed.
        rows: see :func:`recorded`, the same on all ranks.
        exactly: compare bit for bit.
        report: receives the incident, which is only information.
    """

    def __init__(
        self,
        step: int,
        rows: Sequence[Sequence[float]],
        *,
        exactly: bool,
        report: Callable[[Incident], None],
    ) -> None:
        self._from = step
        self._rows = {int(r[0]): Recorded(int(r[0]), int(r[1]), int(r[2]), *r[3:6]) for r in rows}
        self._exactly = exactly
        self._report = report
        self.num_compared = 0

    def applied(self, line: MetricsLine) -> None:
        """Take one applied step."""
        row = self._rows.pop(line.step, None)
        if row is None:
            return
        if (row.start, row.stop) != tuple(line.samples) or row.lr != line.lr:
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
                samples=(row.start, row.stop),
                detail={
                    "loss": _word(line.loss),
                    "recorded_loss": _word(row.loss),
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


def _word(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)
