"""Made-up steps, and the rules that ``runner.config.schema`` gives by default."""

from __future__ import annotations

import statistics
from typing import Any

from runner.config.schema import GuardConfig
from runner.policy.decision.judge import Baseline
from runner.policy.decision.ladder import RemedyRules
from runner.policy.decision.signals import StepSignals

BATCH = 8


def attempted(
    step: int, loss: float = 3.0, grad_norm: float = 1.0, *, start: int | None = None, **more: Any
) -> StepSignals:
    """The signals of one attempted step; without ``start``, as if nothing was ever skipped."""
    first = (step - 1) * BATCH if start is None else start
    numbers = {"tokens": 1024, "nonfinite_ranks": 0, "gated": False, "stop": first + BATCH} | more
    return StepSignals(step=step, start=first, loss=loss, grad_norm=grad_norm, **numbers)


def guard_settings(**changes: Any) -> GuardConfig:
    """``guard.*`` by default, with changes."""
    return GuardConfig(**changes)


def remedy_rules(*, batch: int = BATCH, untrained_loss: float = 0.0, **changes: Any) -> RemedyRules:
    """The ladder's rules, with changed settings of ``guard``."""
    return RemedyRules(guard=GuardConfig(**changes), batch=batch, untrained_loss=untrained_loss)


def held_level(baseline: Baseline) -> float | None:
    """Median loss of everything in the baseline's window; None when it is empty."""
    losses = [loss for loss, _ in baseline.recent(10_000)]
    return statistics.median(losses) if losses else None
