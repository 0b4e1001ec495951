"""A node whose hardware is at fault leaves a run that can go on without it."""

from __future__ import annotations

import inspect
import json
import os
import socket
import subprocess
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from runner.launch import agent
from runner.launch.crash_evidence import BadNodes, evidence, has_to_leave, refuse_listed
from runner.launch.stand_by import hosting_command
from runner.system.error import ConfigError


def journal(out: Path, *, cause: str = "hardware", host: str = "b", hosts: str = "ab") -> None:
    """Append a start on ``hosts`` (a letter each) and its crash."""
    ranks = {name: [number] for number, name in enumerate(hosts)}
    lines = [
        {"kind": "start", "step": 0, "detail": {"hosts": ranks}},
        {"kind": "crash", "step": 9, "reason": "x", "detail": {"cause": cause, "host": host}},
    ]
    out.mkdir(exist_ok=True)
    with (out / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.mark.parametrize(
    ("facts", "node", "least", "leaves"),
    [
        ({}, "b", 1, True),
        ({"host": "b.cluster"}, "b.local", 1, True),
        ({}, "a", 1, False),
        ({"cause": "memory"}, "b", 1, False),
        ({"hosts": "b"}, "b", 1, False),
        ({"hosts": "abc"}, "b", 2, True),
        ({}, "b", 2, False),
    ],
)
def test_it_leaves_where_enough_others_are_left(
    facts: dict[str, str], node: str, least: int, leaves: bool, tmp_path: Path
) -> None:
    journal(tmp_path, **facts)
    assert has_to_leave(evidence(tmp_path, since=0), node=node, least=least) is leaves
    earlier = evidence(tmp_path, since=2)
    assert not has_to_leave(earlier, node=node, least=least), "of an earlier attempt"


@pytest.mark.parametrize("first", ["b", "a"])
def test_it_leaves_whatever_ended_another_start_of_the_attempt(first: str, tmp_path: Path) -> None:
    """torchrun may have started the ranks again, before the fault or on the others after it."""
    for host in (first, "b" if first == "a" else "a"):
        journal(tmp_path, host=host, cause="hardware" if host == "b" else "lost")
    told = evidence(tmp_path, since=0)
    assert has_to_leave(told, node="b", least=1) and not has_to_leave(told, node="a", least=1)


def test_a_listed_node_is_refused_until_its_line_is_deleted(tmp_path: Path) -> None:
    refuse_listed(tmp_path, "b")
    BadNodes(tmp_path).add(["b"], "hardware: rank 1")
    refuse_listed(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"b\.local is listed in .*bad_nodes .*hardware: rank 1"):
        refuse_listed(tmp_path, "b.local")
    (tmp_path / "bad_nodes").write_text("")
    refuse_listed(tmp_path, "b")


def test_torchrun_restarts_its_ranks_by_the_method_that_we_replace() -> None:
    """torch does not promise it: without it a bad node would go on until the restarts are spent."""
    assert agent._restart is SimpleElasticAgent.__dict__["_restart_workers"]
    assert list(inspect.signature(agent._restart).parameters) == ["self", "worker_group"]
    assert "self._restart_workers(self._worker_group)" in inspect.getsource(
        SimpleElasticAgent._invoke_run
    )


def test_the_agent_of_a_bad_node_stops_its_ranks_and_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    monkeypatch.setattr(agent, "_restart", lambda self, group: did.append("restarted"))
    one: Any = SimpleNamespace(_stop_workers=lambda group: did.append("stopped"))
    group: Any = None
    journal(tmp_path, host=os.uname().nodename)
    restart = agent.restart_or_leave(tmp_path, 1, f"file:{tmp_path / 'leave'}")
    restart(one, group)
    assert did == ["restarted"], "the crash was there before"
    journal(tmp_path, host="elsewhere")
    restart(one, group)
    journal(tmp_path, host=os.uname().nodename)
    with pytest.raises(agent.LeftOutError, match="leaves the run: its hardware is at fault"):
        restart(one, group)
    assert did == ["restarted", "restarted", "stopped"]
    (tmp_path / "leave").touch()
    with pytest.raises(agent.LeftOutError, match="leaves the run: a notice"):
        restart(one, group)


def test_the_head_keeps_the_meeting_point_until_the_run_ends(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    held = subprocess.Popen(hosting_command(tmp_path, ("localhost", port)))
    try:
        store = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60))
        store.set("round", "1")
        assert store.get("round") == b"1" and held.poll() is None
        (tmp_path / "summary.json").write_text(json.dumps({"status": "failed"}))
        with pytest.raises(subprocess.TimeoutExpired):
            held.wait(2)
        (tmp_path / "summary.json").write_text(json.dumps({"status": "done"}))
        with pytest.raises(subprocess.TimeoutExpired):
            held.wait(3)  # the nodes wait for each other's end here
        store.set("last", "1")
        assert held.wait(60) == 0
    finally:
        held.kill()
        held.wait()
