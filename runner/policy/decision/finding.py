"""The finding about a bad step: cause, reason, refutation, and what was not tried. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from runner.policy.decision.history import GO_BACK, MIX, NUMERICS, RATE, STATE, STICKY


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
