"""Turns settings into the guard's rules. Imports no torch, so that a backtest starts quickly."""

from __future__ import annotations

import dataclasses
from typing import Any

from runner.config.schema import RunConfig
from runner.policy.decision.judge import JudgeRules
from runner.policy.decision.ladder import RemedyRules


def judge_rules(config: RunConfig) -> JudgeRules:
    """The judge's part of ``guard.*``."""
    return JudgeRules(**named(JudgeRules, config.guard))


def remedy_rules(config: RunConfig, *, untrained_loss: float = 0.0) -> RemedyRules:
    """The ladder's part of ``guard.*``; a run knows the loss of a uniform guess, in nats."""
    rules = RemedyRules(
        batch=config.batch.global_size,
        untrained_loss=untrained_loss,
        **named(RemedyRules, config.guard),
    )
    if not config.guard.enabled:
        # Nothing is rolled back then; a step that the engine itself skips is discarded.
        rules = dataclasses.replace(rules, persist=rules.persist_window + 1)
    return rules


def named(kind: type, source: Any) -> dict[str, Any]:
    """Values of the fields that a rules class shares with its config group."""
    names = {spec.name for spec in dataclasses.fields(kind)}
    return {s.name: getattr(source, s.name) for s in dataclasses.fields(source) if s.name in names}
