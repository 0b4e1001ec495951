"""Halves ``batch.micro_size`` after a device ran out of memory.

Not within the step: a rank that runs out of memory leaves the others in a collective that it does
not enter, and NCCL would wait for ever. The ranks crash as after any error, and the next
start uses smaller micro-batches. The global batch stays, so the result agrees to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.health.root_cause import MEMORY
from runner.policy.decision.history import Incident

_KIND = "micro_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroSize:
    """Sequences per micro-batch in this start; ``incident`` where the last start had more."""

    size: int
    incident: Incident | None = None


def settle_micro_size(wanted: int, lines: Sequence[Mapping[str, Any]]) -> MicroSize:
    """Decide from the journal's lines, including crashes that this start has found. Pure.

    Args:
        wanted: ``batch.micro_size`` as configured; a changed value resets the halving.
    """
    crashes = [line for line in lines if _is_for_memory(line)]
    settled = [line["detail"] for line in lines if line.get("kind") == _KIND]
    last = settled[-1] if settled and settled[-1].get("wanted") == wanted else None
    if last is not None:
        size, seen = int(last["size"]), int(last["crashes"])
    else:
        size, seen = wanted, int(settled[-1]["crashes"]) if settled else 0
    if len(crashes) <= seen or size == 1:
        return MicroSize(size=size)
    half = -(-size // 2)
    return MicroSize(
        size=half,
        incident=Incident(
            kind=_KIND,
            step=int(crashes[-1].get("step", 0)),
            decision=f"batch.micro_size {size} -> {half}, the global batch stays",
            reason=str(crashes[-1].get("reason", "")),
            ranks=tuple(int(rank) for rank in crashes[-1].get("ranks", ())),
            detail={"wanted": wanted, "size": half, "crashes": len(crashes)},
        ),
    )


def _is_for_memory(line: Mapping[str, Any]) -> bool:
    if line.get("kind") != "crash":
        return False
    detail = line.get("detail")
    return isinstance(detail, Mapping) and detail.get("cause") == MEMORY
