"""``track=mlflow``: a run of MLflow, one over all starts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from runner.observe.run_tracker import RunFacts

_RUN = "holdfast.run"  # the tag by which a restart finds its run
_MOST_PARAMS, _MOST_TEXT, _MOST_TAG = 100, 500, 5000  # MLflow's limits


class MlflowTracker:
    """See :class:`~runner.observe.run_tracker.RunTracker`.

    ``MLFLOW_TRACKING_URI`` decides where it logs to. Without it MLflow writes
    files to ``out/mlruns``. The metrics' step is the attempt.
    """

    def __init__(self, facts: RunFacts, project: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE, MLFLOW_TRACKING_URI

        uri = MLFLOW_TRACKING_URI.get()
        if not uri:
            uri = (facts.out.absolute() / "mlruns").as_uri()
            MLFLOW_ALLOW_FILE_STORE.set("true")  # otherwise MLflow needs a database
        self._metric, self._param = Metric, Param
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        self._run = self._find(experiment, facts) or self._client.create_run(
            experiment, run_name=facts.out.name, tags={_RUN: facts.run_id}
        )
        self._id = self._run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._client.set_tag(self._id, "digest", facts.digest)
        self._log_config(facts.config)

    def _find(self, experiment: str, facts: RunFacts) -> Any:
        runs = self._client.search_runs([experiment], f"tags.`{_RUN}` = '{facts.run_id}'")
        return runs[0] if runs else None

    def _log_config(self, config: Mapping[str, Any]) -> None:
        """Log the settings. A logged value cannot change: a new one becomes a tag."""
        known = self._run.data.params
        params = {key: str(value)[:_MOST_TEXT] for key, value in config.items()}
        for key, value in params.items():
            if key in known and known[key] != value:
                self._client.set_tag(self._id, f"changed.{key}", value)
        new = [self._param(key, value) for key, value in params.items() if key not in known]
        for some in _parts(new, _MOST_PARAMS):
            self._client.log_batch(self._id, params=some)

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, attempt) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def incident(self, attempt: int, line: Mapping[str, Any]) -> None:
        kind, number = str(line["kind"]), int(line.get("seq", 0))
        self.numbers(attempt, {f"incident/{kind}": 1.0})
        text = f"step {line['step']} {kind}: {line['reason']} -> {line['decision']}"
        self._client.set_tag(self._id, f"incident.{number:06d}", text[:_MOST_TAG])

    def summary(self, summary: Mapping[str, Any]) -> None:
        for key, value in summary.items():
            self._client.set_tag(self._id, f"summary.{key}", str(value)[:_MOST_TAG])
        status = {"done": "FINISHED", "preempted": "KILLED"}.get(str(summary["status"]), "FAILED")
        self._client.set_terminated(self._id, status)

    def close(self) -> None:
        """Do nothing: everything was sent as it came."""


def _parts(items: Sequence[Any], most: int) -> Iterator[list[Any]]:
    left = iter(items)
    while some := list(islice(left, most)):
        yield some
