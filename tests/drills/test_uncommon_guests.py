"""P12 for models of many makes (tests/uncommon_guests.py): trained exactly, or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drills.compare import (
    assert_every_sample_once,
    assert_follows,
    assert_same_end,
    assert_same_run,
)
from tests.drills.test_odd_guests import ODD, SHORT
from tests.run import finish, skip_override, train

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MAKES = "tests.uncommon_guests."
TOKENS = (f"data._target_={ODD}Tokens",)
PAIRS = ("data._target_=tests.guests.Pairs", "model.vocab_size=16")
IMAGES = (f"data._target_={MAKES}Bytes",)
NESTED = ("model.layers=[{bias: true},{bias: false}]", "model.head={bias: false}")
DRAWS, ROUNDS, COUPLED = 0.6, 0.03, None  # how far another number of ranks may lead
TRAINS = {
    "a scan": ("Scan", TOKENS, ROUNDS),
    "experts": ("Routed", TOKENS, ROUNDS),
    "encoder and decoder": ("Translating", PAIRS, DRAWS),
    "images in bytes": ("Patches", IMAGES, DRAWS),
    "diffusion": ("Denoising", IMAGES, DRAWS),
    "contrastive": ("Matching", PAIRS, COUPLED),
    "odd shapes": ("OddShapes", TOKENS, ROUNDS),
    "strides": ("Strided", TOKENS, ROUNDS),
    "weight norm": ("Normalised", (*TOKENS, "model.how=old"), ROUNDS),
    "spectral norm": ("Normalised", (*TOKENS, "model.how=spectral"), ROUNDS),
    "an LSTM with dropout": ("Remembering", TOKENS, DRAWS),
    "a block three times": ("Repeated", (*TOKENS, "model.reentrant=true"), DRAWS),
    "nested settings": ("Configured", (*TOKENS, *NESTED, "model.name=null"), ROUNDS),
    "compiles itself": ("Compiled", TOKENS, ROUNDS),
    "tied, with buffers": ("TiedBuffered", TOKENS, 0.1),
    "made in FP16, half frozen": ("Halved", TOKENS, ROUNDS),
}


@pytest.mark.twin
@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1", "ddp"])
@pytest.mark.parametrize("name", TRAINS)
def test_it_is_as_safe_as_the_host(tmp_path: Path, name: str, engine: str) -> None:
    model, more, within = TRAINS[name]
    how = [*SHORT, f"model._target_={MAKES}{model}", *more, f"parallel={engine}"]
    poisoned = finish(tmp_path / "poisoned", *how, "faults=[poison@samples=120-140]")
    assert poisoned.journal("rollback"), poisoned.tail
    skip = skip_override(poisoned.summary["skipped"])
    assert_same_end(poisoned, finish(tmp_path / "never", *how, skip))
    whole = finish(tmp_path / "whole", *how)
    kill = "faults=[kill@step=15,rank=1]"
    assert train(tmp_path / "killed", *how, kill).code != 0
    assert_same_run(finish(tmp_path / "killed", *how, kill), whole)
    for steps, ranks in ((8, 2), (16, 1), (24, 3)):
        run = finish(tmp_path / "elastic", *how, f"steps={steps}", ranks=ranks)
    samples = 100_000 if more is PAIRS else 5000
    assert_every_sample_once(run, samples=samples, batch=8)
    if within is None:
        assert "depends on the others of its micro-batch" in whole.text
    else:
        assert_follows(run, whole, within=within)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_logits_in_parts_are_the_same_run(tmp_path: Path, engine: str) -> None:
    how = [*SHORT, f"model._target_={MAKES}TiedBuffered", *TOKENS, f"parallel={engine}"]
    whole = finish(tmp_path / "whole", *how)
    parts = finish(tmp_path / "parts", *how, "model.loss_chunk_mib=0.0003")
    assert_follows(parts, whole)
    assert "held whole" not in parts.text
    held = train(tmp_path / "held", *how, "model.loss_chunk_mib=0.0003", "parallel=zero3")
    assert "the logits of a micro-batch are held whole" in held.text, held.tail


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("Stages", ("parallel=fsdp",), "stages.1 is not called alike for each sample"),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (
                ("Stages", ("parallel=zero3",), "is not called alike for each sample"),
                ("Routed", ("parallel=zero2",), "is not called alike for each sample"),
                ("Complex", (), "filter is torch.complex64; only floating-point ones"),
                ("OddShapes", ("model.none=true",), "none of shape [0, 4] has no elements"),
                ("Sparse", (), "embedding is a Embedding with sparse=True"),
                ("Lazy", (), "head is a LazyLinear, whose weights have no shape"),
            )
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_words(
    tmp_path: Path, model: str, more: tuple[str, ...], words: str
) -> None:
    run = train(tmp_path / "run", *SHORT, f"model._target_={MAKES}{model}", *TOKENS, *more)
    assert run.code != 0 and "error: " in run.text and words in run.text, run.tail
