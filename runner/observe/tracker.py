"""Trackers of a run: they take its numbers, incidents and summary in a thread of their own.

Nothing waits for a tracker: it is made, called and closed in that thread, and one that fails or
hangs is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.config.schema import TrackConfig
from runner.observe.metrics import MetricsLine
from runner.policy.alert import DONE, RUNNING, Episodes, addressed, level_of
from runner.policy.columns import EVALUATED, LAYERS, kind_of
from runner.system import output
from runner.system.files import make_folder, naming, replace_for_writing, write_json
from runner.system.json_lines import count_of, read_object
from runner.system.output import AsyncWriter
from runner.system.parsing import json_text
from runner.system.process import host_name, run_with_input
from runner.system.user_code import bound_target

_MOST_WAITING = 10_000  # steps and incidents
_CLOSE_SECONDS, _CLOSE_SECONDS_LATE = 10.0, 1.0
# A tracker is imported and connected for its first line; a run may be over before that is done.
_START_SECONDS = 60.0
_AHEAD = 100  # attempts reserved at a time: a crash leaves a gap of at most this many
_MOST_BYTES = 4096


class Tracker:
    """The interface of a tracker. ``attempt`` counts attempted steps and never goes back."""

    def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
        """Take the finite numbers of one attempted step, by name."""

    def incident(self, attempt: int, line: Mapping[str, Any]) -> None:
        """Take one line of ``journal.jsonl``."""

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Take the contents of ``summary.json``."""

    def close(self) -> None:
        """Send what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a tracker learns of the run when it is made.

    Attributes:
        run_id: the run's random name, the same at each start.
        config: the settings as flat keys and plain values, without secrets.
        digest: of the settings.
        out: the run's directory.
    """

    run_id: str
    config: Mapping[str, Any]
    digest: str
    out: Path


def numbers_of(line: MetricsLine) -> dict[str, float]:
    """The finite numbers of one attempted step."""
    numbers = {
        "step": float(line.step),
        "train/loss": line.loss,
        "train/grad_norm": line.grad_norm,
        "train/lr": line.lr,
        "train/tokens_per_second": line.tokens_per_second or None,
        "eval/loss": line.held_out,
        "guard/discarded": float(line.action != "apply"),
    }
    for column, value in line.columns.items():
        if column == "eval_loss":
            continue
        kind = kind_of(column)
        own = column.removeprefix(EVALUATED) if kind == "eval" else column
        numbers[own if kind == LAYERS else f"{kind}/{own}"] = value
    return {k: float(v) for k, v in numbers.items() if v is not None and math.isfinite(v)}


class Attempts:
    """The number of attempted steps over all starts of a run: the axis of trackers.

    It never goes back, neither after a rollback nor after a crash, where the steps since the
    checkpoint are done again: trackers drop values for a number that they already have.

    Args:
        path: file of the reserved numbers.
        check: raises when this process may no longer write.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._check = check
        self.newest = self._reserved = count_of(read_object(path, _MOST_BYTES), "newest")

    newest: int
    """The number given last; 0 before the first."""

    def next(self) -> int:
        """The number of the next attempt, from 1.

        Raises:
            OSError: no further numbers can be reserved.
        """
        if self.newest >= self._reserved:
            self._reserve(self.newest + _AHEAD)
        self.newest += 1
        return self.newest

    def close(self) -> None:
        """Give back the unused numbers.

        Raises:
            OSError: it cannot be written.
        """
        self._reserve(self.newest)

    def _reserve(self, number: int) -> None:
        self._check()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"newest": number})
        self._reserved = number


class BackgroundTracker(AsyncWriter[Callable[[Tracker], None]]):
    """Calls a :class:`Tracker` from a thread.

    Args:
        name: of the tracker, for messages.
        make: makes the tracker, in the thread.
        attempts: numbers the steps.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], attempts: Attempts) -> None:
        self._make = make
        self._attempts = attempts
        self._tracker: Tracker | None = None
        self._has_failed = False
        super().__init__(
            name,
            self._call,
            most=_MOST_WAITING,
            patience=lambda: _START_SECONDS if self._tracker is None else output.STALL_SECONDS,
        )

    def write(self, line: MetricsLine) -> None:
        """Take the numbers of one attempted step."""
        numbers = numbers_of(line)
        self.put(lambda tracker: tracker.numbers(self._attempts.next(), numbers))

    def tell(self, line: Mapping[str, Any]) -> None:
        """Take one journal line."""
        copied = dict(line)
        self.put(lambda tracker: tracker.incident(self._attempts.newest, copied))

    def finish(
        self, summary: Mapping[str, Any], *, in_time: bool, most_seconds: float = math.inf
    ) -> str:
        """Take the summary. What is not sent in some seconds, at most ``most_seconds``, is lost.

        Returns:
            A sentence about what was lost; empty if all was sent.
        """
        self.put(lambda tracker: tracker.summary(dict(summary)))
        self.put(self._close)
        seconds = _CLOSE_SECONDS if in_time and self.loss is None else _CLOSE_SECONDS_LATE
        is_sent = self.drain(min(seconds, most_seconds))
        has_time = in_time and summary.get("status") != "preempted"
        if not is_sent and has_time and self._tracker is None and self.loss is None:
            # A short run, whose tracker is still being connected.
            is_sent = self.drain(_START_SECONDS)
        loss, name = self.loss, self.name
        if loss is not None and self.num_lost:
            return f"{name}: {loss.reason}"
        if is_sent:
            return ""
        if self._tracker is None:
            return f"{name}: the run was not sent; it was still being connected"
        return f"{name}: the end of the run was not sent; it takes too long"

    def _close(self, tracker: Tracker) -> None:
        self._attempts.close()
        tracker.close()

    def _call(self, call: Callable[[Tracker], None]) -> None:
        if self._has_failed:
            return  # a record after a torn one could not be read
        try:
            if self._tracker is None:
                self._tracker = self._make()
            call(self._tracker)
        except Exception:
            self._has_failed = True
            raise


# The trackers that ``track`` can name: TensorBoard, Weights & Biases, MLflow, one of the user's.
#
# Each library is imported where it is first used, in the tracker's own thread.


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


class TensorBoardTracker(Tracker):
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

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


class WandbTracker(Tracker):
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


class MlflowTracker(Tracker):
    """``track=mlflow``: a run of MLflow, one over all starts.

    ``MLFLOW_TRACKING_URI`` decides where it logs to. Without it MLflow writes
    files to ``out/mlruns``. The metrics' step is the attempt.
    """

    def __init__(self, facts: RunFacts, project: str) -> None:
        from mlflow import MlflowClient, environment_variables
        from mlflow.entities import Metric, Param

        uri = environment_variables.MLFLOW_TRACKING_URI.get()
        if not uri:
            uri = (facts.out.absolute() / "mlruns").as_uri()
            if hasattr(environment_variables, "MLFLOW_ALLOW_FILE_STORE"):  # not in MLflow 3.0
                environment_variables.MLFLOW_ALLOW_FILE_STORE.set("true")  # else a database
        self._metric, self._param = Metric, Param
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)
        runs = self._client.search_runs([experiment], f"tags.`{_RUN}` = '{facts.run_id}'")
        self._run = next(iter(runs), None) or self._client.create_run(
            experiment, run_name=facts.out.name, tags={_RUN: facts.run_id}
        )
        self._id = self._run.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._client.set_tag(self._id, "digest", facts.digest)
        self._log_config(facts.config)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        """Log the settings. A logged value cannot change: a new one becomes a tag."""
        known = self._run.data.params
        params = {key: str(value)[:_MOST_TEXT] for key, value in config.items()}
        for key, value in params.items():
            if key in known and known[key] != value:
                self._client.set_tag(self._id, f"changed.{key}", value)
        new = [self._param(key, value) for key, value in params.items() if key not in known]
        for at in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[at : at + _MOST_PARAMS])

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


# ``track.command``: runs the user's command for each incident. Nothing waits for it.


OUTLET = "track.command"
_COMMAND_SECONDS = 30.0
_MOST_ALERTS = 200
_STATE_BYTES = 1 << 20
# How long a process that ends waits for its last commands: to begin, and to end.
_BEGIN_SECONDS, _END_SECONDS = 2.0, 5.0
_POLL_SECONDS = 0.01
# The process that journals these may be gone a moment later.
_LAST = frozenset({"crash", "halt", "preempted", "failed"})


class CommandAlerts(AsyncWriter[tuple[bytes, dict[str, Any]]]):
    """Runs a shell command for each episode of trouble, in a thread of its own.

    Its standard input is a message of :class:`runner.policy.alert.Episodes` with what
    :func:`runner.policy.alert.addressed` adds, one JSON object. It runs in a session of its own, so
    it outlives a process that ends, and is killed after 30 seconds. Its output is dropped.

    Args:
        out: the run's directory.
        name: of the run, in the messages' keys.
        state: file of the episodes that are open.
    """

    def __init__(
        self,
        command: str,
        out: Path,
        *,
        name: str,
        state: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._command = command
        self._out = str(out.absolute())
        self._state = state
        self._clock = clock
        self._episodes = Episodes(name, state=read_object(state, _STATE_BYTES))
        self._num_told = self._num_begun = 0
        super().__init__(OUTLET, self._run_command, most=_MOST_ALERTS)

    def tell(self, line: Mapping[str, Any]) -> None:
        """Take one journal line. Waits only for the last lines of a process about to end."""
        kind = str(line["kind"])
        if kind == "output_lost" and line["detail"].get("output") == OUTLET:
            return
        self._send(self._episodes.add(line, self._clock()))
        if kind in _LAST:
            limit = time.monotonic() + _BEGIN_SECONDS
            while self._num_begun < self._num_told and time.monotonic() < limit:
                time.sleep(_POLL_SECONDS)

    def applied(self, step: int) -> None:
        """Take that an update was applied: an episode may be over."""
        if self._episodes.is_trouble:
            self._send(self._episodes.see(RUNNING, step, self._clock()))

    def done(self, step: int) -> None:
        """Take that the run is done, and with it every episode."""
        if self._episodes.is_trouble:
            self._send(self._episodes.see(DONE, step, self._clock())[:-1])

    def _send(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            whole = addressed(message, self._out, host_name(), self._clock())
            if self.put((json_text(whole).encode() + b"\n", self._episodes.to_json())):
                self._num_told += 1

    def close(self) -> None:
        """Wait some seconds for the last commands."""
        self.drain(_END_SECONDS)

    def _run_command(self, message: tuple[bytes, dict[str, Any]]) -> None:
        """
        Raises:
            OSError: the command failed, or took too long.
        """

        def begun() -> None:
            self._num_begun += 1

        data, state = message
        with contextlib.suppress(OSError):  # a restart may say again that it goes on
            write_json(self._state, state)
        run_with_input(self._command, data, seconds=_COMMAND_SECONDS, begun=begun)
