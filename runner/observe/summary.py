"""``summary.json``: written at every end, in the same shape."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run stands. ``status`` is done, halted, preempted or failed.

    ``goodput`` is the share of wall time since the first start, down time included, that went
    into steps which count in the result.
    """

    status: str
    exit_code: int
    reason: str
    steps: int
    cursor: int
    final_loss: float | None
    eval_loss: float | None
    state_digest: str | None
    discarded_steps: int
    rollbacks: int
    skipped: tuple[tuple[int, int], ...]
    restarts: int
    samples_used: int
    goodput: float
    world_size: int
    incarnation: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def goodput(lines: list[dict[str, Any]], wall_seconds: float) -> float:
    """Seconds of the steps that count (the last applied line of each) over wall seconds."""
    seconds = {line["step"]: line["seconds"] for line in lines if line["action"] == "apply"}
    return round(min(1.0, float(sum(seconds.values())) / max(wall_seconds, 1e-9)), 4)
