"""Stages of a pipeline: what is given as one, and the state of all of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner import Guard
from runner.embed.opening import SingleProcessRanks
from runner.embed.state.stages import Stages, merged
from runner.system.error import ConfigError


def state(name: str, *, lr: float = 0.1) -> dict[str, Any]:
    return {
        "optimizers": [
            {
                "states": {name: {"step": 3}},
                "groups": [{"lr": lr}, {"lr": 2 * lr}],
                "members": [[name], []],
                "first": [[], [name]],
            }
        ],
        "world_size": 2,
        "modes": {"frozen": [name], "evaluating": []},
        "modules": {"extra": {}, "counters": {name: {"calls": 1}}},
    }


def test_the_stages_together_are_as_one_rank_with_all() -> None:
    both = merged([state("a"), state("b")])
    optimizer = both["optimizers"][0]
    assert optimizer["members"] == [["a", "b"], []] and optimizer["first"] == [[], ["a", "b"]]
    assert set(optimizer["states"]) == {"a", "b"} == set(both["modules"]["counters"])
    assert optimizer["groups"] == [{"lr": 0.1}, {"lr": 0.2}]
    assert both["modes"]["frozen"] == ["a", "b"] and both["world_size"] == 2


def test_other_options_on_another_stage_are_refused() -> None:
    with pytest.raises(ConfigError, match="give the groups of all stages the same"):
        merged([state("a"), state("b", lr=0.2)])


def test_what_is_no_pipeline_is_refused(tmp_path: Any) -> None:
    wrong: Any = "pp"
    with pytest.raises(ConfigError, match=r"pipeline=pp: must be a DeviceMesh of one dimension"):
        Stages(SingleProcessRanks(), wrong)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(tmp_path / "out", model=model, optimizer=optimizer)
    for batch in guard.over([torch.ones(1, 2)]):
        model(batch).sum().backward()
        with pytest.raises(ConfigError, match="the loss is NoneType None"):
            guard.ok(None)
        guard.ok(1.0)
    guard.close()


@pytest.mark.usefixtures("alone")
def test_a_placeholder_that_keeps_something_is_state(tmp_path: Path) -> None:
    """Identity stands for a layer of another stage; what it holds is saved like any module's."""

    def built() -> torch.nn.Sequential:
        model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Identity())
        model[1].register_buffer("seen", torch.zeros(()))
        model[1].register_forward_hook(lambda module, *_: module.seen.add_(1) and None)
        return model

    def guarded(model: torch.nn.Module) -> Guard:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Guard(tmp_path / "out", model=model, optimizer=optimizer)

    model = built()
    model[1].eval()
    guard, bad = guarded(model), torch.full((1, 2), float("nan"))
    for batch in guard.over([torch.ones(1, 2), bad, torch.ones(1, 2)]):
        loss = model(batch).sum()
        loss.backward()
        guard.ok(loss)
    guard.close()
    assert float(model[1].seen) == 2, "the refused step has left no trace"
    again = built()
    guarded(again).close()
    assert float(again[1].seen) == 2 and not again[1].training
