"""From the settings to the guard's rules. No torch here: a backtest starts in a moment."""

from __future__ import annotations

import dataclasses
from typing import Any

from runner.config import RunConfig
from runner.policy.remedy import RemedyRules
from runner.policy.replay import SaveRules
from runner.policy.verdict import JudgeRules


def judge_rules(config: RunConfig) -> JudgeRules:
    """The judge's part of ``guard.*``."""
    return JudgeRules(**_named(JudgeRules, config.guard))


def remedy_rules(config: RunConfig) -> RemedyRules:
    """The ladder's part of ``guard.*``."""
    return RemedyRules(batch=config.batch.global_size, **_named(RemedyRules, config.guard))


def save_rules(config: RunConfig) -> SaveRules:
    """When the ring would have saved, for a replay."""
    return SaveRules(**_named(SaveRules, config.checkpoint))


def _named(kind: type, source: Any) -> dict[str, Any]:
    """Values of the fields that a rules class shares with its config group."""
    names = {spec.name for spec in dataclasses.fields(kind)}
    return {s.name: getattr(source, s.name) for s in dataclasses.fields(source) if s.name in names}
