"""P12: P1 to P5 hold for models and data from elsewhere, or they are refused in words."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests.drills.compare import (
    assert_as_if_never_there,
    assert_every_sample_once,
    assert_follows,
    assert_killed_is_as_not,
    in_turns,
    noise,
)
from tests.rows import full, full_but
from tests.run import finish, train

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SHORT = ("steps=40", "schedule.total=40", "data.seq_len=32", "guard.min_history=8")
POISON = "faults=[poison@samples=520-610]"
SHORTER = (
    *("steps=24", "schedule.total=24", "data.seq_len=8", "guard.min_history=8"),
    *("batch.global_size=8", "batch.micro_size=2"),
    *("checkpoint.every=6", "checkpoint.clean_after=4"),
)
MAKES = "tests.uncommon_guests."


def tokens(how: str) -> tuple[str, ...]:
    return f"data._target_={MAKES}Tokens", f"data.how={how}"


TOKENS, POINTS = tokens("plain"), (f"data._target_={MAKES}Uneven",)
PAIRS = ("data._target_=tests.guests.Pairs", "model.vocab_size=16")
IMAGES = ("data._target_=tests.guests.Images",)
NESTED = ("model.layers=[{bias: true},{bias: false}]", "model.head={bias: false}")
DRAWS, ROUNDS, COUPLED = 0.6, 0.03, None  # how far another number of ranks may lead


@dataclass(frozen=True)
class Guest:
    """A model of tests/guests.py, or one of tests/uncommon_guests.py, which are trained shorter.

    Args:
        within: how far losses may lie apart on other ranks; -1: as sums round.
    """

    name: str
    settings: tuple[str, ...] = ()
    within: float | None = -1

    def how(self, *more: str) -> list[str]:
        return [f"model._target_={self.name}", *self.settings, *more]


GUESTS = {
    **{name: Guest(f"tests.guests.{name}") for name in ("Tied", "Recurrent")},
    # Which units are dropped depends on the micro-batches, and these on the ranks.
    "Convolved": Guest("tests.guests.Convolved", within=0.15),
    **{name: Guest(f"tests.guests.{name}") for name in ("llama", "gpt2", "lora")},
    "Seeing": Guest("tests.guests.Seeing", IMAGES),
    # An objective like DPO's, with two sequences a sample.
    "Preferring": Guest("tests.guests.Preferring", PAIRS),
}
UNCOMMON = {
    "a scan": Guest("Scan", TOKENS, ROUNDS),
    "experts": Guest("Routed", TOKENS, ROUNDS),
    "contrastive": Guest("Matching", PAIRS, COUPLED),
    "odd shapes": Guest("OddShapes", TOKENS, ROUNDS),
    "strides": Guest("Strided", TOKENS, ROUNDS),
    "weight norm": Guest("Normalised", (*TOKENS, "model.how=old"), ROUNDS),
    "spectral norm": Guest("Normalised", (*TOKENS, "model.how=spectral"), ROUNDS),
    "an LSTM with dropout": Guest("Remembering", TOKENS, DRAWS),
    "a block three times": Guest("Repeated", (*TOKENS, "model.reentrant=true"), DRAWS),
    "nested settings": Guest("Configured", (*TOKENS, *NESTED, "model.name=null"), ROUNDS),
    "tied, with buffers": Guest("TiedBuffered", TOKENS, 0.1),
    "one weight under three names": Guest("TiedElsewhere", TOKENS, 0.1),
    "made in FP16, half frozen": Guest("Halved", TOKENS, ROUNDS),
    "a bare Sequential of a function": Guest("made_by_a_function", tokens("uneven"), DRAWS),
    "losses in FP64, strings and a collate": Guest("Counting", POINTS, ROUNDS),
    "counts that are no whole numbers": Guest("Counting", ("model.how=floats", *POINTS), ROUNDS),
    "BatchNorm without statistics": Guest("BatchNormed", ("model.without=true", *IMAGES), COUPLED),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    full_but([("Tied", "fsdp")], [("Tied", "fsdp"), *product(GUESTS, ["zero3"])]),
)
def test_poison_ends_as_if_it_was_never_there(tmp_path: Path, name: str, engine: str) -> None:
    how = GUESTS[name].how(*SHORT, f"parallel={engine}")
    poisoned = assert_as_if_never_there(tmp_path, how, POISON)
    [line] = poisoned.journal("rollback")
    assert line["sample_ids"] and "NaN" in line["reason"], poisoned.tail
    assert_every_sample_once(poisoned)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
@pytest.mark.parametrize("name", GUESTS)
def test_killed_is_as_not_killed_and_ranks_may_change(
    tmp_path: Path, name: str, engine: str
) -> None:
    guest = GUESTS[name]
    how = guest.how(*SHORT, f"parallel={engine}")
    whole = assert_killed_is_as_not(tmp_path, how, at=17)
    run = in_turns(tmp_path / "elastic", how, (12, 2), (25, 1), (40, 3))
    assert_every_sample_once(run)
    assert run.summary["cursor"] == whole.summary["cursor"]
    assert_follows(run, whole, within=guest.within if guest.within != -1 else None)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
@pytest.mark.parametrize("name", UNCOMMON)
def test_uncommon_ones_are_as_safe(tmp_path: Path, name: str, engine: str) -> None:
    guest = UNCOMMON[name]
    how = [f"model._target_={MAKES}{guest.name}", *guest.settings, *SHORTER, f"parallel={engine}"]
    if (name, engine) == ("spectral norm", "zero1"):  # which is BF16 alone
        refused = train(tmp_path / "refused", *how)
        assert refused.code and "must have the same dtype" in refused.text, refused.tail
        return
    assert_as_if_never_there(tmp_path, how, "faults=[poison@samples=120-140]")
    whole = assert_killed_is_as_not(tmp_path, how, at=14)
    run = in_turns(tmp_path / "elastic", how, (8, 2), (16, 1), (24, 3))
    samples = 100_000 if {*PAIRS, *IMAGES} & {*guest.settings} else 5000
    assert_every_sample_once(run, samples=samples, batch=8)
    if guest.within is not None:
        assert_follows(run, whole, within=guest.within)
    elif guest.name == "Matching":
        assert "depends on the others of its micro-batch" in whole.text


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_logits_in_parts_are_the_same_run(tmp_path: Path, engine: str) -> None:
    how = [*SHORTER, f"model._target_={MAKES}TiedBuffered", *TOKENS, f"parallel={engine}"]
    whole = finish(tmp_path / "whole", *how)
    parts = finish(tmp_path / "parts", *how, "model.loss_chunk_mib=0.0003")
    # Its logits come from weights ten times as large, and so do BF16's steps.
    assert_follows(parts, whole, within=10 * noise(whole))
    assert "held whole" not in parts.text
    held = train(tmp_path / "held", *how, "model.loss_chunk_mib=0.0003", "parallel=zero3")
    assert "the logits of a micro-batch are held whole" in held.text, held.tail


@pytest.mark.parametrize(
    ("model", "more", "code", "words"),
    [
        ("Stages", (*TOKENS, "parallel=fsdp"), 2, "stages.1 is not called alike for each sample"),
        full("Routed", (*TOKENS, "parallel=zero2"), 2, "is not called alike for each sample"),
        full("Halved", tokens("negative"), 2, "samples can be read; tests.uncommon_guests.To"),
        full("Halved", (f"data._target_={MAKES}Streaming",), 2, "has no vocab_size that says"),
        full("Counting", ("model.how=mean", *POINTS), 2, "(reduction='none', and what each is"),
        full("Counting", ("model.how=nothing", *POINTS), 3, "nothing counts in these samples"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_words(
    tmp_path: Path, model: str, more: tuple[str, ...], code: int, words: str
) -> None:
    """More of them: tests/mechanism/test_uncommon_models.py."""
    how = (*SHORTER, f"model._target_={MAKES}{model}", *more)
    run = train(tmp_path / "run", *how, ranks=2 if "parallel" in more[-1] else 0)
    assert run.code == code or run.code == 1, run.tail
    reasons = [line["reason"] for line in run.journal()] if code == 3 else []
    assert words in " ".join([run.text, *reasons]), run.tail


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary(tmp_path: Path, name: str) -> None:
    """At Llama 3's vocabulary, of whole processes: FP32 logits of 3,072 tokens take 1.6 GB, and
    those of 1,024 more than one GB less."""
    peaks = []
    for length in (1024, 3072):
        words = [f"out={tmp_path / str(length)}", f"model._target_=tests.guests.{name}"]
        words += ["data=synthetic", "data.vocab_size=128256", f"data.seq_len={length}"]
        words += ["batch.global_size=1", "batch.micro_size=1", "steps=2", "schedule.warmup=1"]
        words += ["parallel=single", "compute.precision=fp32", "eval.every=0", "data.workers=0"]
        command = [sys.executable, "-m", "runner", *words, "debug.preflight=false"]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
        assert run.returncode == 0
        peaks.append(usage.ru_maxrss * 1024)
    print(f"{name}: {peaks[0] / 1e9:.2f} GB at 1,024 tokens, {peaks[1] / 1e9:.2f} GB at 3,072")
    assert peaks[1] - peaks[0] < 250e6, peaks
