"""Whether the first steps after a resume are those that the run has recorded already.

What was computed after the newest checkpoint is computed again. Where the machine repeats its bits
the lines must be the same; else they must be near. A resume with wrong moments agrees on its first
step, since the weights are right, and differs from the second on.
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
# Where bits do not repeat: other ranks, another device. Nats, and as a share of the norm.
_NEAR_LOSS, _NEAR_NORM = 0.02, 0.1
_MOST_STEPS = 1000
_NUMBERS, _LENGTH = ("loss", "grad_norm", "lr"), 6
# Of the line of a start, what the bits of a step depend on.
_SAME = ("world_size", "hosts", "parallel", "device", "repeats_bits", "settings", "torch")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One step as it was: [step, first sample, one behind the last, loss, gradient norm, rate]."""

    step: int
    start: int
    stop: int
    loss: float
    grad_norm: float
    lr: float


def recorded(lines: Iterable[Mapping[str, Any]], after: int) -> list[list[float]]:
    """The applied steps behind ``after`` as JSON; of each the last line."""
    found: dict[int, list[float]] = {}
    for line in lines:
        step = step_of(dict(line))
        if line.get("action") != "apply" or not after < step <= after + _MOST_STEPS:
            continue
        samples = line.get("samples")
        row = [*samples, *map(line.get, _NUMBERS)] if isinstance(samples, list) else []
        if len(row) == _LENGTH - 1 and all(isinstance(value, int | float) for value in row):
            found[step] = [step, *(float(value) for value in row)]
    return [found[step] for step in sorted(found)]


def repeats_as_before(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Whether two starts, by what their lines in the journal say, compute the same bits."""
    if before is None or not now.get("repeats_bits"):
        return False
    return all(before.get(name) == now.get(name) for name in _SAME)


class ResumeCheck:
    """Compares each applied step with what was recorded; tells the first that differs.

    Args:
        step: that was resumed from.
        rows: see :func:`recorded`, the same on all ranks.
        exactly: bit for bit.
        tell: takes the incident; nothing follows from it.
    """

    def __init__(
        self,
        step: int,
        rows: Sequence[Sequence[float]],
        *,
        exactly: bool,
        tell: Callable[[Incident], None],
    ) -> None:
        self._from = step
        self._rows = {int(r[0]): Recorded(int(r[0]), int(r[1]), int(r[2]), *r[3:6]) for r in rows}
        self._exactly = exactly
        self._tell = tell
        self.num_compared = 0

    def applied(self, line: MetricsLine) -> None:
        """Take one applied step."""
        row = self._rows.pop(line.step, None)
        if row is None:
            return
        if (row.start, row.stop) != tuple(line.samples) or row.lr != line.lr:
            self._rows = {}  # other samples, or another rate: it is not the same step
            return
        self.num_compared += 1
        if self._is_alike(row, line):
            return
        self._rows = {}
        how = "bit for bit" if self._exactly else "nearly"
        first = line.step == self._from + 1
        self._tell(
            Incident(
                kind=KIND,
                step=line.step,
                decision="only told: go back to an older checkpoint if the loss stays apart",
                reason=f"step {line.step}, computed again after the resume at step {self._from}, "
                f"has loss {line.loss:.9g} and grad norm {line.grad_norm:.9g}; recorded are "
                f"{row.loss:.9g} and {row.grad_norm:.9g}, which must be the same {how}: "
                + (
                    "the weights are not those that were saved"
                    if first
                    else f"{self.num_compared - 1} step(s) before it agreed, so the weights were "
                    "right: look at moments, update counts or the schedule"
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
