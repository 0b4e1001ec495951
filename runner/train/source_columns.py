"""Columns of ``metrics.jsonl`` for each source of a mixture, and for each held-out set."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from runner.data.mixture import MixtureOrder
from runner.train.agreed_step import StepInfo


class SourceColumns:
    """``samples/NAME`` counts a step's samples; ``loss/NAME`` is their training loss, in nats a
    token, and ``eval_loss/NAME`` the held-out loss of a source or of a set of ``data.val_path``.

    Args:
        order: order of the samples of several sources; None without sources.
    """

    def __init__(self, order: MixtureOrder | None) -> None:
        self._order = order
        self._held_out: dict[str, float] = {}

    def evaluated(self, losses: Mapping[str, float]) -> None:
        """Set the held-out losses of the present state, by source or set."""
        self._held_out = dict(losses)

    def of(self, info: StepInfo) -> dict[str, float]:
        """The columns of one step; none for a step that was not computed."""
        if info.batch is None or self._order is None:
            return {}
        return self._of_sources(info)

    def of_evaluation(self) -> dict[str, float]:
        """The columns of the last evaluation."""
        return {f"eval_loss/{name}": loss for name, loss in self._held_out.items()}

    def _of_sources(self, info: StepInfo) -> dict[str, float]:
        assert self._order is not None and info.batch is not None
        names = self._order.names
        counts = np.bincount(self._order.sources(info.batch.indices), minlength=len(names))
        columns: dict[str, float] = {
            f"samples/{name}": count for name, count in zip(names, counts.tolist(), strict=True)
        }
        return columns | {
            f"loss/{name}": total / count
            for name, (total, count) in zip(names, info.source_sums, strict=False)
            if count and math.isfinite(total)
        }
