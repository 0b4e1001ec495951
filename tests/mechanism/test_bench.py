"""The benchmark's own arithmetic, and that its loops train alike."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.bench.fair import refuse_measured, refuse_other_losses, refuse_uneven
from scripts.bench.ours import make_task, settings
from scripts.bench.process import MeasureError, environment, torchrun
from scripts.bench.report import grouped, ratio
from scripts.bench.task import Task, build_model
from scripts.bench.turns import Turns
from tests.programs import ended, python

ROOT = Path(__file__).parents[2]
TINY = ["model=tiny", "data=synthetic", "data.workers=0", "data.seq_len=32", "batch.global_size=4"]


def test_ratio_is_of_each_pair_not_of_the_sums() -> None:
    """One disturbed pair in five moves the ratio of the sums, not the median."""
    found = ratio([(1.1, 1.0), (2.2, 2.0), (1.1, 1.0), (9.0, 1.0), (1.1, 1.0)])
    assert (found["pairs"], found["median"], found["p10"]) == (5, 1.1, 1.1)
    assert found["of_totals"] == pytest.approx(14.5 / 6, abs=1e-5) and found["p90"] > 5
    same = ratio([(2.0, 1.0), (4.0, 2.0), (6.0, 3.0)])
    assert (same["median"], same["p10"], same["p90"], same["median_95"]) == (2, 2, 2, [2, 2])


@pytest.mark.parametrize("pairs", [[], [(1.0, 0.0)], [(-1.0, 1.0)], [(math.nan, 1.0)]])
def test_ratio_refuses_what_has_none(pairs: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="finite positive"):
        ratio(pairs)


def test_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        noise = np.exp(generator.normal(0.0, 0.05, size=(40, 2)))
        pairs = [(1.02 * a, b) for a, b in noise.tolist()]
        low, high = ratio(pairs)["median_95"]
        held += low <= 1.02 <= high
    assert 175 <= held <= 200, f"{held} of 200 intervals of 95 %"
    assert ratio(pairs) == ratio(pairs)


def test_groups_show_what_a_median_over_blocks_would_not() -> None:
    """Every fourth block has a save: the median of single blocks says 1, a group 1.25."""
    blocks = [(2.0 if n % 4 == 3 else 1.0, 1.0) for n in range(14)]
    assert ratio(blocks)["median"] == 1.0
    assert grouped(blocks, 4) == [(5.0, 4.0)] * 3
    assert ratio(grouped(blocks, 4))["median"] == 1.25


def test_turns_alternate_blocks_and_end() -> None:
    """One step of the driver before all, then pairs of blocks, each side first in turn."""
    order: list[str] = []
    turns = Turns(
        lambda: order.append("p"),
        device=torch.device("cpu"),
        block=2,
        warmup=1,
        pairs=2,
        settle=lambda: order.append("s"),
    )
    done = False
    while not done:
        order.append("d")
        done = turns.after_step()
    assert "".join(order) == "d" + "ddpps" + "ppsdd" + "ddpps"


@pytest.mark.parametrize(
    "override",
    ["model.dropout=0.1", "model.z_loss=0.001", "model.loss_chunk_mib=1", "compute.frozen=[norm]",
     "data.isolate_documents=true", "data.skip=[[1,2]]", "eval.every=5",
     "schedule=constant", "optim.clip=0", "faults=[kill@step=3]",
     "parallel.reduce_each_micro_batch=true", "parallel.reshard_after_forward=false"],
)  # fmt: skip
def test_what_only_one_side_would_follow_is_refused(override: str, tmp_path: Path) -> None:
    plain = settings(tmp_path, [])
    refuse_uneven(settings(tmp_path, TINY), plain)
    with pytest.raises(MeasureError, match=override.split("=")[0]):
        refuse_uneven(settings(tmp_path, [*TINY, override]), plain)


@pytest.mark.parametrize("override", ["parallel=ddp", "out=here", "steps=3", "parallel.kind=ddp"])
def test_what_is_measured_is_not_the_users_to_set(override: str) -> None:
    refuse_measured(["model=small", "guard.window=9"])
    with pytest.raises(MeasureError, match="sets"):
        refuse_measured([override])


def first_loss(task: Task, precision: torch.dtype) -> float:
    model = build_model(task, torch.device("cpu"))
    rows = torch.from_numpy(np.load(task.tokens)[0].astype(np.int64))
    with (
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is torch.bfloat16),
    ):
        logits = model(rows[:, :-1]).float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def test_another_precision_is_noticed_by_its_type_and_by_its_losses(tmp_path: Path) -> None:
    # The smallest model that is measured by default: smaller ones differ by less.
    small = ["data=synthetic", "data.seq_len=64", "batch.global_size=4", "compute.precision=fp32"]
    task = make_task(settings(tmp_path / "run", small), tmp_path, steps=1)
    plain = first_loss(task, torch.float32)
    with pytest.raises(MeasureError, match=r"multiplies in torch\.bfloat16, the runner fp32"):
        first_loss(task, torch.bfloat16)
    told_wrong = dataclasses.replace(task, precision="bf16")
    with pytest.raises(MeasureError, match=r"multiplies in torch\.float32, the runner bf16"):
        first_loss(told_wrong, torch.float32)
    rounded = first_loss(told_wrong, torch.bfloat16)
    refuse_other_losses([plain], [plain + 1e-6], "fp32")
    with pytest.raises(MeasureError, match="losses of step 1 differ"):
        refuse_other_losses([plain], [rounded], "fp32")


@pytest.mark.parametrize("gap", [0.2, math.nan])
def test_two_trainings_that_are_not_the_same_are_not_compared(gap: float) -> None:
    for precision in ("bf16", "fp32"):
        with pytest.raises(MeasureError, match="losses of step 2 differ"):
            refuse_other_losses([2.0, 1.0], [2.0, 1.0 + gap], precision)
        with pytest.raises(MeasureError, match="no losses"):
            refuse_other_losses([], [2.0], precision)


def test_losses_are_compared_before_a_block_is_counted() -> None:
    compared: list[int] = []
    taken: list[str] = []

    def refuse(losses: list[float]) -> None:
        compared.append(len(taken))
        raise MeasureError("another training")

    turns = Turns(
        lambda: taken.append("p"), device=torch.device("cpu"), block=2, warmup=3, pairs=9,
        check=refuse,
    )  # fmt: skip
    with pytest.raises(MeasureError):
        while True:
            turns.after_step()
    assert compared == [8], "the passenger's steps of the warm-up, and of the next pair"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_the_bare_loop_trains_as_the_runner_does(tmp_path: Path, kind: str) -> None:
    """Same losses, or the comparison is of two trainings."""
    told = [f"--folder={tmp_path}", f"--against=bare-{kind}", "--pairs=4", "--warmup=4"]
    command = torchrun(2, "scripts.bench.pair", *told, "--block=2", f"parallel={kind}", *TINY)
    command.append("compute.precision=fp32")
    done = ended(*command, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["pairs"]) == 4
    ours, theirs = result["losses"]["ours"], result["losses"]["theirs"]
    assert (len(ours), len(theirs)) == (16, 17), "the driver takes one step before the turns"
    assert ours == pytest.approx(theirs[:16], abs=1e-4)
    assert ours[-1] < ours[0] - 0.05, "it learns"


@pytest.mark.full
def test_one_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    told = ["--quick", "--only", "layers", "--out", str(out)]
    small = ["model.dim=32", "model.layers=2", "model.heads=2", *TINY[1:3]]
    done = ended("bash", str(ROOT / "scripts" / "bench.sh"), *told, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert results["machine"]["cores"] >= 1
    assert results["versions"]["torch"] == torch.__version__
    (measurement,) = results["measurements"]
    assert not measurement["failed"]
    for row in measurement["rows"]:
        assert row["ratio"]["pairs"] == 8
        assert row["ratio"]["p10"] <= row["ratio"]["median"] <= row["ratio"]["p90"]
        assert f"| {row['what']} | {row['against']} |" in done.stdout
    again = python("-m", "scripts.bench", "--table", str(out), check=True)
    assert again.stdout.strip() in done.stdout
