"""What ``runner/launch/agent.py`` replaces of torch's: an upgrade that moves it fails here.

torch promises none of it. If the name went away, or were called at another moment, a node that was
cut off would find the rendezvous closed for good, and only a lost node would show it.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
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
