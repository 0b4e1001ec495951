"""Optimizers other than AdamW on DeepSpeed: the same promises, the same checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.compare import (
    assert_as_if_never_there,
    assert_every_sample_once,
    assert_follows,
    assert_killed_is_as_not,
    in_turns,
)
from tests.drills.test_guests import POISON, SHORT
from tests.drills.test_optimizers import OPTIMIZERS
from tests.drills.test_zero import on
from tests.rows import full_but
from tests.run import Result, finish, train

pytestmark = pytest.mark.usefixtures("leaves_nothing")
GROUPS = "optim.groups=[{match: norm, rate: 0.5, weight_decay: 0.01}]"
# On the device and on the host; rates by name; an average; numbers of groups.
SETTINGS = {
    "sgd": (*OPTIMIZERS["sgd"], GROUPS),
    "lion": (*OPTIMIZERS["lion"], "optim.ema=0.9"),
    "rmsprop": (*OPTIMIZERS["rmsprop"], GROUPS, "optim.ema=0.9"),
    "schedule-free": OPTIMIZERS["schedule-free"],
    "adamw": (GROUPS, "optim.ema=0.9"),
}
CASES = [
    *(("zero1", name) for name in ("rmsprop", "lion", "sgd", "adamw")),
    *(("zero2", name) for name in ("lion", "schedule-free")),
    *(("zero3", name) for name in ("rmsprop", "schedule-free")),
]


@pytest.mark.parametrize(("stage", "name"), full_but([("zero1", "rmsprop")], CASES))
def test_poison_ends_as_if_it_was_never_there(tmp_path: Path, stage: str, name: str) -> None:
    how = [*SHORT, *on(stage), *SETTINGS[name], "steps=32", "schedule.total=32"]
    assert_every_sample_once(assert_as_if_never_there(tmp_path, how, POISON))


@pytest.mark.full
@pytest.mark.parametrize(("stage", "name"), CASES)
def test_killed_is_as_not_killed_and_engines_and_ranks_may_change(
    tmp_path: Path, stage: str, name: str
) -> None:
    whole = assert_killed_is_as_not(tmp_path, [*SHORT, *on(stage), *SETTINGS[name]], at=17)
    for steps, engine, ranks in ((12, "fsdp", 2), (20, stage, 1), (30, stage, 3), (40, "fsdp", 1)):
        how = [*SHORT, *on(engine), *SETTINGS[name]]
        run = in_turns(tmp_path / "switched", how, (steps, ranks))
    assert_every_sample_once(run)
    assert_follows(run, whole)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "name"), CASES)
def test_on_two_ranks_it_is_the_run_on_fsdp(tmp_path: Path, stage: str, name: str) -> None:
    """Where no update is clipped: each gradient is a sum of two numbers."""
    how = [*SHORT, "optim.clip=1e9", *SETTINGS[name]]
    ours = finish(tmp_path / "ours", *how, *on(stage))
    theirs = finish(tmp_path / "theirs", *how, *on("fsdp"))
    assert ours.digest == theirs.digest, ours.tail
    assert evaluations(ours) == evaluations(theirs)


def evaluations(run: Result) -> list[float]:
    """Held-out losses: of the average, where there is one."""
    return [line["eval_loss"] for line in run.metrics() if line.get("eval_loss") is not None]


def test_what_needs_whole_parameters_is_refused_with_what_to_use(tmp_path: Path) -> None:
    run = train(tmp_path / "run", *SHORT, *on("zero1"), "optim=muon", ranks=0)
    words = "works on whole matrices, and parallel=zero1 updates flat partitions"
    assert run.code == 2 and words in run.text and "use parallel=fsdp" in run.text, run.tail
