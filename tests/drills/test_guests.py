"""P12: P1 to P5 hold for models from elsewhere; real runs, real kills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drills.compare import (
    assert_every_sample_once,
    assert_follows,
    assert_same_end,
    assert_same_run,
)
from tests.run import finish, metrics_step, skip_override, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SHORT = ("steps=40", "schedule.total=40", "data.seq_len=32", "guard.min_history=8")
POISON = "faults=[poison@samples=520-610]"
FULL = pytest.mark.full
# Images with labels, and an objective like DPO's with two sequences a sample.
OWN_DATA = {
    "Seeing": ("data._target_=tests.guests.Images",),
    "Preferring": ("data._target_=tests.guests.Pairs", "model.vocab_size=16"),
}
MODELS = [
    "Tied",
    *(pytest.param(name, marks=FULL) for name in ("Recurrent", "Convolved")),
    *(pytest.param(name, marks=FULL) for name in ("llama", "gpt2", "lora", *OWN_DATA)),
]
ENGINES = ["fsdp", *(pytest.param(name, marks=FULL) for name in ("zero1", "zero3"))]


def told(model: str, engine: str, *more: str) -> list[str]:
    own = OWN_DATA.get(model, ())
    return [*SHORT, f"model._target_=tests.guests.{model}", f"parallel={engine}", *own, *more]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_poison_ends_as_if_it_was_never_there(tmp_path: Path, model: str, engine: str) -> None:
    poisoned = finish(tmp_path / "poisoned", *told(model, engine, POISON))
    [line] = poisoned.journal("rollback")
    assert line["sample_ids"] and "NaN" in line["reason"], poisoned.tail
    skip = skip_override(poisoned.summary["skipped"])
    never = finish(tmp_path / "never", *told(model, engine, skip))
    assert not never.journal("discard"), never.tail
    assert_same_end(poisoned, never)
    assert_every_sample_once(poisoned)


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
@pytest.mark.parametrize(
    "model", ["Tied", "Recurrent", "Convolved", "llama", "gpt2", "lora", *OWN_DATA]
)
def test_killed_is_as_not_killed_and_ranks_may_change(
    tmp_path: Path, model: str, engine: str
) -> None:
    whole = finish(tmp_path / "whole", *told(model, engine))
    out = tmp_path / "killed"
    killed = start(out, *told(model, engine))
    killed.until(lambda out: metrics_step(out) >= 17)
    killed.kill()
    assert_same_run(finish(out, *told(model, engine)), whole)
    elastic = tmp_path / "elastic"
    for steps, ranks in ((12, 2), (25, 1), (40, 3)):
        run = finish(elastic, *told(model, engine), f"steps={steps}", ranks=ranks)
    assert_every_sample_once(run)
    assert run.summary["cursor"] == whole.summary["cursor"]
    # Which units are dropped depends on the micro-batches, and these on the ranks.
    assert_follows(run, whole, within=0.15 if model == "Convolved" else None)


@FULL
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_peak_memory_does_not_grow_with_tokens_times_vocabulary(tmp_path: Path, name: str) -> None:
    """At Llama 3's vocabulary, of whole processes: FP32 logits of 3,072 tokens take 1.6 GB, and
    those of 1,024 more than one GB less."""
    peaks = []
    for tokens in (1024, 3072):
        words = [f"out={tmp_path / str(tokens)}", f"model._target_=tests.guests.{name}"]
        words += ["data=synthetic", "data.vocab_size=128256", f"data.seq_len={tokens}"]
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
