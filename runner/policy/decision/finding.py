"""The finding about a bad step: cause, reason, refutation, and what was not tried. Pure.

Probe F compares the steps from a clean checkpoint to a bad one with their recorded numbers: a step
is a pure function of state and samples, so after a rollback every step on the same samples repeats
its numbers, up to the first that started from a corrupted state. If all of them repeat, including
the bad one, the weights are the result of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from runner.policy.decision.history import GO_BACK, MIX, NUMERICS, RATE, STATE, STICKY
from runner.policy.decision.signals import StepSignals


class Cause(Enum):
    """The possible causes of a bad step; a wrong cause is worse than ``unclear``."""

    transient = "hardware, transient"
    misread = "read wrongly once"
    sticky = STICKY
    state = STATE
    numerics = NUMERICS
    data = "data"
    data_mix = MIX
    rate = RATE
    not_reproducible = "not reproducible"
    unclear = "unclear"


class Remedy(Enum):
    """What the loop should do.

    ``redo``: compute the step again. ``skip``: the same without some samples. ``widen``: the same
    in a wider precision. ``leave``: end this start of the run; the next one excludes a node.
    ``go_back``: roll back and skip nothing. ``ladder``: what the guard's ladder decides.
    """

    redo = "redo"
    skip = "skip"
    widen = "widen"
    leave = "leave"
    go_back = GO_BACK
    ladder = "ladder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one bad step, the same on all ranks.

    Args:
        why: one sentence.
        refutation: what would show that it is wrong; empty if no cause is named.
        is_tried: whether that was tested, and did not happen.
        ranks: the ranks at fault; empty if none can be named.
        hosts: the hosts of these ranks.
        positions: the culprits' positions in the stream.
        module: the module that computes the first bad number; empty if none can be named.
        step: the first step before which the state was not the result of the steps before it.
        rate_factor: a factor of the learning rate with which the same steps are good.
        not_tried: what else could have been tried, and why it was not.
        steps: how many computations of a step it took.
        numbers: the numbers of each probe.
        fallback: the finding, should the weights turn out not to be at fault.
    """

    cause: Cause
    remedy: Remedy
    why: str
    refutation: str = ""
    is_tried: bool = False
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()
    module: str = ""
    step: int | None = None
    rate_factor: float | None = None
    not_tried: tuple[str, ...] = ()
    steps: int = 0
    bundle: int | None = None  # number of the evidence on disk
    numbers: Mapping[str, Any] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)  # the largest outputs, from probe I
    fallback: Finding | None = None

    def describe(self) -> str:
        """Cause and reason in one sentence."""
        return f"{self.cause.value}: {self.why}"

    def to_json(self) -> dict[str, Any]:
        """The finding for the journal, without the probes' numbers."""
        fields = asdict(replace(self, numbers={}, layers={}, fallback=None))
        del fields["numbers"], fields["layers"], fields["fallback"]
        return fields | {
            "cause": self.cause.value,
            "remedy": self.remedy.value,
            **{name: list(fields[name]) for name in ("ranks", "hosts", "positions", "not_tried")},
        }


# Relative tolerance if the machine does not repeat bits: rounding errors grow with each step.
_NOISY = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The recorded numbers of a step; its samples are a half-open range of the stream."""

    step: int
    samples: tuple[int, int]
    loss: float
    grad_norm: float
    learning_rate: float

    @classmethod
    def of(cls, signals: StepSignals, learning_rate: float) -> Recorded:
        return cls(
            step=signals.step,
            samples=(signals.start, signals.stop),
            loss=signals.loss,
            grad_norm=signals.grad_norm,
            learning_rate=learning_rate,
        )

    def apart(self, other: Recorded) -> float:
        """The largest relative difference of loss and norm."""
        pairs = ((self.loss, other.loss), (self.grad_norm, other.grad_norm))
        return max(relative_difference(a, b) for a, b in pairs)


class Outcome(Enum):
    """The result of the comparison."""

    differs = "differs"
    repeated = "repeated"
    lost = "lost"


@dataclass(frozen=True, slots=True)
class StepComparison:
    """The steps that a rollback undid.

    Args:
        recorded: their numbers by step; the bad one is the last.
        bad: number of the bad step.
        is_exact: whether the machine repeats bits.
    """

    recorded: Mapping[int, Recorded]
    bad: int
    is_exact: bool

    def compare(self, now: Recorded, *, gated: bool) -> Outcome | None:
        """Compare one more step; None while undecided.

        Args:
            gated: whether the step was not applied.
        """
        before = self.recorded.get(now.step)
        if before is None or now.step > self.bad:
            return Outcome.lost
        if gated and now.step < self.bad:
            return None  # separate trouble; the step is repeated
        if not self._is_same(before, now):
            return Outcome.lost
        if self.differs(now):
            return Outcome.lost if gated else Outcome.differs
        return Outcome.repeated if now.step == self.bad else None

    def differs(self, now: Recorded) -> bool:
        """Whether the same step has other numbers than recorded."""
        before = self.recorded.get(now.step)
        limit = 0.0 if self.is_exact else _NOISY
        return before is not None and self._is_same(before, now) and now.apart(before) > limit

    def _is_same(self, before: Recorded, now: Recorded) -> bool:
        return now.samples == before.samples and now.learning_rate == before.learning_rate


def recorded_in(lines: Iterable[Mapping[str, Any]], first: int, stop: int) -> list[list[Any]]:
    """The last applied lines of steps ``[first, stop)`` in a metrics file, as JSON rows."""
    by_step: dict[int, list[Any]] = {}
    for line in lines:
        step = line.get("step")
        if line.get("action") != "apply" or not isinstance(step, int) or not first <= step < stop:
            continue
        samples = line.get("samples")
        numbers = [line.get(name) for name in ("loss", "grad_norm", "lr")]
        are_numbers = all(isinstance(number, float | int) for number in numbers)
        if isinstance(samples, list) and len(samples) == 2 and are_numbers:
            by_step[step] = [step, *samples, *numbers]
    return [by_step[step] for step in sorted(by_step)]


def from_rows(rows: Iterable[list[Any]]) -> dict[int, Recorded]:
    """The inverse of :func:`recorded_in`."""
    return {
        row[0]: Recorded(
            step=row[0],
            samples=(row[1], row[2]),
            loss=float(row[3]),
            grad_norm=float(row[4]),
            learning_rate=float(row[5]),
        )
        for row in rows
    }


def relative_difference(one: float, other: float) -> float:
    """The relative difference; 0 if both are not finite, infinity if one is."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if math.isfinite(one) is math.isfinite(other) else math.inf
    most = max(abs(one), abs(other))
    return abs(one - other) / most if most else 0.0
