"""Finds the checkpoint with the best held-out loss, which is saved and not retired."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from runner.policy.retention.records import Record, State, on_disk
from runner.system.json_lines import step_of


class BestCheckpoint:
    """The held-out losses of the run so far, by update.

    Args:
        losses: losses before this start; see :func:`held_out_losses`. The same on all ranks.
    """

    def __init__(self, losses: Iterable[tuple[int, float]]) -> None:
        self._losses = dict(losses)
        self._best_at = -1

    def evaluated(self, updates: int, loss: float | None) -> None:
        """Record the held-out loss of the current state."""
        # After a rollback, later losses no longer count.
        self._losses = {step: one for step, one in self._losses.items() if step < updates}
        if loss is None or not math.isfinite(loss):
            return
        if loss < min(self._losses.values(), default=math.inf):
            self._best_at = updates
        self._losses[updates] = loss

    def is_new(self, updates: int) -> bool:
        """Whether the state after ``updates`` updates is the best so far, and so must be saved."""
        return self._best_at == updates

    def serials(self, records: Iterable[Record]) -> set[int]:
        """Serial of the best checkpoint on disk with a known loss; empty without one."""
        known = [
            (self._losses[record.step], -record.serial)
            for record in on_disk(records)
            if record.step in self._losses and record.state is not State.tainted
        ]
        return {-min(known)[1]} if known else set()


def held_out_losses(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Update and loss of each evaluation in the metrics; the last one of an update counts."""
    by_update = {}
    for line in lines:
        loss = line.get("eval_loss")
        if line.get("action") == "apply" and isinstance(loss, float) and math.isfinite(loss):
            by_update[step_of(dict(line))] = loss
    return sorted(by_update.items())
