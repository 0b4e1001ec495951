"""A job step that lasts over attempts: what it is told, and when it is a new one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.launch.slurm import NODE_COMMAND, JobStep
from runner.system.parsing import parse_json
from tests.waiting import until

# A process of the step: writes what it is told and what it reads as its own input, a line an order.
NODE = """
import json, os, sys
from runner.launch.slurm import orders
for words in orders():
    named = [os.environ[name] for name in ("HOLDFAST_EXIT_DIR", "KEPT")]
    row = [os.getpid(), words, *named, sys.stdin.read()]
    with open(sys.argv[2], "a") as file:
        file.write(json.dumps(row) + "\\n")
"""


class Nodes:
    """Starts attempts in a step of one process, and reads what that was told."""

    def __init__(self, told: Path) -> None:
        self.step = JobStep()
        self.told = told

    def attempt(self, *words: str, where: str = "a", number: int = 1) -> Any:
        command = [sys.executable, "-c", NODE, where, str(self.told), NODE_COMMAND, *words]
        env = dict(os.environ) | {"HOLDFAST_EXIT_DIR": f"exits-{number}", "KEPT": f"as {number}"}
        return self.step.popen(command, env=env, is_asked_to_stop=lambda: False)

    def rows(self, count: int) -> list[list[Any]]:
        until(lambda: self.told.exists() and self.told.read_text().count("\n") >= count)
        return [parse_json(line.encode()) for line in self.told.read_text().splitlines()]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path / "told")
    yield made
    made.step.close()


def facts(rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    return [row[1:] for row in rows]


def test_attempts_on_the_same_nodes_share_a_step(nodes: Nodes) -> None:
    first = nodes.attempt("out=a b", number=1)
    nodes.rows(1)
    second = nodes.attempt("out=a b", "debug=collectives", number=2)
    rows = nodes.rows(2)
    assert first is second and rows[0][0] == rows[1][0]
    # Only the variables of the attempt are new, and the orders are nobody's input.
    assert facts(rows) == [
        [["out=a b"], "exits-1", "as 1", ""],
        [["out=a b", "debug=collectives"], "exits-2", "as 1", ""],
    ]
    nodes.step.close()
    assert first.returncode == 0


def test_other_nodes_or_a_dead_step_need_a_new_one(nodes: Nodes) -> None:
    first = nodes.attempt(number=1)
    nodes.rows(1)
    other = nodes.attempt(where="b", number=2)
    nodes.rows(2)
    assert first.returncode == 0 and other is not first
    other.kill()
    other.wait()
    third = nodes.attempt(where="b", number=3)
    rows = nodes.rows(3)
    assert len({row[0] for row in rows}) == 3 and third.poll() is None
    assert [row[2] for row in rows] == ["exits-1", "exits-2", "exits-3"]


def test_between_orders_a_request_to_stop_is_not_for_it(nodes: Nodes) -> None:
    """Slurm's step signals all its processes; a node whose part has ended waits on."""
    process = nodes.attempt(number=1)
    nodes.rows(1)
    time.sleep(0.2)  # it is back at its input
    process.send_signal(signal.SIGUSR1)
    assert nodes.attempt(number=2) is process
    assert len(nodes.rows(2)) == 2
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


def test_a_step_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.launch.slurm._END_SECONDS", 0.2)
    ready = tmp_path / "ready"
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " open(sys.argv[1], 'w').close(); time.sleep(600)"
    )
    step = JobStep()
    words = [sys.executable, "-c", code, str(ready), NODE_COMMAND]
    process = step.popen(words, env=os.environ, is_asked_to_stop=lambda: False)
    until(ready.exists)
    step.close()
    assert process.returncode == -signal.SIGKILL
