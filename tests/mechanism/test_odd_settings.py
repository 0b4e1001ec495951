"""Settings that deserve a second look are named; usual ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.config.compose import compose
from runner.config.validate import odd_settings
from tests.run import finish


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["optim=lion"], []),
        (["optim=muon"], []),
        (["optim._target_=torch.optim.SGD", "optim.lr=0.5"], []),
        (["steps=60", "schedule.warmup=5"], []),
        (["optim.beta2=0.8"], ["optim.beta2=0.8"]),
        (["optim.beta2=0.99", "steps=1001"], ["schedule.warmup=20"]),
        (["optim.beta2=0.99", "steps=1001", "schedule.warmup=100"], []),
        (["optim.clip=0", "optim.lr=0.1"], ["optim.clip=0", "optim.lr=0.1"]),
        (["schedule.warmup=500", "steps=60"], ["schedule.warmup=500"]),
        (["guard=off"], ["guard.enabled=false"]),
    ],
)
def test_what_is_odd(overrides: list[str], words: list[str]) -> None:
    found = odd_settings(compose(overrides))
    assert [sentence.partition(":")[0] for sentence in found] == words


def test_it_is_said_once(tmp_path: Path) -> None:
    told = ("steps=20", "schedule.total=40", "optim.clip=0", "parallel=single")
    assert finish(tmp_path / "run", *told, ranks=0).text.count("warning: optim.clip=0: one") == 1
    again = finish(tmp_path / "run", *told, "steps=22", ranks=0)
    assert "optim.clip=0" not in again.text, again.tail
