"""Trackers: nothing after a rollback is dropped, and one that is dead is done without."""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from runner.observe.metrics import MetricsLine
from runner.observe.tracker import Attempts, BackgroundTracker, RunFacts, Tracker
from runner.system.output import AsyncWriter
from tests.run import train
from tests.stored import metrics_line
from tests.tracking import Recorder, Slow

SUMMARY = {"status": "done", "final_loss": 0.5, "skipped": [[3, 5]], "eval_loss": None}


def line(step: int, loss: float = 1.0, action: str = "apply") -> MetricsLine:
    return metrics_line(step, loss=loss, action=action)


def incident(kind: str, step: int, seq: int) -> dict[str, Any]:
    return {"seq": seq, "kind": kind, "step": step, "reason": "loss nan", "decision": "go back"}


def facts(out: Path) -> RunFacts:
    return RunFacts(run_id="ab" * 16, config={"optim.lr": 0.1, "steps": 9}, digest="d1", out=out)


def told(tracker: BackgroundTracker, first: int, last: int) -> None:
    """Some steps, a discard, a rollback to the first of them, and the same steps again."""
    for step in range(first, last):
        tracker.write(line(step))
    tracker.write(line(last, loss=float("nan"), action="discard"))
    tracker.tell(incident("discard", last, 1))
    tracker.tell(incident("rollback", last, 2))
    for step in range(first, last + 1):
        tracker.write(line(step))


def background(make: Callable[[], Tracker], out: Path) -> BackgroundTracker:
    return BackgroundTracker("it", make, Attempts(out / "attempts.json"))


def test_attempts_never_go_back(tmp_path: Path) -> None:
    path = tmp_path / "debug" / "attempts.json"
    first = Attempts(path)
    assert [first.next() for _ in range(250)] == list(range(1, 251))
    crashed = Attempts(path)  # nobody closed the first
    assert 250 < crashed.next() <= 351
    crashed.close()
    assert Attempts(path).next() == crashed.newest + 1
    path.write_text("{")
    assert Attempts(path).next() == 1


def test_numbers_marks_and_the_summary_come_in_order(tmp_path: Path) -> None:
    made = tmp_path / "told"
    tracker = background(lambda: Recorder(str(made), "r", "d", {"steps": 3}), tmp_path)
    told(tracker, 1, 4)
    tracker.finish(SUMMARY, in_time=True)
    lines = [json.loads(text) for text in made.read_text().splitlines()]
    numbers = [what for kind, what in lines if kind == "numbers"]
    assert [one["attempt"] for one in numbers] == list(range(1, 9))
    assert [one["step"] for one in numbers] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert "train/loss" not in numbers[3] and numbers[3]["guard/discarded"] == 1
    assert [what["attempt"] for kind, what in lines if kind == "incident"] == [4, 4]
    assert [kind for kind, _ in lines[-2:]] == ["summary", "closed"]
    assert tracker.loss is None


def test_one_that_hangs_delays_nothing(tmp_path: Path) -> None:
    from tests.tracking import hanging

    tracker = background(hanging, tmp_path)
    for step in range(20_000):  # more than may wait
        tracker.write(line(step))
    assert tracker.loss is not None and "too much is waiting" in tracker.loss.reason
    words = tracker.finish(SUMMARY, in_time=True)  # of a thread that never comes back
    assert words.startswith("it: no reader, and too much is waiting")


def test_one_that_fails_is_done_without(tmp_path: Path) -> None:
    def make() -> Tracker:
        raise ConnectionError("no server")

    tracker = background(make, tmp_path)
    told(tracker, 1, 4)
    tracker.finish(SUMMARY, in_time=True)
    assert tracker.loss is not None and tracker.loss.reason == "ConnectionError: no server"


def test_nothing_follows_a_call_that_failed(tmp_path: Path) -> None:
    """What follows a torn record could not be read."""

    class FailsOnce(Recorder):
        def numbers(self, attempt: int, numbers: Mapping[str, float]) -> None:
            if attempt == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().numbers(attempt, numbers)

    path = tmp_path / "told"
    tracker = background(lambda: FailsOnce(str(path), "r", "d", {"steps": 3}), tmp_path)
    told(tracker, 1, 7)
    tracker.finish(SUMMARY, in_time=True)
    assert tracker.loss is not None and "No space left" in tracker.loss.reason
    kinds = [json.loads(text)[0] for text in path.read_text().splitlines()]
    assert kinds == ["made", "numbers", "numbers"]


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from runner.observe.tracker import WandbTracker

    monkeypatch.setenv("WANDB_MODE", "offline")
    for first in (1, 3):  # the second is a restart
        tracker = background(lambda: WandbTracker(facts(tmp_path), "p"), tmp_path)
        told(tracker, first, 5)
        tracker.finish(SUMMARY, in_time=True)
        assert tracker.loss is None
    history = list(offline_rows(tmp_path))
    attempts = [item["attempt"] for item in history if "train/lr" in item]
    assert attempts == list(range(1, 17))
    steps = [item["step"] for item in history if "step" in item]
    assert steps == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]
    for mark in ("discard", "rollback"):  # where it happened, in each of the two starts
        marks = [item["attempt"] for item in history if f"incident/{mark}" in item]
        assert marks == [5, 13]
    alerts = [record.alert for record in offline(tmp_path, "alert")]
    assert [one.title for one in alerts].count("rollback") == 2
    assert all("loss nan" in one.text and "go back" in one.text for one in alerts)
    settings = {item.key: item.value_json for item in told_first(offline(tmp_path, "run"))}
    assert settings["optim.lr"] == "0.1" and settings["digest"] == '"d1"'
    ends = [items_of(record.summary.update) for record in offline(tmp_path, "summary")]
    assert any(end.get("final_loss") == 0.5 and end.get("skipped") == "[[3, 5]]" for end in ends)


def told_first(runs: Iterator[Any]) -> Any:
    return next(runs).run.config.update


def items_of(items: Any) -> dict[str, Any]:
    return {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}


def offline(out: Path, kind: str) -> Iterator[Any]:
    """What wandb has put down for a later sync: its records of one kind."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(out.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == kind:
                yield record


def offline_rows(out: Path) -> Iterator[dict[str, Any]]:
    """The items of each row of the history."""
    for record in offline(out, "history"):
        yield items_of(record.history.item)


def records(data: bytes) -> Iterator[bytes]:
    """Of a log as LevelDB has them, behind wandb's head of seven bytes: blocks of 32 KiB."""
    at, begun = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield begun
            begun = b""


def test_mlflow_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    from mlflow import MlflowClient

    from runner.observe.tracker import MlflowTracker

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # put back afterwards
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for first in (1, 3):
        tracker = background(lambda: MlflowTracker(facts(tmp_path), "p"), tmp_path)
        told(tracker, first, 5)
        tracker.finish(SUMMARY, in_time=True)
        assert tracker.loss is None, tracker.loss
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("p")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["optim.lr"] == "0.1"
    assert run.data.tags["digest"] == "d1" and "go back" in run.data.tags["incident.000002"]
    assert run.data.tags["summary.skipped"] == "[[3, 5]]"
    history = client.get_metric_history(run.info.run_id, "train/lr")
    assert [metric.step for metric in history] == list(range(1, 17))
    [mark, _] = client.get_metric_history(run.info.run_id, "incident/rollback")
    assert mark.step == 5


OPTIONS = ("steps=30", "faults=[poison@samples=64-110,kill@step=24,rank=0]")


def test_a_run_tells_a_tracker_of_its_own_all(tmp_path: Path) -> None:
    """Poisoned, gone back, killed and started again: attempts only rise, and nothing is missing."""
    made, out = tmp_path / "told", tmp_path / "run"
    target = ("track._target_=tests.tracking.Recorder", f"track.path={made}")
    first = train(out, *OPTIONS, *target, ranks=0)
    assert first.code != 0
    result = train(out, *OPTIONS, *target, ranks=0)
    assert result.code == 0, result.tail
    lines = [json.loads(text) for text in made.read_text().splitlines()]
    begun = [what for kind, what in lines if kind == "made"]
    assert len(begun) == 2 and begun[0] == begun[1] and begun[0]["steps"] == 30
    numbers = [what for kind, what in lines if kind == "numbers"]
    attempts = [one["attempt"] for one in numbers]
    assert attempts == sorted(set(attempts)) and len(attempts) > 30
    assert [what["kind"] for kind, what in lines if kind == "incident"].count("rollback") == 1
    [(_, summary)] = [one for one in lines if one[0] == "summary"]
    assert summary == result.summary
    assert set(range(1, 31)) <= {int(one["step"]) for one in numbers}


def test_one_that_connects_for_long_has_all_of_a_short_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a stall, and than the end waits for one that works: as W&B is imported."""
    monkeypatch.setattr("runner.system.output.STALL_SECONDS", 0.2)
    monkeypatch.setattr("runner.observe.tracker._CLOSE_SECONDS", 0.2)
    path = tmp_path / "told"
    tracker = background(
        lambda: Slow(2.0, str(path), run_id="a", digest="d", config={"steps": 9}), tmp_path
    )
    tracker.write(line(1))
    time.sleep(0.5)
    assert tracker.loss is None, "nothing is lost"
    assert tracker.finish(SUMMARY, in_time=True) == ""
    kinds = [json.loads(text)[0] for text in path.read_text().splitlines()]
    assert kinds == ["made", "numbers", "summary", "closed"]


@pytest.mark.parametrize(
    ("status", "in_time", "left", "waits"),
    [
        ("done", True, math.inf, [10.0, 60.0]),
        ("preempted", True, math.inf, [10.0]),
        ("preempted", True, 0.2, [0.2]),
        ("done", False, math.inf, [1.0]),
    ],
)
def test_one_that_never_connects_is_said_to_have_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    in_time: bool,
    left: float,
    waits: list[float],
) -> None:
    """A minute is waited for it, unless the process was asked to stop: then what its grace has."""
    from tests.tracking import hanging

    waited: list[float] = []
    drain = AsyncWriter.drain
    monkeypatch.setattr(
        AsyncWriter,
        "drain",
        lambda outlet, limit: waited.append(limit) or drain(outlet, limit / 100),
    )
    tracker = background(hanging, tmp_path)
    tracker.write(line(1))
    words = tracker.finish(SUMMARY | {"status": status}, in_time=in_time, most_seconds=left)
    assert words == "it: the run was not sent; it was still being connected"
    assert waited == waits


@pytest.mark.full
@pytest.mark.parametrize("name", ["Broken", "Hanging"])
def test_a_dead_tracker_is_one_line(tmp_path: Path, name: str) -> None:
    target = (f"track._target_=tests.tracking.{name}", f"track.path={tmp_path / 'told'}")
    # Long enough that a hanging one is noticed.
    result = train(tmp_path / "run", "steps=30", *target, "faults=[slow@step=10,seconds=6]")
    assert result.code == 0, result.tail
    [lost] = result.journal("output_lost")
    assert lost["detail"]["output"] == name
    assert result.digest == train(tmp_path / "bare", "steps=30").digest


def test_a_target_that_cannot_be_is_refused(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "track._target_=tests.tracking.Recorder", ranks=0)
    assert result.code == 2 and "track._target_" in result.text and "path" in result.text
