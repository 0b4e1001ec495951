"""What the recorder takes for a step's batch, in this process and without a hook."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.prove.inside.digests import Digests
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
    lines = (tmp_path / f"steps-{os.getpid()}.jsonl").read_text().splitlines()
    assert [json.loads(line)["batches"] for line in lines] == [[digest(BATCHES[read])]] * 2
