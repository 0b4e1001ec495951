"""The best of the evaluations so far: which checkpoint it is, and whether training may stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from runner.config.schema import EvalConfig, Goal
from runner.policy.alert import EARLY_STOP
from runner.policy.decision.history import Incident
from runner.policy.retention.records import Record, State, on_disk
from runner.system.error import ConfigError
from runner.system.json_lines import iter_lines, step_of
from runner.train.evaluate import Evaluator
from runner.train.run import EngineRun, RunJournal


class BestEvaluation:
    """The values of ``eval.metric`` by update. The same on all ranks.

    Evaluations after ``updates`` never count for the state after ``updates``: a rollback undid
    them, so that a run that goes back or resumes decides as one that did neither.

    Args:
        values: of the evaluations before this start; see :func:`evaluations`.
    """

    def __init__(self, settings: EvalConfig, values: Iterable[tuple[int, float]]) -> None:
        self._settings = settings
        self._sign = 1.0 if settings.goal is Goal.lowest else -1.0
        self._values = dict(values)
        self._best_at = -1

    @classmethod
    def of(cls, run: EngineRun, settings: EvalConfig, *, is_kept: bool) -> BestEvaluation:
        """With what the metrics have, where something goes by it. Collective.

        Args:
            is_kept: the ring keeps the best checkpoint.
        """
        if not (is_kept or settings.stop_after):
            return cls(settings, ())  # a long run's metrics are not read at each start for nothing
        path, length, step = run.group.run_dir.metrics, run.resumed.metrics_bytes, run.resumed.step
        before = run.ranks.of_first(
            "reading the metrics",
            lambda: evaluations(iter_lines(path, stop=length), settings.metric),
        )
        best = cls(settings, ((int(at), float(value)) for at, value in before if at <= step))
        if is_kept:
            run.ring.also_keep(lambda: best.serials(run.ring.records))
        return best

    def evaluated(self, updates: int, evaluator: Evaluator, loss: float | None) -> None:
        """Record the evaluation of the current state.

        Raises:
            ConfigError: there is no such number; on all ranks.
        """
        columns = evaluator.columns(loss)
        metric = self._settings.metric
        if loss is not None and metric not in columns:
            raise ConfigError(
                f"eval.metric={metric}: is no number of an evaluation; these are "
                f"{', '.join(sorted(columns))}"
            )
        self.note(updates, columns.get(metric))

    def note(self, updates: int, value: float | None) -> None:
        """Record a value; one that is not finite, or None, is no evaluation."""
        self._values = {step: one for step, one in self._values.items() if step < updates}
        if value is None or not math.isfinite(value):
            return
        best = self._best()
        if best is None or self._sign * value < self._sign * best[1]:
            self._best_at = updates
        self._values[updates] = value

    def is_new(self, updates: int) -> bool:
        """Whether the state after ``updates`` updates is the best so far, and so must be saved."""
        return self._best_at == updates

    def serials(self, records: Iterable[Record]) -> set[int]:
        """Serial of the best checkpoint on disk with a known value; empty without one."""
        known = [
            (self._sign * self._values[record.step], -record.serial)
            for record in on_disk(records)
            if record.step in self._values and record.state is not State.tainted
        ]
        return {-min(known)[1]} if known else set()

    def ended(self, written: RunJournal, updates: int) -> str:
        """:meth:`ending`, journalled once."""
        reason = self.ending(updates)
        if reason:
            written.report_once(
                Incident(kind=EARLY_STOP, step=updates, decision="end", reason=reason)
            )
        return reason

    def ending(self, updates: int) -> str:
        """Why the run ends after ``updates`` updates: eval.stop_after; empty to go on."""
        patience = self._settings.stop_after
        best = self._best(updates) if patience else None
        if best is None:
            return ""
        later = sum(best[0] < step <= updates for step in self._values)
        if later < patience:
            return ""
        return (
            f"stopped early: {self._settings.metric} {best[1]:.6g} of step {best[0]} is the "
            f"{self._settings.goal.value}, and {later} evaluations since were no better "
            f"(eval.stop_after={patience})"
        )

    def _best(self, updates: float = math.inf) -> tuple[int, float] | None:
        """Update and value of the best evaluation, the first of equal ones."""
        values = [(self._sign * one, step) for step, one in self._values.items() if step <= updates]
        return (min(values)[1], self._sign * min(values)[0]) if values else None


def evaluations(lines: Iterable[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Update and value of each evaluation in the metrics that no rollback undid."""
    by_update: dict[int, float] = {}
    for line in lines:
        if line.get("action") != "apply":
            continue
        step, value = step_of(dict(line)), line.get(metric)
        by_update = {at: one for at, one in by_update.items() if at < step}
        if isinstance(value, int | float) and math.isfinite(value):
            by_update[step] = float(value)
    return sorted(by_update.items())
