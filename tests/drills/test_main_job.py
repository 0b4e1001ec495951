"""The job a newcomer starts: real text, the scripts, an installed wheel, TensorBoard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import warm
from tests.programs import ended
from tests.run import Result, finish, train

ROOT = Path(__file__).parents[2]


def shell(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return ended(*words, cwd=cwd, env=env, timeout=800)


@pytest.fixture(scope="module")
def real_text(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """``scripts/train.sh`` as it is, but for its length and the size of a batch."""
    out = tmp_path_factory.mktemp("main") / "run"
    done = shell(
        "bash", str(ROOT / "scripts" / "train.sh"), f"out={out}", "steps=40", "eval.every=20",
        "checkpoint.every=20", "data.seq_len=128", "batch.global_size=8", "batch.micro_size=4",
        cwd=out.parent,
    )  # fmt: skip
    return Result(out=out, code=done.returncode, text=done.stdout + done.stderr)


def test_loss_on_real_text_falls_below_3_2_nats_per_byte(real_text: Result) -> None:
    assert real_text.code == 0, real_text.tail
    losses = [line["loss"] for line in real_text.metrics()]
    assert losses[0] > 5.0, "an untrained model knows nothing of 257 bytes"
    assert max(losses[-5:]) < 3.2, real_text.tail
    held_out = [line["eval_loss"] for line in real_text.metrics() if line["eval_loss"]]
    assert len(held_out) == 2 and held_out[1] < min(3.2, held_out[0])
    assert not real_text.journal("discard") and not real_text.journal("rollback"), "a healthy run"


def test_what_a_newcomer_reads(real_text: Result) -> None:
    lines = real_text.text.splitlines()
    progress = [line for line in lines if line.startswith("step ")]
    for words in ("loss", "grad", "lr", "tok/s", "ETA", "clean"):
        assert words in progress[-1], progress[-1]
    assert "discarded" not in progress[-1], "what never happened takes no room"
    assert progress[-1].startswith("step 40/40") and "held-out" in progress[-1]
    for words in ("done: all steps applied", "summary.json", "journal.jsonl", "metrics.jsonl"):
        assert words in real_text.text, real_text.tail
    data = real_text.summary["data"]
    assert data.startswith("Python's standard library (")
    assert any(line.startswith("holdfast: ") and data in line for line in lines)
    assert "Traceback" not in real_text.text and "Warning" not in real_text.text, real_text.tail


def test_its_weights_load_elsewhere(real_text: Result, tmp_path: Path) -> None:
    words = ["ring", str(real_text.out), "--verify", "--export", str(tmp_path / "weights")]
    done = warm.finished([sys.executable, "-m", "runner", *words], timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    assert weights["embedding.weight"].shape == (257, 128)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_the_scripts_end_with_the_runners_own_code(tmp_path: Path) -> None:
    train_sh = str(ROOT / "scripts" / "train.sh")
    wrong = shell("bash", train_sh, "steps=none", cwd=tmp_path)
    assert wrong.returncode == 2 and "steps=none" in wrong.stderr, wrong.stdout + wrong.stderr


def test_tensorboard_has_every_step_once_after_a_restart(tmp_path: Path) -> None:
    options = ("track=tensorboard", "eval.every=10", "steps=20", "faults=[kill@step=15,rank=0]")
    assert train(tmp_path / "run", *options, ranks=0).code != 0
    result = finish(tmp_path / "run", *options, ranks=0)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sorted(points) == list(range(1, 21))
    for line in result.metrics():
        assert points[line["step"]] == pytest.approx(line["loss"], rel=1e-6)
    assert [event.step for event in events.Scalars("eval/loss")] == [10, 20]
