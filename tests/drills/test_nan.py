"""P1, P2: a NaN on any one rank is applied on none, and every rank discards the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.compare import assert_every_sample_once, assert_same_end
from tests.rows import full
from tests.run import Result, finish, skip_override

# kind, step, rank: far enough apart for each to be an episode of its own.
EACH_RANK_IN_TURN = [
    ("nan_grad", 14, 0),
    ("nan_grad", 26, 1),
    ("nan_loss", 38, 0),
    ("nan_loss", 50, 1),
]
LAST_RANK_OF_THREE = [("nan_grad", 20, 2), ("nan_loss", 35, 1)]


def faults(cases: list[tuple[str, int, int]]) -> str:
    return (
        "faults=[" + ",".join(f"{kind}@step={step},rank={rank}" for kind, step, rank in cases) + "]"
    )


@pytest.mark.parametrize(
    ("ranks", "engine", "cases"),
    [
        (2, "parallel=fsdp", EACH_RANK_IN_TURN),
        full(2, "parallel=ddp model.dropout=0.1", EACH_RANK_IN_TURN),
        full(3, "parallel=fsdp", LAST_RANK_OF_THREE),
        full(2, "model.dropout=0.1", EACH_RANK_IN_TURN),
        full(3, "parallel=ddp", LAST_RANK_OF_THREE),
        full(4, "parallel=hsdp parallel.shard_size=2", EACH_RANK_IN_TURN),
    ],
)
def test_a_discarded_step_never_happened(
    tmp_path: Path, ranks: int, engine: str, cases: list[tuple[str, int, int]]
) -> None:
    hit = finish(tmp_path / "hit", *engine.split(), faults(cases), ranks=ranks)
    discards = hit.journal("discard")
    assert [(d["step"], d["ranks"]) for d in discards] == [
        (step, [rank]) for _, step, rank in cases
    ], hit.tail
    assert_discards_explain_themselves(hit)
    told = finish(
        tmp_path / "told", *engine.split(), skip_override(hit.summary["skipped"]), ranks=ranks
    )
    assert not told.journal("discard"), told.tail
    assert_same_end(hit, told)
    assert_every_sample_once(hit)


def assert_discards_explain_themselves(run: Result) -> None:
    """One line each, with samples, reason and cost; a word when it was over; nothing else."""
    discards, episodes = run.journal("discard"), run.journal("episode")
    told = ["discard", "episode"] * len(discards)
    assert [line["kind"] for line in run.journal()] == ["start", *told], run.tail
    for discard, episode in zip(discards, episodes, strict=True):
        assert episode["decision"] == "transient", episode
        assert episode["samples"] == discard["samples"]
        assert episode["detail"]["cause"] == "one sample or one layer"
        assert "1 bad step, then clean again" in episode["reason"]
    assert [d["samples"] for d in discards] == run.summary["skipped"]
    for line in discards:
        assert "1 rank with NaN or Inf" in line["reason"]
        assert line["sample_ids"] and line["cost_steps"] == 1 and line["cost_seconds"] > 0
        first, stop = line["samples"]
        assert all(first <= position < stop for position in line["detail"]["suspects"])
    assert run.summary["discarded_steps"] == len(discards)
    assert len([line for line in run.metrics() if line["action"] == "discard"]) == len(discards)
