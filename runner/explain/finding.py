"""What replays found: the cause, why, what would refute it, and what was not tried. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from runner.policy.decision.history import GO_BACK, MIX, NUMERICS


class Cause(Enum):
    """What a bad step can be put down to; a wrong name is worse than ``unclear``."""

    transient = "hardware, transient"
    misread = "read wrongly once"
    sticky = "hardware, sticky"
    state = "state corrupted"
    numerics = NUMERICS
    data = "data"
    data_mix = MIX
    rate = "rate"
    not_reproducible = "not reproducible"
    unclear = "unclear"


class Remedy(Enum):
    """What the loop is to do.

    Compute the step again; skip samples and compute it again; compute it again in a wider
    precision; end this start of the run, so that the next one leaves a node out; go back and skip
    nothing; or what its ladder says.
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
        refutation: what would have shown that it is wrong; empty for one that names nothing.
        is_tried: whether that was tried, and did not.
        ranks: who is at fault; empty where nobody can be named.
        hosts: of these ranks.
        positions: the culprits' places in the stream.
        module: of the model, that makes the first bad number; empty where none can be named.
        step: the first before which the state was not what its steps had made of it.
        rate_factor: of the learning rate, with which the same steps are good.
        not_tried: what else could have been tried, and why it was not.
        steps: computations of a step that it took.
        numbers: of each probe, as it was told.
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
    layers: Mapping[str, Any] = field(default_factory=dict)  # largest outputs, as probe I has them

    def words(self) -> str:
        """One sentence."""
        return f"{self.cause.value}: {self.why}"

    def to_json(self) -> dict[str, Any]:
        """For the journal: all but the probes' numbers."""
        told = asdict(replace(self, numbers={}, layers={}))
        del told["numbers"], told["layers"]
        return told | {
            "cause": self.cause.value,
            "remedy": self.remedy.value,
            **{name: list(told[name]) for name in ("ranks", "hosts", "positions", "not_tried")},
        }
