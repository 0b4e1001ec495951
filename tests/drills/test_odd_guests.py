"""Models and data that were not thought of when the contract was written (tests/odd_guests.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.compare import assert_same_end, assert_same_run
from tests.run import finish, skip_override, train

pytestmark = pytest.mark.usefixtures("leaves_nothing")
ODD = "tests.odd_guests."
SHORT = (
    "steps=24",
    "schedule.total=24",
    "data.seq_len=8",
    "guard.min_history=8",
    "batch.global_size=8",
    "batch.micro_size=2",
    "checkpoint.every=6",
    "checkpoint.clean_after=4",
)


def tokens(how: str) -> tuple[str, ...]:
    return f"data._target_={ODD}Tokens", f"data.how={how}"


IMAGES, POINTS = "data._target_=tests.guests.Images", f"data._target_={ODD}Uneven"
TRAINS = {
    "its own frozen embedding, blocks in a ModuleDict": ("FrozenEmbedding", *tokens("plain")),
    "one weight under three names": ("TiedElsewhere", *tokens("plain")),
    "from the environment, logits in an object": ("FromEnvironment", *tokens("ignored")),
    "a bare Sequential of a function": ("made_by_a_function", *tokens("uneven")),
    "losses in FP64, strings and a collate": ("Counting", POINTS),
    "counts that are no whole numbers": ("Counting", "model.how=floats", POINTS),
    "samples that cannot be read": ("FrozenEmbedding", *tokens("raises")),
    "BatchNorm without statistics of its own": ("BatchNormed", "model.without=true", IMAGES),
}


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize(("engine", "ranks"), [("single", 0), ("fsdp", 2), ("zero1", 2)])
@pytest.mark.parametrize("name", TRAINS)
def test_it_is_as_safe_as_the_host(tmp_path: Path, name: str, engine: str, ranks: int) -> None:
    model, *more = TRAINS[name]
    how = [*SHORT, f"model._target_={ODD}{model}", *more, f"parallel={engine}"]
    poisoned = finish(tmp_path / "poisoned", *how, "faults=[poison@samples=120-140]", ranks=ranks)
    assert poisoned.journal("rollback"), poisoned.tail
    skip = skip_override(poisoned.summary["skipped"])
    assert_same_end(poisoned, finish(tmp_path / "never", *how, skip, ranks=ranks))
    whole = finish(tmp_path / "whole", *how, ranks=ranks)
    kill = "faults=[kill@step=15,rank=0]"
    killed = train(tmp_path / "killed", *how, kill, ranks=ranks)
    assert killed.code != 0
    assert_same_run(finish(tmp_path / "killed", *how, kill, ranks=ranks), whole)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "more", "code", "words"),
    [
        ("FrozenEmbedding", tokens("negative"), 2, "samples can be read; tests.odd_guests.Tokens"),
        ("FrozenEmbedding", (f"data._target_={ODD}Streaming",), 2, "give a map-style data set"),
        ("Counting", ("model.how=mean", POINTS), 2, "(reduction='none', and what each is a sum"),
        ("Counting", ("model.how=nothing", POINTS), 3, "nothing counts in these samples"),
    ],
)
def test_what_cannot_be_trained_is_told(
    tmp_path: Path, model: str, more: tuple[str, ...], code: int, words: str
) -> None:
    how = (*SHORT, f"model._target_={ODD}{model}", *more)
    run = train(tmp_path / "run", *how, "guard.max_discards=4", ranks=0)
    assert run.code == code, run.tail
    reasons = [line["reason"] for line in run.journal()] if code == 3 else []
    assert words in " ".join([run.text, *reasons]), run.tail
