"""track.command: once for each incident, with the line on its input, and never in the way."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from runner.observe import tracker
from runner.observe.journal import Journal
from runner.observe.tracker import CommandAlerts
from runner.policy.decision.history import Incident
from runner.system.json_lines import LineFile
from tests.made_run import incident


def alerts_of(command: str, folder: Path) -> CommandAlerts:
    return CommandAlerts(command, folder, name="run", state=folder / "alerts.json")


def keep(path: Path) -> str:
    """A command that adds the line on its input to a file."""
    return f"read -r line; printf '%s\\n' \"$line\" >> {shlex.quote(str(path))}"


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def happened(kind: str, step: int = 5, **more: Any) -> Incident:
    return Incident(kind=kind, step=step, decision="discard", reason="loss nan", **more)


def test_each_incident_is_told_once(tmp_path: Path) -> None:
    alerts = alerts_of(keep(tmp_path / "told"), tmp_path)
    journal = Journal(
        [], told_to_skip=[], file=LineFile(tmp_path / "j", length=0), tell=alerts.tell
    )
    for one in (happened("start"), happened("replica_mismatch"), happened("episode")):
        journal.add(one)
    journal.add_once(happened("straggler", step=7, ranks=(1,)))
    journal.add_once(happened("straggler", step=7, ranks=(1,)))
    alerts.close()
    found = told(tmp_path / "told")
    assert [line["kind"] for line in found] == ["replica_mismatch", "straggler"]
    assert [line["level"] for line in found] == ["error", "warning"]
    assert found[1]["ranks"] == [1] and found[1]["seq"] == 3 and found[1]["out"] == str(tmp_path)
    assert "step 7 straggler: loss nan -> discard" in found[1]["text"]
    assert alerts.loss is None


def test_a_line_that_was_there_is_not_told_again(tmp_path: Path) -> None:
    alerts = alerts_of(keep(tmp_path / "told"), tmp_path)
    old = incident("replica_mismatch", 3)
    Journal([old], told_to_skip=[], file=LineFile(tmp_path / "j", length=0), tell=alerts.tell).add(
        happened("straggler")
    )
    alerts.close()
    assert [line["kind"] for line in told(tmp_path / "told")] == ["straggler"]


def test_a_command_that_hangs_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "_COMMAND_SECONDS", 1.0)
    monkeypatch.setattr(tracker, "_MOST_ALERTS", 3)
    alerts = alerts_of(f"sleep 600; {keep(tmp_path / 'told')}", tmp_path)
    for step in range(500):  # were one waited for, nothing would pile up
        alerts.tell(incident(f"kind{step}", step))
    assert alerts.loss is not None and "too much is waiting" in alerts.loss.reason
    assert alerts.loss.outlet == "track.command"


def test_a_command_that_fails_is_told_and_not_alerted_of(tmp_path: Path) -> None:
    alerts = alerts_of("echo no such channel >&2; exit 7", tmp_path)
    alerts.tell(incident("straggler", 1))
    alerts.close()
    assert "ended with 7: no such channel" in alerts.loss.reason
    before = alerts._num_told
    alerts.tell(incident("output_lost", 1, detail={"output": "track.command"}))
    assert alerts._num_told == before
    alerts.tell(incident("output_lost", 1, detail={"output": "standard output"}))
    assert alerts._num_told == before + 1


def test_the_last_words_of_a_process_are_begun_before_it_goes(tmp_path: Path) -> None:
    alerts = alerts_of(f"sleep 0.3; {keep(tmp_path / 'told')}", tmp_path)
    alerts.tell(incident("crash", 9))
    assert alerts._num_begun == 1, "it outlives this process now"


def test_one_message_an_episode_and_one_when_it_is_over_also_across_a_restart(
    tmp_path: Path,
) -> None:
    now = [100.0]
    for kinds in (("discard", "redo"), ("rollback", "discard", "straggler")):
        alerts = CommandAlerts(
            keep(tmp_path / "told"), tmp_path, name="run", state=tmp_path / "state",
            clock=lambda: now[0],
        )  # fmt: skip
        for kind in kinds:
            alerts.tell(incident(kind, 5))
        alerts.close()
    for step in range(6, 60):
        now[0] += 10.0
        alerts.applied(step)
    alerts.close()
    found = told(tmp_path / "told")
    assert [(one["event"], one["kind"]) for one in found] == [
        ("trigger", "discard"), ("notice", "straggler"), ("resolve", "recovered"),
    ]  # fmt: skip
    assert found[0]["key"] == found[2]["key"] != found[1]["key"]
    assert "step 41 recovered: over: clean after discard x2, rollback" in found[2]["text"]
    alerts.tell(incident("discard", 61))
    alerts.done(62)
    alerts.close()
    assert [one["event"] for one in told(tmp_path / "told")[3:]] == ["trigger", "resolve"]
