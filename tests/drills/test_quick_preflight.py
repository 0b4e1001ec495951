"""Each start asks the model a few things, and tells what does not hold of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run import train

SMALL = (
    "debug.preflight=true",
    "steps=3",
    "data.seq_len=32",
    "batch.global_size=8",
    "checkpoint.memory_every=0",
)
TARGET = "model._target_=tests.preflight_models"
AHEAD, EARLIER = "no look at later tokens", "earlier tokens matter"
GRADIENT = "each trained parameter gets a gradient"


def told(out: Path, *settings: str, ranks: int = 1) -> set[str]:
    run = train(out, *SMALL, *settings, ranks=ranks)
    assert run.code == 0, run.tail
    return {line["detail"]["check"] for line in run.journal("preflight")}


def test_a_look_ahead_is_told(tmp_path: Path) -> None:
    assert told(tmp_path / "a", f"{TARGET}.Small", "model.wrong=leak", ranks=2) == {AHEAD}


@pytest.mark.full
@pytest.mark.parametrize(
    ("wrong", "wanted"),
    [("future", AHEAD), ("alone", EARLIER), ("zeroed", EARLIER), ("detached", GRADIENT)],
)
def test_what_is_wrong_is_named(tmp_path: Path, wrong: str, wanted: str) -> None:
    for model in ("Small", "Losing"):
        found = told(tmp_path / model, f"{TARGET}.{model}", f"model.wrong={wrong}")
        assert wanted in found, found


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        [f"{TARGET}.Small"],
        [f"{TARGET}.Losing", "parallel=ddp"],
        [f"{TARGET}.Moving"],
        ["model=tiny"],
        ["model=tiny", "parallel=zero1"],
        ["model=tiny", "parallel=zero3", "batch.micro_size=2"],
        ["model=tiny", "model.dropout=0.1", "data.isolate_documents=true"],
    ],
    ids=" ".join,
)
def test_sound_models_are_left_alone(tmp_path: Path, settings: list[str]) -> None:
    assert told(tmp_path / "a", *settings, ranks=2) == set()


@pytest.mark.full
def test_asking_changes_nothing(tmp_path: Path) -> None:
    asked, other = (
        train(tmp_path / name, *SMALL, "model=tiny", f"debug.preflight={name}")
        for name in ("true", "false")
    )
    assert asked.digest == other.digest and asked.metrics() == other.metrics()
