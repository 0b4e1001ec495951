"""Measuring the layers changes nothing of a run, and tells what is there, on every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import hf_folder
from tests.rows import full
from tests.run import TWO_LAYERS, Result, read_lines, train

SMALL = (TWO_LAYERS, "steps=24", "batch.global_size=8", "data.seq_len=32")
EVERY = 6


def looks(out: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in read_lines(out / "layers.jsonl")}


def bare(run: Result) -> dict[int, dict[str, Any]]:
    """Its lines without what was measured."""
    return {
        step: {key: value for key, value in line.items() if not key.startswith("layers/")}
        for step, line in run.counted().items()
    }


@pytest.mark.parametrize(
    "settings",
    [
        ["guard.sync=false"],
        full(["parallel=ddp", "model.dropout=0.1"]),
        full(["parallel=zero1"]),
        full(["parallel=zero2", "batch.micro_size=2"]),
        full(["parallel=zero3"]),
        full(["model.loss_chunk_mib=0.01", "model.qk_norm=true"]),
    ],
    ids=" ".join,
)
def test_looking_changes_nothing(tmp_path: Path, settings: list[str]) -> None:
    without = train(tmp_path / "without", *SMALL, *settings, "track.layers_every=0")
    seen = train(tmp_path / "with", *SMALL, *settings, f"track.layers_every={EVERY}")
    assert without.code == seen.code == 0, seen.tail
    assert seen.digest == without.digest, seen.tail
    assert bare(seen) == bare(without)
    assert not (without.out / "layers.jsonl").exists()
    by_step = looks(seen.out)
    assert list(by_step) == [6, 12, 18, 24]
    for step, line in by_step.items():
        assert line["attempt"] == 1
        layers = line["layers"]
        assert list(layers) == ["embedding", "blocks.0", "blocks.1", "norm"]
        for numbers in layers.values():
            assert numbers["grad"] > 0 and numbers["weight"] > 0 and 0 < numbers["update"] < 1
            assert ("adam_rms" in numbers) is (step == 4 * EVERY)
            assert 0.1 < numbers.get("adam_rms", 1.0) < 10
        for block in ("blocks.0", "blocks.1"):
            assert layers[block]["residual_rms"] > 0 and layers[block]["attention_logit"] > 0
        columns = {k: v for k, v in seen.counted()[step].items() if k.startswith("layers/")}
        assert columns == {f"layers/{name}": value for name, value in line["model"].items()}
        # All gradients together are the one that the guard sees.
        square = sum(numbers["grad"] ** 2 for numbers in layers.values())
        assert square**0.5 == pytest.approx(seen.counted()[step]["grad_norm"], rel=1e-3)
        assert 3 < line["model"]["logsumexp"] < 8
        assert {"grad_noise", "grad_signal"} <= line["model"].keys()
        assert ("histograms" in line) is (step == 4 * EVERY)
    assert by_step[24]["model"]["noise_scale"] > 0
    histograms = by_step[24]["histograms"]
    assert list(histograms) == ["embedding", "blocks.0", "blocks.1", "norm"]
    assert histograms["blocks.1"].keys() == {"weights", "gradients", "outputs"}
    for kinds in histograms.values():
        for row in kinds.values():
            assert len(row) == 9 and row == sorted(row) and row[0] >= 0


@pytest.mark.twin
@pytest.mark.full
def test_ranks_and_restarts_tell_the_same(tmp_path: Path) -> None:
    """One rank or three, whole or killed in between: the same numbers but for rounding."""
    words = [*SMALL, f"track.layers_every={EVERY}", "batch.global_size=6"]
    one = train(tmp_path / "one", *words, ranks=1)
    three = train(tmp_path / "three", *words, "faults=[kill@step=15,rank=1]", ranks=3, restarts=1)
    assert one.code == three.code == 0, three.tail
    assert [line["attempt"] for line in looks(three.out).values()] == [1, 2, 2, 2]
    for step, line in looks(one.out).items():
        numbers, others = dict(line["model"]), dict(looks(three.out)[step]["model"])
        # Estimated from some elements of each shard, and other ranks have other shards.
        moved = numbers.pop("update_ratio")
        assert moved == pytest.approx(others.pop("update_ratio"), rel=0.15)
        for name in ("grad_noise", "grad_signal", "noise_scale"):
            numbers.pop(name, None), others.pop(name, None)
        assert numbers == pytest.approx(others, rel=2e-2)


EXPERTS = ("model=hf", "model.init=random", f"data.vocab_size={len(hf_folder.LETTERS)}")
LORA = (EXPERTS[0], EXPERTS[2], "model.lora={r: 8, targets: all-linear, alpha: 32}")
ROUTED = (
    "model._target_=tests.uncommon_guests.Routed",
    "data._target_=tests.uncommon_guests.Tokens",
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        (LORA, ["parallel=fsdp"]),
        ((*LORA, "model.quantize=nf4"), ["parallel=fsdp"]),
        ((), ["parallel=fsdp", "parallel.offload=cpu"]),
        (EXPERTS, ["parallel=zero3"]),
    ],
    ids=["adapters", "on four bits", "offload", "experts"],
)
def test_engines_see_the_same(tmp_path: Path, settings: tuple[str, ...], engine: list[str]) -> None:
    """Gradient noise and the load of experts, beside DDP's; and the look changes nothing."""
    if "model=hf" in settings:
        pytest.importorskip("transformers")
        make = hf_folder.experts if settings == EXPERTS else hf_folder.llama
        settings += (f"model.path={make(tmp_path / 'model')}",)
    if "model.quantize=nf4" in settings:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    words = [*SMALL[1:], "steps=12", *settings, "batch.micro_size=2"]
    runs = [
        train(tmp_path / name, *words, *more, f"track.layers_every={every}")
        for name, more, every in (
            ("ddp", ["parallel=ddp"], 6), ("seen", engine, 6), ("bare", engine, 0)
        )
    ]  # fmt: skip
    assert [run.code for run in runs] == [0, 0, 0], [run.tail for run in runs]
    assert runs[1].digest == runs[2].digest
    beside, seen = (looks(run.out) for run in runs[:2])
    assert list(seen) == [6, 12]
    for step, line in seen.items():
        other = beside[step]
        for name, load in line.get("experts", {}).items():
            assert load == pytest.approx(other["experts"][name], abs=0.02)
        assert ("experts" in line) is (settings[1:2] == EXPERTS[1:2])
        noises = [
            [look["model"][n] for n in ("grad_noise", "grad_signal")] for look in (line, other)
        ]
        near = 0.1 if "parallel=zero3" in engine else 1e-2  # it computes in BF16
        assert noises[0] == pytest.approx(noises[1], rel=near) and noises[0][0] > 0


@pytest.mark.full
def test_a_divergence_is_warned_of(tmp_path: Path) -> None:
    """The rate rises without end; the warning keeps a checkpoint, and the guard quotes it."""
    rising = ["optim.lr=3", "schedule.warmup=600", "steps=300", "track.layers_every=10"]
    keeping = ["checkpoint.keep=1", "checkpoint.every=10", "checkpoint.memory_every=0"]
    run = train(tmp_path / "run", *SMALL, *rising, *keeping, "guard.max_rollbacks=1", ranks=1)
    first, *_ = run.journal("warning")
    assert "step" in first["reason"] and first["detail"]["signals"], run.tail
    kept = [path.name for path in (run.out / "ring").iterdir()]
    serials = [line["detail"]["keeps"] for line in run.journal("warning")]
    assert any(f"{serials[-1]:06d}" in name for name in kept), (serials, kept)
    later = [line for kind in ("rollback", "halt") for line in run.journal(kind)]
    assert any(line["detail"].get("warnings") for line in later), [run.journal(), run.tail]


@pytest.mark.twin
def test_experts_are_watched_through_all_that_happens(tmp_path: Path) -> None:
    """Two ranks, accumulation, evaluations, EMA, a discard, a rollback, a killed rank."""
    words = [
        *ROUTED,
        *("steps=24", "batch.global_size=8", "batch.micro_size=2", "data.seq_len=32"),
        *(
            "eval.every=6",
            "optim.ema=0.9",
            "checkpoint.every=4",
            "checkpoint.clean_after=2",
            "guard.min_history=4",
        ),
        "faults=[nan_grad@step=5,rank=1,poison@samples=72-103,kill@step=19,rank=1]",
    ]
    without, seen = (
        train(tmp_path / str(every), *words, f"track.layers_every={every}", ranks=2, restarts=1)
        for every in (0, 2)
    )
    assert without.code == seen.code == 0, seen.tail
    assert seen.journal("discard") and seen.journal("rollback") and seen.journal("crash")
    assert seen.digest == without.digest and bare(seen) == bare(without), seen.tail
    for line in looks(seen.out).values():
        [(name, load)] = line["experts"].items()
        assert name == "router" and len(load) == 6 and sum(load) == pytest.approx(1, abs=1e-3)
        assert 0 < line["model"]["expert_balance"] <= 1
