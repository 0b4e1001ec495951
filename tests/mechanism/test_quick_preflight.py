"""The questions of a start leave every random generator as it was."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runner.config.compose import compose
from runner.data.dataset import Sample
from runner.distributed.env import RankEnv
from runner.session import begin
from runner.startup.checks import TrialBatch
from tests.observed import observers


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


class Drawing:
    """Samples of a user's, which draw from each generator when they are read."""

    vocab_size = 64

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Sample:
        drawn()
        return Sample(tokens=np.arange(17, dtype=np.int64), segments=None)


def test_reading_two_samples_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = SimpleNamespace
    asked: list[Any] = []

    def checks(engine: Any, subject: TrialBatch) -> list[Any]:
        asked.append(subject.batch)
        drawn()  # a model of the user's may, too
        return []

    monkeypatch.setattr(begin, "sanity_checks", checks)
    settings = ["out=unused", "model=tiny", "data.seq_len=16", "debug.preflight=true"]
    config = compose([*settings, "parallel=single", "compute.precision=fp32"])
    run = one(
        engine=one(works_a_step=1),
        resumed=one(step=0, is_fresh=True),
        observers=observers(),
        group=one(
            device=torch.device("cpu"),
            place=RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1),
        ),
        corpus=one(dataset=Drawing(), network=one(untrained_loss=4.0)),
    )
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    usual = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    begin.quick_preflight(run, config)
    assert len(asked) == 1
    assert drawn() == usual
