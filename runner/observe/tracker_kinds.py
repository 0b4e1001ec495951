"""The trackers that ``track`` can name: TensorBoard, Weights & Biases, MLflow, one of the user's.

Each library is imported where it is first used, in the tracker's own thread.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from runner.config.schema import TrackConfig
from runner.observe.console import level_of
from runner.observe.tracker import RunFacts, Tracker
from runner.system.files import make_folder, naming, replace_for_writing
from runner.system.user_code import bound_target

_LEVELS = {logging.WARNING: "WARN", logging.ERROR: "ERROR"}
_PLAIN = (str, int, float, bool, type(None))
_RUN = "holdfast.run"  # the MLflow tag by which a restart finds its run
_MOST_PARAMS, _MOST_TEXT, _MOST_TAG = 100, 500, 5000  # MLflow's limits


def makers(
    settings: TrackConfig, facts: RunFacts, tensorboard: Callable[[], Tracker]
) -> Iterator[tuple[str, Callable[[], Tracker]]]:
    """The name of each configured tracker, and what makes it.

    Raises:
        ConfigError: ``track._target_`` does not exist, or takes other arguments.
    """
    if settings.tensorboard:
        yield "TensorBoard", tensorboard
    if settings.wandb:
        yield "wandb", lambda: WandbTracker(facts, settings.project)
    if settings.mlflow:
        yield "mlflow", lambda: MlflowTracker(facts, settings.project)
    if settings._target_ is not None:
        arguments = settings.arguments or {}
        make = bound_target("track._target_", settings._target_, arguments, asdict(facts))
        yield settings._target_.rpartition(".")[2], make


class TensorBoardTracker:
    """``track=tensorboard``: scalars under ``folder``, an event file per start, a record per step.

    From the first step of a start on, TensorBoard drops what older files have. Those are put in
    place anew, so that an earlier incarnation which still lives adds nothing to its own.

    Args:
        number: the incarnation, a part of the file's name.
        check: raises when this process may no longer write here.
    """

    def __init__(
        self, folder: Path, *, number: int, check: Callable[[], None] = lambda: None
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self._start = SessionLog(status=SessionLog.START)
        make_folder(folder)
        for older in folder.glob("*tfevents*"):
            if older.suffix != ".tmp":
                replace_for_writing(older, length=older.stat().st_size, check=check)
        # TensorBoard reads files in the order of their names.
        now = f"{int(time.time()):010d}"
        self._path = folder / f"events.out.tfevents.{now}.{socket.gethostname()}.{number:06d}"
        replace_for_writing(self._path, length=0, check=check)
        self._file = self._path.open("ab")
        self._records = RecordWriter(self._file)
        self._is_begun = False

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        step = int(numbers["step"])
        if not self._is_begun:
            self._is_begun = True
            self._add(step=step, file_version="brain.Event:2")
            self._add(step=step, session_log=self._start)
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in numbers.items()
            if name != "step"
        ]
        self._add(step=step, summary=self._summary(value=values))

    def _add(self, **scalars: Any) -> None:
        event = self._event(wall_time=time.time(), **scalars)
        with naming(self._path):
            self._records.write(event.SerializeToString())
            self._file.flush()

    def incident(self, attempt: int, line: Mapping[str, Any]) -> None:
        """Do nothing: it shows curves only."""

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


class WandbTracker:
    """``track=wandb``: a run of Weights & Biases, one over all starts.

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


class MlflowTracker:
    """``track=mlflow``: a run of MLflow, one over all starts.

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
