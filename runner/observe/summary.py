"""``summary.json``: written at every end, in the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run stands. ``status`` is done, halted, preempted or failed.

    ``goodput`` is the share of wall time since the first start, down time included, that went
    into steps which count in the result; ``time`` says where all of it went, in seconds by the
    kinds of :data:`runner.observe.goodput.KINDS`, which add up to the wall time.
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
    time: Mapping[str, float]
    world_size: int
    incarnation: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
