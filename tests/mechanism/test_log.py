"""What is said: text that a person reads, or JSON that a pipeline does; once, never an error."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.observe.console import Console
from runner.policy.decision.history import Incident
from runner.system import log
from tests import warm
from tests.mechanism.test_console import INCIDENT, PROGRESS
from tests.run import TINY, finish

OURS = logging.getLogger("runner.health.preemption")
TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\d\dZ")


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    log.begin(as_json=False)


def told(text: str) -> list[dict[str, Any]]:
    """Each line as JSON in the narrow sense: NaN is none."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize(("rank", "head"), [(None, ""), (0, ""), (3, "[rank 3] ")])
@pytest.mark.parametrize(
    ("level", "mark"),
    [(logging.INFO, ""), (logging.WARNING, "warning: "), (logging.ERROR, "error: ")],
)
def test_text_is_plain_on_the_first_rank(
    rank: int | None, head: str, level: int, mark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log.begin(as_json=False, rank=rank)
    OURS.log(level, "asked to stop: %s", "SIGTERM")
    assert capsys.readouterr() == ("", f"{head}{mark}asked to stop: SIGTERM\n")


def test_json_has_time_level_rank_step_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    steps = iter((7, 8))
    log.begin(as_json=True, rank=3, step=lambda: next(steps))
    OURS.error("asked to stop: %s", "SIGTERM")
    OURS.info("a\nb", extra={"fields": {"loss": float("nan"), "level": "mine", "of": [1.0]}})
    first, second = told(capsys.readouterr().err)
    assert TIME.fullmatch(first.pop("time")) and TIME.fullmatch(second.pop("time"))
    assert first == {"level": "error", "rank": 3, "step": 7, "message": "asked to stop: SIGTERM"}
    assert second == {
        "level": "info",
        "rank": 3,
        "step": 8,
        "message": "a\nb",
        "loss": None,
        "of": [1.0],
        "nonfinite": {"loss": "nan"},
    }


def test_debug_is_not_said_and_other_loggers_are_left_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.getLogger("torch").handlers[:])
    log.begin(as_json=False, rank=0)
    OURS.debug("detail")
    assert capsys.readouterr() == ("", "")
    assert (root.level, list(root.handlers), logging.getLogger("torch").handlers) == before


def test_nothing_is_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """Not after a second begin, nor by what a library hangs on the root logger."""
    other = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(other)
    try:
        for _ in range(3):
            log.begin(as_json=False, rank=0)
        OURS.warning("once")
    finally:
        logging.getLogger().removeHandler(other)
    assert capsys.readouterr().err == "warning: once\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_that_is_said_raises(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, text: str) -> int:
            raise OSError("gone")

        def __str__(self) -> str:
            raise RuntimeError("no words")

    log.begin(as_json=as_json, rank=0)
    ours = logging.getLogger("runner")
    only = [one for one in ours.handlers if type(one).__module__ == log.__name__]
    monkeypatch.setattr(ours, "handlers", only)  # pytest's own handler raises
    with monkeypatch.context() as patch:
        for stream in (Broken(), None):
            patch.setattr("sys.stderr", stream)
            OURS.error("nobody hears it")
    OURS.error("%s", Broken())
    OURS.error("%d", "no number")
    OURS.error("\udc80 stays", extra={"fields": {"one": object()}} if as_json else {})
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err


def test_a_traceback_is_text_or_a_field(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        log.begin(as_json=as_json, rank=1)
        try:
            raise ValueError("odd")
        except ValueError as error:
            OURS.critical("%s: %s", type(error).__name__, error, exc_info=True)
    text, line = capsys.readouterr().err.rstrip().rsplit("\n", 1)
    assert text.startswith("[rank 1] Traceback (most recent call last):\n")
    assert text.endswith("ValueError: odd") and text.count("odd") == 2, "in the source line, too"
    found = json.loads(line)
    assert (found["level"], found["message"]) == ("critical", "ValueError: odd")
    assert found["traceback"].startswith("Traceback") and found["traceback"].endswith("odd")


def test_neither_secrets_nor_what_moves_a_cursor_get_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "do-not-say-this")
    for as_json in (False, True):
        log.begin(as_json=as_json, rank=0)
        fields = {"fields": {"api_key": "abc", "url": "x do-not-say-this"}}
        OURS.error("with do-not-say-this \x1b[2J\rand\tmore", extra=fields)
    text = capsys.readouterr().err
    assert "do-not-say-this" not in text and "abc" not in text
    assert text.startswith("error: with [hidden] \\x1b[2J\\x0dand\tmore\n")
    assert "\x1b" not in text and "\r" not in text


# The console


def test_a_pipeline_gets_incidents_progress_and_the_end_as_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.begin(as_json=True, rank=0, step=lambda: 17)
    console = Console(silent=False, every=2, as_json=True)
    console.say("warning: no room")
    console.incident(INCIDENT)
    for step in (2, 3, 4):
        console.progress(replace(PROGRESS, step=step, loss=float("inf")))
    console.table("done: all", [("steps", "4"), ("loss", "1.2")])
    said = capsys.readouterr()
    warning, incident, two, four, end = told(said.out)
    assert said.err == ""
    assert (warning["level"], warning["message"], warning["step"]) == ("warning", "no room", 17)
    assert (incident["level"], incident["incident"]) == ("warning", "discard")
    assert incident["ranks"] == [1, 3] and incident["samples"] == [400, 432]
    assert incident["message"].startswith("! step 17 discard ranks 1 and 3 samples 400-431")
    assert [two["step"], four["step"]] == [2, 4] and two["message"].startswith("step 2/20")
    assert two["loss"] is None and two["nonfinite"] == {"loss": "inf"} and two["lr"] == 3e-3
    assert (end["message"], end["summary"]) == ("done: all", {"steps": "4", "loss": "1.2"})


@pytest.mark.parametrize(
    ("kind", "agreeing", "level"),
    [
        ("halt", [], "error"),
        ("rollback", [], "warning"),
        ("episode", [], "info"),
        ("warning", [], "info"),  # one early sign: no news for a pager
        ("warning", ["residual_rms", "weight_norm"], "warning"),
    ],
)
def test_an_incident_has_the_level_of_its_kind(
    kind: str, agreeing: list[str], level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log.begin(as_json=True, rank=0)
    Console(silent=False, every=1).incident(
        Incident(kind=kind, step=3, decision="d", reason="r", detail={"agreeing": agreeing})
    )
    (line,) = told(capsys.readouterr().out)
    assert (line["level"], line["incident"], line["step"]) == (level, kind, 3)


# A run


@pytest.mark.parametrize("word", ["track.log=json", "track.log=text"])
def test_what_is_wrong_with_the_settings_is_said_in_the_format_that_they_ask_for(word: str) -> None:
    """By a process of its own, in which the package's entry is called ``__main__``."""
    done = warm.finished([sys.executable, "-m", "runner", word, "steps=none"], timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    if word.endswith("text"):
        assert done.stderr.startswith("error: steps=none: ") and done.stderr.count("\n") == 1
        return
    (line,) = told(done.stderr)
    assert (line["level"], line["rank"], line["exit_code"]) == ("error", 0, 2)
    assert line["message"].startswith("steps=none: ")


def test_every_line_of_a_run_is_json_and_every_incident_stands_there_once(tmp_path: Path) -> None:
    """Two ranks; a bad step, a bad range, and a rank that is killed: torchrun starts them again."""
    faults = "faults=['nan_grad@step=14,rank=1','poison@samples=640-767','raise@step=30,rank=1']"
    told_to = ("steps=40", "track.log=json", "track.every=5", faults)
    run = finish(tmp_path / "run", *TINY, *told_to, restarts=1)
    lines, others = [], []
    for line in run.text.splitlines():
        (lines if line.startswith("{") else others).append(line)
    found = told("\n".join(lines))
    assert all({"time", "level", "rank", "step", "message"} <= set(line) for line in found)
    assert not [line for line in others if is_ours(line)], others
    [raised] = [line for line in found if line["level"] == "critical"]
    assert raised["rank"] == 1 and raised["step"] == 30 and "DrillError" in raised["message"]
    assert raised["traceback"].count("raised on purpose") >= 1
    said = [(line["incident"], line["step"]) for line in found if "incident" in line]
    crashes = [one for one in said if one[0] == "crash"]
    assert len(crashes) in (1, 2), "when it happens, and by the start that journals it"
    kinds = {"discard", "rollback", "episode"}
    journalled = [(line["kind"], line["step"]) for line in run.journal() if line["kind"] in kinds]
    assert sorted(one for one in said if one[0] in kinds) == sorted(journalled)
    assert {kind for kind, _ in journalled} >= {"discard", "rollback"}
    (end,) = [line for line in found if "summary" in line]
    assert end["level"] == "info" and end["summary"]["state digest"]
    assert [line["step"] for line in found if line["message"].startswith("step ")][-1] == 40


def is_ours(line: str) -> bool:
    """torchrun's own lines: its log, the table of failures, and what it logs of a failure."""
    return bool(re.search(r"^holdfast\b|^! step|^step \d|^error: |^warning: |\[rank|│", line))
