"""TrainState: everything of the loop that a rollback takes back, besides the engine's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runner.error import CheckpointError
from runner.policy.remedy import RemedyRules, Trouble
from runner.policy.verdict import Baseline, JudgeRules
from runner.strict import whole

_LIMIT = 1 << 60


class TrainState:
    """``updates`` applied so far, the ``cursor`` (next sample position), the guard's memory."""

    def __init__(self, judge_rules: JudgeRules, remedy_rules: RemedyRules) -> None:
        self.updates = 0
        self.cursor = 0
        self.last_loss: float | None = None
        self.baseline = Baseline(judge_rules)
        self.trouble = Trouble(remedy_rules)

    def to_json(self) -> dict[str, Any]:
        """JSON values, exact."""
        return {
            "updates": self.updates,
            "cursor": self.cursor,
            "last_loss": self.last_loss,
            "baseline": self.baseline.to_json(),
            "trouble": self.trouble.to_json(),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`.

        Raises:
            CheckpointError: it is not what :meth:`to_json` gives.
        """
        try:
            _refuse_nonfinite(state)
            self.updates = whole(state["updates"], "updates", below=_LIMIT)
            self.cursor = whole(state["cursor"], "cursor", below=_LIMIT)
            self.last_loss = None if state["last_loss"] is None else float(state["last_loss"])
            self.baseline.load_json(state["baseline"])
            self.trouble.load_json(state["trouble"])
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            words = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(
                f"the checkpoint's train_state cannot be used ({words})"
            ) from None


def _refuse_nonfinite(value: Any) -> None:
    """JSON has words for numbers that are none, and 1e999."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}")
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            _refuse_nonfinite(item)
