"""What the recorder takes for a step's batch and for copies; in this process, without a hook."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.prove.inside.digests import Digests
from runner.prove.inside.found import Found
from runner.prove.inside.hooks import Recorder

BATCHES = torch.arange(24.0).reshape(3, 4, 2)


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setenv("HOLDFAST_PROVE_PID", str(os.getpid()))
    monkeypatch.setenv("HOLDFAST_PROVE_OUT", str(tmp_path / "out"))
    control = {"stop": 100, "signal": 9, "ends": False}
    (tmp_path / "control.json").write_text(json.dumps(control))
    return Recorder(str(tmp_path))


def digest(batch: torch.Tensor) -> list[str]:
    rows: Any = Digests().rows([batch])
    return [f"{row & (1 << 64) - 1:x}" for row in rows.tolist()]


@pytest.mark.parametrize(
    ("calls", "read"),
    [
        pytest.param(["eval 0", "train 1", "train 2"], 1, id="an evaluation before it"),
        pytest.param(["eval 0", "eval 1"], 0, id="a model that never leaves evaluation mode"),
        pytest.param(["train 0", "eval 1", "train 2"], 0, id="a critic in between"),
    ],
)
def test_the_batch_of_a_step(
    calls: list[str], read: int, recorder: Recorder, tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the first one has calls in vain, which are noted apart
        for word in calls:
            mode, number = word.split()
            model.train(mode == "train")
            recorder.note_call(model, (BATCHES[int(number)],), {})
        loss = model(BATCHES[read]).sum()
        recorder.note_loss(loss)
        loss.backward()
        recorder.before_step(optimizer)
        optimizer.step()
        recorder.after_step(optimizer)
    assert [line["batches"] for line in lines(tmp_path)] == [[digest(BATCHES[read])]] * 2


def lines(folder: Path) -> list[dict[str, Any]]:
    written = (folder / f"steps-{os.getpid()}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in written]


def averages_of(kind: str, model: Any) -> tuple[Any, str]:
    """An object that holds them, and the label of the copy."""
    net = copy.deepcopy(model.net)
    held = {name: p.detach().clone() for name, p in net.named_parameters()}
    return {
        "a module": (net, "1 Sequential"),
        "with more than the model": (torch.nn.Sequential(OrderedDict(net=net)), "1 Sequential"),
        "a dictionary": (held, "1 dictionary of 4 tensors"),
        "a list": ([*held.values()], "1 list of 4 tensors"),
    }[kind]


@pytest.mark.parametrize("calls_itself", [False, True], ids=["", "the step calls the model"])
@pytest.mark.parametrize("kind", ["a module", "with more than the model", "a dictionary", "a list"])
def test_averages_of_a_part_of_the_model(
    kind: str, calls_itself: bool, recorder: Recorder, tmp_path: Path
) -> None:
    """``ema = copy.deepcopy(module.net)``, whose names lack what the model's begin with."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model = torch.nn.Sequential(OrderedDict(net=net))
    averages, label = averages_of(kind, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not calls_itself:
        recorder.note_call(model, (BATCHES[0],), {})
    recorder.before_step(optimizer)
    if calls_itself:
        recorder.note_call(model.net, (BATCHES[0],), {})
    model(BATCHES[0]).sum().backward()
    optimizer.step()
    recorder.after_step(optimizer)
    (line,) = lines(tmp_path)
    assert averages is not None and label in line["copies"] and len(line["copies"][label]) == 4
    begun = "" if calls_itself else "net."
    assert list(line["weights"]) == [f"{begun}{n}" for n, _ in net.named_parameters()]


def test_a_generator_that_moves_between_steps(recorder: Recorder, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 2:
            torch.rand(1)  # as for the order of an epoch
        recorder.note_call(model, (BATCHES[0],), {})
        torch.rand(1)  # as dropout does
        model(BATCHES[0]).sum().backward()
        recorder.before_step(optimizer)
        optimizer.step()
        recorder.after_step(optimizer)
    assert [line["between"] for line in lines(tmp_path)] == [[], [], ["torch"]]


def test_a_look_at_all_objects_wakes_none_of_them() -> None:
    """``torch.distributed.reduce_op`` warns of itself where its class is asked for."""
    model = torch.nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Found().look(dict(model.named_parameters()), [])
