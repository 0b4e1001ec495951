"""Held-out sets of files of their own: a loss each, and culprits are found without held-out samples
of the corpus."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runner.command.export import export_command
from tests.drills.compare import assert_same_end
from tests.run import Result, finish, skip_override

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def text_file(path: Path, *, words: int, seed: int) -> Path:
    """Sentences of few words, which a small model learns."""
    dice = random.Random(seed)
    known = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs")
    path.write_text(" ".join(dice.choice(known) for _ in range(words)))
    return path


def held_out_losses(run: Result) -> dict[int, dict[str, float]]:
    return {
        line["step"]: {name: line[name] for name in line if name.startswith("eval_")}
        for line in run.metrics()
        if line.get("eval_loss") is not None
    }


def test_each_set_has_a_loss_and_culprits_are_found(tmp_path: Path) -> None:
    train = text_file(tmp_path / "train.txt", words=20_000, seed=1)
    easy = text_file(tmp_path / "easy.txt", words=2_000, seed=2)
    (tmp_path / "odd.txt").write_bytes(random.Random(3).randbytes(4_000).hex().encode())
    settings = (
        "data=text",
        f"data.path={train}",
        f"data.val_path={{odd: {tmp_path}/odd.txt, easy: [{easy}]}}",
        f"data.cache={tmp_path}/cache",
        "guard.remedy=verdict",
        "eval.every=10",
        "eval.samples=4",
        "steps=30",
    )
    hit = finish(tmp_path / "hit", *settings, "faults=[poison@samples=610-611]")
    [redo] = hit.journal("redo")
    cause = redo["detail"]["cause"]
    assert (cause["cause"], redo["detail"]["skipped"]) == ("data", [610, 611]), hit.tail
    told = finish(tmp_path / "told", *settings, skip_override(hit.summary["skipped"]))
    assert_same_end(hit, told)
    losses = held_out_losses(hit)
    assert sorted(losses) == [10, 20, 30] and losses == held_out_losses(told)
    for of_step in losses.values():
        assert sorted(of_step) == [
            *("eval_accuracy", "eval_accuracy/easy", "eval_accuracy/odd"),
            *("eval_loss", "eval_loss/easy", "eval_loss/odd", "eval_perplexity"),
        ]
        assert of_step["eval_perplexity"] == pytest.approx(math.exp(of_step["eval_loss"]))
        parts = [of_step["eval_loss/easy"], of_step["eval_loss/odd"]]
        assert min(parts) < of_step["eval_loss"] < max(parts)
    assert losses[30]["eval_accuracy/easy"] > losses[30]["eval_accuracy/odd"]
    assert losses[30]["eval_loss/easy"] < losses[30]["eval_loss/odd"] - 0.3


def test_terms_are_counted_as_the_model_counts_them(tmp_path: Path) -> None:
    """Half a term a sample, and an odd number of samples: of each source, and on each rank."""
    sources = ", ".join(
        f"{{name: {name}, _target_: tests.uncommon_guests.Uneven}}" for name in "ab"
    )
    settings = (
        "model._target_=tests.uncommon_guests.Counting",
        "model.how=floats",
        f"data.sources=[{sources}]",
        "eval.every=1",
        "eval.samples=5",
        "steps=2",
    )
    found = [
        held_out_losses(finish(tmp_path / str(ranks), *settings, ranks=ranks)) for ranks in (1, 3)
    ]
    for losses in (by_step[2] for by_step in found):
        mean = (losses["eval_loss/a"] + losses["eval_loss/b"]) / 2
        assert losses["eval_loss"] == pytest.approx(mean, rel=1e-6), losses
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-4)


@pytest.mark.twin
def test_samples_without_tokens_meet_all_that_goes_back_and_on(tmp_path: Path) -> None:
    """A mixture, accumulation, a model's own counts, numbers read late, the best of one source kept
    and snapshots in memory: a bad sample, a rollback and a kill leave no trace, nor in what is
    exported as the best."""
    sources = ", ".join(
        f"{{name: {name}, weight: {weight}, _target_: tests.uncommon_guests.Uneven}}"
        for name, weight in (("a", 1), ("b", 3))
    )
    settings = (
        *("model._target_=tests.uncommon_guests.Counting", "model.how=floats"),
        *(f"data.sources=[{sources}]", "batch.micro_size=4", "guard.sync=false"),
        *("eval.every=6", "eval.samples=5", "eval.metric=eval_loss/b", "guard.remedy=discard"),
        *("checkpoint.keep_best=true", "checkpoint.memory_every=4", "steps=40"),
    )
    faults = "faults=[poison@samples=700-830,kill@step=36,rank=0]"
    hit = finish(tmp_path / "hit", *settings, faults, restarts=1)
    assert hit.summary["restarts"] == 1 and hit.summary["rollbacks"] == 1, hit.tail
    told = finish(tmp_path / "told", *settings, skip_override(hit.summary["skipped"]))
    assert_same_end(hit, told)
    assert held_out_losses(hit) == held_out_losses(told)
    for run in (hit, told):
        assert export_command([str(run.out), f"{run.out}-best", "--step", "best"]) == 0
    best = [load_file(f"{run.out}-best/model.safetensors") for run in (hit, told)]
    assert best[0].keys() == best[1].keys()
    assert all(torch.equal(tensor, best[1][name]) for name, tensor in best[0].items())
