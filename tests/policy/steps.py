"""Made-up steps, and the rules that ``runner.config.schema`` gives by default."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from runner.config.schema import GuardConfig
from runner.policy.decision.judge import Baseline, JudgeRules
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


def judge_rules(**changes: Any) -> JudgeRules:
    """``guard.*`` by default, with changes."""
    return JudgeRules(**_defaults(JudgeRules) | changes)


def remedy_rules(**changes: Any) -> RemedyRules:
    """``guard.*`` by default, with changes."""
    return RemedyRules(**{"batch": BATCH, "untrained_loss": 0.0} | _defaults(RemedyRules) | changes)


def _defaults(kind: type) -> dict[str, Any]:
    names = {spec.name for spec in dataclasses.fields(kind)}
    return {name: value for name, value in _guard().items() if name in names}


def _guard() -> dict[str, Any]:
    return dataclasses.asdict(GuardConfig())


def held_level(baseline: Baseline) -> float | None:
    """Median loss of everything in the baseline's window; None when it is empty."""
    losses = [loss for loss, _ in baseline.recent(10_000)]
    return statistics.median(losses) if losses else None
