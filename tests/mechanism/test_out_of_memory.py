"""What a start does after one that ran out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from runner import Guard
from runner.embed.loop.out_of_memory import MemoryPlan
from runner.policy.decision.history import Incident
from runner.system.error import ConfigError
from tests.observed import OneRank

pytestmark = pytest.mark.usefixtures("node_memory")


def crash(step: int, cause: str = "memory") -> Incident:
    return Incident(
        kind="crash", step=step, decision="", reason="out of memory", detail={"cause": cause}
    )


def started(world_size: int) -> Incident:
    return Incident(kind="start", step=0, decision="", reason="", detail={"world_size": world_size})


def plan(choice: str, incidents: list[Incident], others: Sequence[int] = ()) -> MemoryPlan:
    """
    Args:
        others: samples in the other ranks' batches.
    """

    class Uneven(OneRank):
        def gather(self, value: Any) -> list[Any]:
            return [value, *others]

    return MemoryPlan(choice, list(incidents), incidents.append, Uneven())


def test_each_crash_halves_once_from_its_step_on() -> None:
    journal = [crash(9), crash(12, "signal")]
    assert [plan("halve", journal).num_parts(step) for step in (8, 9, 20)] == [1, 2, 2]
    assert len(journal) == 3
    assert plan("halve", journal).num_parts(9) == 2 and len(journal) == 3  # settled already
    journal.append(crash(15))
    assert [plan("halve", journal).num_parts(step) for step in (8, 14, 15)] == [1, 2, 4]


def test_a_step_is_left_out_once() -> None:
    journal = [crash(9)]
    first = plan("skip", journal)
    assert [step for step in range(20) if first.leaves_out(step)] == [9]
    journal.append(first.left_out([8]))
    assert not first.leaves_out(9) and not plan("skip", journal).leaves_out(9)
    assert plan("raise", [crash(9)]).num_parts(9) == 1


def test_parts_of_what_a_loader_gives() -> None:
    half = plan("halve", [crash(1)])
    batch = {"x": torch.arange(5), "more": (torch.ones(5, 2), torch.tensor(3)), "name": "a"}
    (first, share), (second, rest) = half.split(batch, 1)
    assert first["x"].tolist() == [0, 1] and second["x"].tolist() == [2, 3, 4]
    assert second["more"][0].shape == (3, 2) and second["more"][1] == 3 and second["name"] == "a"
    assert (share, rest) == (0.4, 0.6)
    assert list(half.split("anything", 0)) == [("anything", 1.0)]


@pytest.mark.parametrize(("step", "world_size"), [(2, 1), (1, 3)], ids=["later", "other ranks"])
def test_a_batch_that_is_smaller_than_the_one_that_did_not_fit(step: int, world_size: int) -> None:
    """The last one of an epoch, or on more ranks: nothing shows that memory runs out with it."""
    journal = [started(world_size), crash(1), crash(1)]
    again = plan("halve", journal)
    assert [len(part) for part, _ in again.split(torch.ones(1, 3), step)] == [1]


def test_ranks_have_equally_many_parts_where_one_has_fewer_samples() -> None:
    journal = [crash(1)]
    plan("halve", journal)
    quarter = plan("halve", [*journal, crash(1)], others=[3])
    assert quarter.num_parts(1) == 4
    assert [len(part) for part, _ in quarter.split(torch.ones(4, 2), 1)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.ones(4), "y": torch.ones(3)}, r"have \[3, 4\] as their first dimension"),
        (["text"], r"have \[\] as their first dimension"),
        (torch.ones(1, 3), "a batch of 1 samples was computed in parts of one"),
    ],
)
def test_what_cannot_be_split_is_said(batch: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(plan("halve", [started(1), crash(1)]).split(batch, 1))


def test_a_loop_of_whole_batches_is_told_of_parts(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="on_oom='half': must be one of halve, skip, raise"):
        Guard(tmp_path / "a", model=model, optimizer=optimizer, on_oom="half")
    guard = Guard(tmp_path / "b", model=model, optimizer=optimizer, on_oom="halve")
    guard._memory = plan("halve", [crash(1)])
    for batch in guard.over([torch.ones(4, 2)]):
        loss = model(batch).mean()
        loss.backward()
        with pytest.raises(ConfigError, match=r"for part, share in guard\.parts\(batch\)"):
            guard.ok(loss)
        break
    guard._finalizer()
