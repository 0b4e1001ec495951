"""What ``runner/launch/agent.py`` replaces of torch's: an upgrade that moves it fails here.

torch promises none of it. If the name went away, or were called at another moment, a node that was
cut off would find the rendezvous closed for good, and only a lost node would show it.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import RendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.launcher import api
from torch.distributed.run import main as torchrun_main

from runner.launch import agent


def test_the_method_is_there_with_the_signature_that_we_give_it() -> None:
    theirs = inspect.signature(agent._close)
    assert agent._close.__qualname__ == "DynamicRendezvousHandler.shutdown"
    assert agent._close is DynamicRendezvousHandler.__dict__["shutdown"]
    assert list(theirs.parameters) == list(inspect.signature(agent.shutdown).parameters) == ["self"]
    assert theirs.return_annotation in (bool, "bool")
    assert callable(torchrun_main)


def test_it_closes_the_rendezvous() -> None:
    """What our method keeps from happening, by torch's own names."""
    told: list[str] = []
    handler = SimpleNamespace(
        _stop_heartbeats=lambda: told.append("heartbeats"), _close=lambda: told.append("closed")
    )
    assert agent._close(handler) is True  # type: ignore[arg-type]
    assert told == ["heartbeats", "closed"]


def test_the_rendezvous_that_we_ask_for_is_one_of_these() -> None:
    """``--rdzv-backend=c10d`` of :func:`runner.launch.torchrun.command`."""
    assert issubclass(DynamicRendezvousHandler, RendezvousHandler)
    made = inspect.signature(registry._create_c10d_handler).return_annotation
    assert made in (RendezvousHandler, "RendezvousHandler")
    assert "create_handler(" in inspect.getsource(registry._create_c10d_handler)
    create = inspect.signature(registry.create_handler).return_annotation
    assert create in (DynamicRendezvousHandler, "DynamicRendezvousHandler")


@pytest.mark.parametrize("ends", ["well", "with a failed rank", "with an error of its own"])
def test_the_launcher_calls_it_at_its_end_while_the_error_passes_by(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real ``launch_agent`` around an agent that only ends, with our method in its place."""
    closed: list[Any] = []
    handler = object.__new__(DynamicRendezvousHandler)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="none")
    error = {
        "well": None,
        "with a failed rank": ChildFailedError("x", {0: failure}),
        "with an error of its own": RuntimeError("lost"),
    }[ends]

    class Agent:
        def __init__(self, **given: Any) -> None:
            assert given["spec"].rdzv_handler is handler

        def run(self) -> Any:
            if error is not None:
                raise error
            return SimpleNamespace(is_failed=lambda: False, return_values={})

        def get_event_failed(self) -> Any:
            return self.get_event_succeeded()

        def get_event_succeeded(self) -> Any:
            return api.events.Event(name="end", source=api.events.EventSource.AGENT)

    monkeypatch.setattr(api, "LocalElasticAgent", Agent)
    monkeypatch.setattr(api.rdzv_registry, "get_rendezvous_handler", lambda _: handler)
    monkeypatch.setattr(agent, "_close", lambda one: bool(closed.append(one)) or True)
    monkeypatch.setattr(DynamicRendezvousHandler, "shutdown", agent.shutdown)
    config = api.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=1,
        run_id="contract",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    raised: BaseException | None = None
    try:
        api.launch_agent(config, "true", [])
    except (ChildFailedError, RuntimeError) as caught:
        raised = caught
    assert raised is error
    assert closed == ([handler] if error is None else [])


def failure(code: int) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=70, exitcode=code, error_file="none")


def test_failed_ranks_are_one_line_and_the_first_to_fail_comes_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failures = {rank: failure(2) for rank in range(12)}
    failures[3].timestamp -= 60
    failures[3].exitcode = -9
    error = ChildFailedError("runner", failures)

    def fail(_: Any) -> None:
        raise error

    monkeypatch.setattr(agent, "main", fail)
    assert agent.run(["--standalone", "-m", "runner"]) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("torchrun: rank 3 (pid 70) was killed by SIGKILL, rank 0 (pid 70) ended")
    assert line.endswith("rank 7 (pid 70) ended with exit code 2, 4 more")


@pytest.mark.parametrize(("nodes", "stays_open"), [("1", False), ("2", True), ("1:2", True)])
def test_several_nodes_need_an_open_rendezvous(
    nodes: str, stays_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (
        (DynamicRendezvousHandler, "shutdown"),
        (SimpleElasticAgent, "_restart_workers"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # run() replaces both: put back later
    monkeypatch.setattr(agent, "main", lambda _: None)
    assert agent.run([f"--nnodes={nodes}", "-m", "runner"]) == 0
    assert (DynamicRendezvousHandler.shutdown is agent.shutdown) is stays_open
