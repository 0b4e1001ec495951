"""TrainState: what a rollback restores besides the engine's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from runner.config.schema import GuardConfig
from runner.observe.metrics import MetricsLine
from runner.policy.decision.history import History
from runner.policy.decision.judge import Baseline
from runner.policy.decision.ladder import BadStepTracker, RemedyRules, reach
from runner.policy.decision.signals import StepSignals, json_float
from runner.policy.retention.records import Reach
from runner.system.error import CheckpointError
from runner.system.parsing import whole

_LIMIT = 1 << 60


class Carried(Protocol):
    """Extra state that a rollback restores, as JSON values. Collective."""

    def to_json(self) -> dict[str, Any]: ...
    def load_json(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError, alike on every rank, if it is not what to_json returns."""
        ...


class TrainState:
    """``updates`` applied so far, the ``cursor`` (next sample position), the guard's memory.

    Attributes:
        unreported: the line of the last update, while its evaluation is not done.
        came_again: the bad step that follows from its weights and samples: it was bad before, and
            every step since the checkpoint repeated its numbers.

    Args:
        carried: state of the user's own loop.
    """

    def __init__(self, guard: GuardConfig, carried: Carried | None = None) -> None:
        self._carried = carried
        self.updates = 0
        self.cursor = 0
        self.last_loss: float | None = None
        self.unreported: MetricsLine | None = None
        self.came_again: int | None = None
        self.baseline = Baseline(guard)
        self.trouble = BadStepTracker(guard)

    def advance(self, signals: StepSignals) -> None:
        """Count an update that was applied."""
        self.baseline.accept(signals)
        self.updates += 1
        self.cursor = signals.stop
        self.last_loss = signals.loss

    def to_json(self) -> dict[str, Any]:
        """The state as exact JSON values."""
        return {
            "updates": self.updates,
            "cursor": self.cursor,
            "last_loss": None if self.last_loss is None else json_float(self.last_loss),
            "baseline": self.baseline.to_json(),
            "trouble": self.trouble.to_json(),
            **({"unreported": self.unreported.to_state()} if self.unreported else {}),
            **({} if self.came_again is None else {"came_again": self.came_again}),
            **({"loop": self._carried.to_json()} if self._carried else {}),
        }

    def load_json(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`to_json`.

        Raises:
            CheckpointError: it is not what :meth:`to_json` returns.
        """
        try:
            _refuse_nonfinite(state)
            self.updates = whole(state["updates"], "updates", below=_LIMIT)
            self.cursor = whole(state["cursor"], "cursor", below=_LIMIT)
            self.last_loss = None if state["last_loss"] is None else float(state["last_loss"])
            self.baseline.load_json(state["baseline"])
            self.trouble.load_json(state["trouble"])
            line, step = state.get("unreported"), state.get("came_again")
            self.unreported = None if line is None else MetricsLine.from_state(line)
            self.came_again = None if step is None else whole(step, "came_again")
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"[:300]
            raise CheckpointError(
                f"the checkpoint's train_state cannot be used ({cause})"
            ) from None
        if self._carried is not None:
            self._carried.load_json(state.get("loop", {}))


def reach_of(state: TrainState, rules: RemedyRules, history: History) -> Reach:
    """How far back a rollback would go if the next step were bad."""
    return reach(
        state.trouble, rules, updates=state.updates, cursor=state.cursor, ledger=history.ledger
    )


def _refuse_nonfinite(value: Any) -> None:
    """Refuse NaN, Infinity and numbers like 1e999, which JSON parsers accept."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"holds {value}")
    if isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            _refuse_nonfinite(item)
