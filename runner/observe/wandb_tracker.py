"""``track=wandb``: a run of Weights & Biases, one over all starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from runner.observe.console import level_of
from runner.observe.run_tracker import RunFacts

_LEVELS = {logging.WARNING: "WARN", logging.ERROR: "ERROR"}
_PLAIN = (str, int, float, bool, type(None))


class WandbTracker:
    """See :class:`~runner.observe.run_tracker.RunTracker`.

    ``WANDB_MODE``, ``WANDB_API_KEY``, ``WANDB_ENTITY`` and the like decide where it
    logs to. The charts' axis is ``attempt``: W&B drops values whose step goes back.
    """

    def __init__(self, facts: RunFacts, project: str) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=project,
            id=facts.run_id,
            resume="allow",
            dir=str(facts.out),
            config={**facts.config, "digest": facts.digest},
            allow_val_change=True,
            # wandb must not capture this process's output or use its signal handlers.
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        self._run.define_metric("attempt")
        self._run.define_metric("*", step_metric="attempt")

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"attempt": attempt, **numbers}, step=attempt)

    def incident(self, attempt: int, line: Mapping[str, Any]) -> None:
        kind = str(line["kind"])
        self._run.log({"attempt": attempt, f"incident/{kind}": 1.0}, step=attempt)
        level = _LEVELS.get(level_of(line))
        if level is not None:
            text = f"step {line['step']}: {line['reason']} -> {line['decision']}"
            self._run.alert(kind, text, level=level)

    def summary(self, summary: Mapping[str, Any]) -> None:
        plain = {k: v for k, v in summary.items() if isinstance(v, _PLAIN)}
        self._run.summary.update(plain | {"skipped": str(summary.get("skipped"))})

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its service is a process
