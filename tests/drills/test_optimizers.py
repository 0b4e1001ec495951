"""P1 to P5 hold for other optimizers and rates; real runs, real kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from runner.command.export import export_command
from tests.drills.compare import (
    assert_as_if_never_there,
    assert_every_sample_once,
    assert_follows,
    assert_killed_is_as_not,
    in_turns,
)
from tests.drills.test_guests import POISON, SHORT
from tests.rows import full
from tests.run import Result, finish, train

pytestmark = pytest.mark.usefixtures("leaves_nothing")
OPTIMIZERS = {
    "muon": (
        "optim=muon",
        "optim.ema=0.9",
        "optim.groups=[{match: norm, rate: 0.5, weight_decay: 0.01}]",
    ),
    "lion": ("optim=lion",),
    "sgd": ("optim=sgd",),
    # Gated by the host, and a rate of one's own.
    "rmsprop": (
        "optim._target_=torch.optim.RMSprop",
        "optim.momentum=0.5",
        "optim.lr=1e-3",
        "schedule._target_=tests.guests.sawtooth",
        "schedule.period=7",
    ),
    # Factors over whole parameters; bytes, a scale for a tensor, counts; weights to evaluate.
    "adafactor": ("optim=adafactor",),
    "eight-bit": ("optim._target_=tests.optimizers.EightBit", "optim.lr=1e-3"),
    "schedule-free": ("optim._target_=tests.optimizers.ScheduleFree", "optim.lr=1.0"),
}
FOREIGN = ("rmsprop", "adafactor", "eight-bit", "schedule-free")
OTHERS = ["eight-bit", *(full(n) for n in OPTIMIZERS if n != "eight-bit")]


def told(name: str, *more: str) -> list[str]:
    return [*SHORT, "parallel=fsdp", *OPTIMIZERS[name], *more]


@pytest.mark.full  # tests/drills/test_zero_optimizers.py has one that is always run
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_poison_ends_as_if_it_was_never_there(tmp_path: Path, name: str) -> None:
    assert_every_sample_once(assert_as_if_never_there(tmp_path, told(name), POISON))


@pytest.mark.parametrize("name", OTHERS)
def test_killed_is_as_not_killed_and_ranks_may_change(tmp_path: Path, name: str) -> None:
    short = told(name, "steps=26", "schedule.total=26")
    whole = assert_killed_is_as_not(tmp_path, short, at=13)
    assert ("ignores found_inf" in whole.text) == (name in FOREIGN)
    losses = [line["loss"] for line in whole.metrics()]
    assert min(losses[-5:]) < losses[0] - 0.05, "it learns"
    run = in_turns(tmp_path / "elastic", short, (8, 2), (17, 1), (26, 3))
    assert_every_sample_once(run)
    assert_follows(run, whole)


@pytest.mark.parametrize("engine", ["fsdp", full("ddp")])
def test_an_average_is_evaluated_and_exported_and_leaves_no_trace(
    tmp_path: Path, engine: str
) -> None:
    told = [*SHORT, f"parallel={engine}"]
    plain = finish(tmp_path / "plain", *told)
    averaged = finish(tmp_path / "averaged", *told, "optim.ema=0.9")
    for mine, theirs in zip(averaged.metrics(), plain.metrics(), strict=True):
        assert (mine["loss"], mine["grad_norm"]) == (theirs["loss"], theirs["grad_norm"]), mine
    evaluated = [
        [line["eval_loss"] for line in run.metrics() if line.get("eval_loss") is not None]
        for run in (averaged, plain)
    ]
    assert len(evaluated[0]) == len(evaluated[1]) > 3
    assert all(mine != theirs for mine, theirs in zip(*evaluated, strict=True))
    weights = {}
    for run in (averaged, plain):
        assert export_command([str(run.out), str(run.out / "weights")]) == 0
        weights[run.out.name] = load_file(run.out / "weights" / "model.safetensors")
    (newest,) = (tmp_path / "averaged" / "weights").glob("*.safetensors")
    with safe_open(newest, framework="pt") as file:
        assert file.metadata()["weights"] == "average (optim.ema)"
    for name, tensor in weights["averaged"].items():
        assert not tensor.equal(weights["plain"][name]), name


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim._target_=torch.optim.LBFGS"], "cannot train parameters of 1, 2 dimensions"),
        (["optim.groups=[{rate: 2}]"], "{'rate': 2} is no rule; write"),
        (
            ["optim.groups=[{match: norm, rate: 2}, {match: embeding, rate: 2}]"],
            "optim.groups[1]: match='embeding' takes no tensor, because no trained parameter fits "
            "it; change or remove it. The trained parameters are embedding.weight, ",
        ),
        (["schedule._target_=tests.guests.sawtooth", "schedule.period=0"], "modulo"),
        (["schedule._target_=tests.guests.falls"], "returns -1.0 after 0 updates"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    run: Result = train(tmp_path / "run", *SHORT, *overrides, ranks=0)
    assert run.code == 2 and words in run.text, run.tail
