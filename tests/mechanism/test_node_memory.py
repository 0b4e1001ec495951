"""``cluster.nodes``: what is remembered of hosts, by several jobs, on a disk that may fail."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from runner.__main__ import main
from runner.config.compose import compose
from runner.health import rank_checks
from runner.launch import node_memory as module
from runner.launch import stand_by as module_of_stand_by
from runner.launch.attempt import Stop
from runner.launch.crash_evidence import node_events
from runner.launch.node_memory import NodeFolder, NodeMemory
from runner.launch.stand_by import Present, StandBy
from runner.launch.torchrun import Agent, parse_nodes
from runner.policy.nodes import DIED, PASSED, SLOW, NodeEvent
from runner.policy.restart import HARDWARE

Say = list[str]


def memory(folder: Path, said: Say | None = None) -> NodeMemory:
    say = (lambda text: None) if said is None else said.append
    return NodeMemory(folder, 30.0, run="run", say=say)


WRITER = """
import sys, time
from pathlib import Path
from runner.launch.node_memory import NodeFolder
from runner.policy.nodes import NodeEvent
folder, job, began = NodeFolder(Path(sys.argv[1])), sys.argv[2], float(sys.argv[3])
for number in range(60):
    folder.add(NodeEvent(host=f"h{number % 3}", kind="died", time=began + number, run=job))
    folder.add(NodeEvent(host="both", kind="died", time=began + number, run="shared"))
"""


def test_two_jobs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    folder, began = tmp_path / "nodes", str(time.time())
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folder), job, began])
        for job in ("one", "two")
    ]
    while any(writer.poll() is None for writer in writers):
        NodeFolder(folder).events()  # a reader never meets half an event
    assert [writer.returncode for writer in writers] == [0, 0]
    events = NodeFolder(folder).events()
    by_run = {run: sum(event.run == run for event in events) for run in ("one", "two", "shared")}
    assert by_run == {"one": 60, "two": 60, "shared": 60}, "one crash told by two is one"
    assert len(NodeFolder(folder).events(["h1"])) == 40
    assert all(path.suffix == ".json" for path in folder.iterdir()), "no draft is left"


def test_old_events_go_and_a_cleared_host_is_forgotten(tmp_path: Path) -> None:
    folder = NodeFolder(tmp_path)
    old, new = time.time() - 400 * 86400, time.time()
    for host in ("a", "a-b"):
        folder.add(NodeEvent(host=host, kind=DIED, time=old))
        folder.add(NodeEvent(host=host, kind=DIED, time=new))
    assert sorted(event.host for event in folder.events()) == ["a", "a-b"]
    (tmp_path / "a-torn.json").write_text('{"host": "a"')
    assert folder.clear("a") == 2
    assert [event.host for event in folder.events()] == ["a-b"]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff\xfe", b"[]", b'{"host": 3}', b"x" * 20000,
        b'{"host":"a","kind":"other","time":1,"reason":"","run":""}',
        b'{"host":"a","kind":"died","time":"soon","reason":"","run":""}',
        b'{"host":"a","kind":"died","time":1e999,"reason":"","run":""}',
    ],
)  # fmt: skip
def test_what_is_torn_or_not_ours_is_passed_over(data: bytes, tmp_path: Path) -> None:
    said: Say = []
    known = memory(tmp_path, said)
    (tmp_path / "a-0.json").write_bytes(data)
    (tmp_path / "a-1.json").mkdir()
    assert known.standing("a").faults == 0
    known.note("a", HARDWARE, "ECC")
    assert known.standing("a.cluster").faults == 1 and said == []


def refusing(number: int) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.ESTALE])
def test_what_cannot_be_written_is_written_later(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Say = []
    known = memory(tmp_path, said)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refusing(number))
        known.note("a", HARDWARE, "first")
        known.note("a", HARDWARE, "second")
    assert len(said) == 1 and "the run goes on without" in said[0], said
    assert list(tmp_path.iterdir()) == []
    known.note("a", HARDWARE, "third")
    assert known.standing("a").faults == 3


def test_a_folder_that_cannot_be_one_is_told_once(tmp_path: Path) -> None:
    said: Say = []
    (tmp_path / "file").write_text("")
    known = memory(tmp_path / "file" / "nodes", said)
    for _ in range(3):
        known.note("a", HARDWARE, "ECC")
        assert not known.standing("a").faults
    assert len(said) == 1


def test_a_disk_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Say = []
    answers = threading.Event()
    monkeypatch.setattr(module, "_WAIT_SECONDS", 0.05)
    known = memory(tmp_path, said)
    with monkeypatch.context() as gone:
        gone.setattr(os, "fsync", lambda number: answers.wait(60))
        known.note("a", HARDWARE, "ECC")
        assert not known.standing("a").faults
        known.note("a", HARDWARE, "again")
        assert len(said) == 1 and "no answer within" in said[0]
        answers.set()
    limit = time.monotonic() + 30
    while known.standing("a").faults < 2 and time.monotonic() < limit:
        known.ask(known._write)
    assert known.standing("a").faults == 2, "and what it kept is not lost"


def journal(out: Path, *lines: dict[str, Any]) -> None:
    out.mkdir(exist_ok=True)
    with (out / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": 7.5, "reason": "r"} | line) + "\n" for line in lines)


START = {"kind": "start", "detail": {"hosts": {"a": "0-1", "b": "2,3"}}}


def crash(cause: str, *ranks: int, host: str = "") -> dict[str, Any]:
    return {"kind": "crash", "ranks": list(ranks), "detail": {"cause": cause, "host": host}}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (crash("hardware", 2, host="b"), [("b", HARDWARE)]),
        (crash("silence", 2, 3), [("b", DIED)]),
        (crash("silence", 2), []),  # one rank was killed: no node's fault
        (crash("silence"), []),  # all at once
        (crash("silence", 0, 1, 2, 3), []),
        (crash("exception", 2, host="b"), []),
        ({"kind": "straggler", "ranks": [1]}, [("a", SLOW)]),
        ({"kind": "replica_mismatch", "ranks": [3]}, [("b", HARDWARE)]),
        ({"kind": "replica_mismatch", "ranks": [0, 3]}, []),  # nobody knows which
        ({"kind": "discard", "ranks": [3]}, []),
        ({"kind": "straggler", "ranks": 1}, []),  # torn, or not ours
        ({"kind": "straggler", "ranks": [1], "time": "soon"}, []),
        ({"kind": "crash", "detail": ["hardware"]}, []),
    ],
)
def test_the_journal_tells_what_happened_to_a_host(
    line: dict[str, Any], told: list[tuple[str, str]], tmp_path: Path
) -> None:
    journal(tmp_path, START, line)
    assert [event[:2] for event in node_events(tmp_path, since=1)] == told
    assert node_events(tmp_path, since=2) == []


def test_of_a_world_of_one_host_its_hardware_is_remembered(tmp_path: Path) -> None:
    one = {"kind": "start", "detail": {"hosts": {"a": "0-1"}}}
    journal(tmp_path, one, crash("hardware", 1, host="a"))
    assert node_events(tmp_path, since=0) == [("a", HARDWARE, "r", 7.5)]


def test_the_check_names_a_device_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_checks.burn_in(0.0) == ""
    bits = iter([["x", "y"]])
    monkeypatch.setattr(rank_checks, "_products", lambda device, is_spoilt: next(bits))
    assert "other bits for the same product" in rank_checks.burn_in(0.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL", 0.05), ("BEAT", 0.05), ("GONE", 0.5), ("TOGETHER", 1.0)):
        monkeypatch.setattr(module_of_stand_by, f"_{name}_SECONDS", seconds)


def stand_by(known: NodeMemory, host: str, said: Say, *, count: int = 2, **rules: float) -> StandBy:
    """Of one that must be better than patience; the run is ``run`` beside the folder."""
    defaults = {"patience_seconds": 600.0, "burn_in_seconds": 0.0}
    told = [f"cluster.{name}={value}" for name, value in (defaults | rules).items()]
    config = compose([f"out={known.folder.parent / 'run'}", *told])
    agent = Agent(nodes=parse_nodes(str(count)), num_ranks=1, head=None, name="n")
    return StandBy(config, known, agent, {**os.environ, "SLURMD_NODENAME": host}, said.append)


def failed(tmp_path: Path, *hosts: str, is_tested: bool = True) -> NodeMemory:
    known = memory(tmp_path / "nodes")
    for host in hosts:
        known.note(host, HARDWARE, "ECC")
        if is_tested:
            known.note(host, PASSED, "")
    return known


def test_a_host_without_spares_is_checked_and_goes_on(tmp_path: Path) -> None:
    said: Say = []
    known = memory(tmp_path / "nodes")
    assert stand_by(known, "a", said).wait(Stop()) is None and said == [], "nothing is known of it"
    known = failed(tmp_path, "a", is_tested=False)
    assert stand_by(known, "a", said).wait(Stop()) is None
    assert known.standing("a").is_tested
    assert said == ["a failed before (ECC), and takes part: no better node is free"]
    one = stand_by(known, "a", said, count=1)
    assert one.wait(Stop()) is None, "a run of one node has no spares"


def test_the_worst_of_too_many_stands_by_until_one_of_the_others_leaves(tmp_path: Path) -> None:
    said, ends = Say(), dict[str, Any]()
    failed(tmp_path, "a", "b", "b")
    nodes = {host: stand_by(memory(tmp_path / "nodes"), host, said) for host in "abc"}

    def wait(host: str) -> None:
        ends[host] = nodes[host].wait(Stop())

    for host in "abc":
        threading.Thread(target=wait, args=host, daemon=True).start()
    until(lambda: len(ends) == 2)
    assert set(ends) == {"a", "c"}, said
    until(lambda: "b failed before (ECC), and lets other nodes go first" in said)
    nodes["c"].close(Stop())
    until(lambda: "b" in ends)
    assert (
        ends["b"] is None
        and said[-1] == "b failed before (ECC), and takes part: no better node is free"
    )
    for node in nodes.values():
        node.close(Stop())
    assert not list((tmp_path / "nodes" / "launched").glob("*/*")), "they have left"


def until(seen: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not seen():
        assert time.monotonic() < limit
        time.sleep(0.02)


def spares(known: NodeMemory, *hosts: str) -> list[Present]:
    return [Present(known.folder / "launched" / known.run, host) for host in hosts]


def test_better_nodes_that_do_not_begin_starve_no_run(tmp_path: Path) -> None:
    known, said = failed(tmp_path, "a"), Say()
    others = spares(known, "b", "c")
    until(lambda: len(others[0].hosts()) == 2)
    assert stand_by(known, "a", said, patience_seconds=0.3).wait(Stop()) is None
    assert said[-1].endswith("takes part: the run does not move without it"), said
    for other in others:
        other.close()


def test_a_host_that_is_gone_without_a_word_is_not_waited_for(tmp_path: Path) -> None:
    known, said = failed(tmp_path, "a"), Say()
    others = spares(known, "b", "c")
    until(lambda: len(others[0].hosts()) == 2)
    (tmp_path / "nodes" / "launched" / "run" / "killed").touch()
    others[0].close()
    assert stand_by(known, "a", said).wait(Stop()) is None
    assert said[-1].endswith("takes part: no better node is free"), said
    others[1].close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo rank 0 on a: its device gives other bits", "other bits"),
        ("echo CUDA error: uncorrectable ECC error encountered >&2\nexit 1", "uncorrectable ECC"),
        ("echo no torch here >&2\nexit 1", ""),  # what cannot be made proves nothing
    ],
)
def test_a_host_that_fails_the_check_takes_no_part(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = failed(tmp_path, "a", is_tested=False)
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    end = stand_by(known, "a", [], count=1).wait(Stop())
    assert words in (end.reason if end else "") and (end is None) == (not words), end
    assert end is None or end.code == 1
    found = known.standing("a")
    assert found.faults == (2 if words else 1) and not found.is_tested


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("halted", 3)])
def test_it_ends_with_a_run_that_ended_without_it(status: str, code: int, tmp_path: Path) -> None:
    known, out, said = failed(tmp_path, "a"), tmp_path / "run", Say()
    out.mkdir()
    (out / "summary.json").write_text(json.dumps({"status": status, "of": "an earlier launch"}))
    others = spares(known, "b", "c")
    until(lambda: len(others[0].hosts()) == 2)
    ends: list[Any] = []
    one = stand_by(known, "a", said)
    threading.Thread(target=lambda: ends.append(one.wait(Stop())), daemon=True).start()
    until(lambda: len(said) > 0)
    assert ends == [], "the old summary is no end"
    (out / "summary.json").write_text(json.dumps({"status": status}))
    until(lambda: len(ends) > 0)
    assert ends[0].code == code, said
    for other in others:
        other.close()


def test_a_stop_ends_the_waiting(tmp_path: Path) -> None:
    stop = Stop()
    stop.ask(15)
    end = stand_by(failed(tmp_path, "a"), "a", []).wait(stop)
    assert end is not None and end.code == 75


def test_the_command_shows_and_forgets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    known = memory(tmp_path)
    known.note("gpu1", DIED, "did not answer")
    known.note("gpu2", SLOW, "[bold]slow[/bold]")
    known.note("gpu2", PASSED, "")
    assert main(["nodes", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "to be checked" in shown and "others first until" in shown and "[bold]" in shown
    assert shown.index("gpu1") < shown.index("gpu2"), "the worst first"
    assert main(["nodes", str(tmp_path), "clear", "gpu1"]) == 0
    assert "gpu1: 1 events forgotten" in capsys.readouterr().out
    assert main(["nodes", str(tmp_path), "clear", "gpu2.cluster.example"]) == 0
    assert "gpu2: 2 events forgotten" in capsys.readouterr().out
    assert main(["nodes", str(tmp_path)]) == 0
    assert "nothing has happened to any host" in capsys.readouterr().out
    assert main(["nodes", str(tmp_path), "clear"]) == 2
    (tmp_path / "file").write_text("")
    for name in ("none", "file"):
        assert main(["nodes", str(tmp_path / name)]) == 2
        assert f"{name} is no folder; name that of cluster.nodes" in capsys.readouterr().err


def test_the_nodes_meet_on_while_the_storage_is_away() -> None:
    """The place is a process of a node that stands by; it ends with the run."""
    stale = Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
    run: Any = SimpleNamespace(stored_summary=lambda: None, metrics=SimpleNamespace(exists=stale))
    assert not module_of_stand_by._is_over(run, 0.0)
    run.metrics.exists = lambda: False
    assert module_of_stand_by._is_over(run, 0.0), "it has not moved for long"
