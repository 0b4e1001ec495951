"""The examples of data run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runner.tools.report.metrics_text import metrics_text, samples_of
from runner.tools.report.page import page
from runner.tools.report.run_reader import RunReader, RunStatus
from tests import warm
from tests.run import finish, metrics_step

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def test_the_mixture_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("steps=12", f"data.cache={tmp_path}/cache", "schedule.total=24")
    run = finish(tmp_path / "run", *few, ranks=0, program=EXAMPLES / "mixture.py")
    lines = run.metrics()
    read = {name: sum(line[f"samples/{name}"] for line in lines) for name in ("code", "words")}
    assert sum(read.values()) == 12 * 32 and 0.15 < read["words"] / (12 * 32) < 0.35
    monkeypatch.setenv("SHARE", "0.75")
    longer = ("steps=16", *few[1:], "resume.allow=[data.sources]")
    run = finish(tmp_path / "run", *longer, ranks=0, program=EXAMPLES / "mixture.py")
    assert [line["detail"]["start"] > 0 for line in run.journal("mixture")] == [False, True]


def test_the_sft_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    chats = ("data=hf", "steps=25", f"data.cache={tmp_path}/cache", "data.vocab_size=null",
             "data.seq_len=64", "optim.lr=1e-2")  # fmt: skip
    run = finish(tmp_path / "run", *chats, ranks=0, program=EXAMPLES / "sft.py")
    losses = [line["loss"] for line in run.metrics()]
    assert losses[-1] < 0.8 * losses[0], losses
    # Five or so chats of some thirteen tokens in a window; of each the answer and its end count.
    tokens = [line["tokens"] / 32 for line in run.metrics()]
    assert all(6 < count < 24 for count in tokens), tokens


def test_the_example_of_an_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{ROOT}")
    told = ("model=tiny", "data=synthetic", "steps=40", "schedule.total=40", "optim.lr=3e-3")
    run = finish(tmp_path / "run", *told, ranks=2, program=EXAMPLES / "own_model.py")
    losses = [line["loss"] for line in run.metrics()]
    assert losses[0] > 0.9 and losses[-1] < 0.6, losses


def test_the_example_of_an_own_loop(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "own_loop.py"), str(tmp_path / "run")]
    done = warm.finished(command, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "skipped batches [(100, 101)], 299 updates" in done.stdout
    assert float(done.stdout.rpartition("loss ")[2]) < 0.5
    killed = tmp_path / "killed"
    again = [*command[:2], str(killed)]
    process = warm.WarmPopen(again, stdout=subprocess.DEVNULL, text=True)
    while metrics_step(killed) < 150:
        assert process.poll() is None, "it ended before it could be killed"
    process.kill()
    process.wait()
    assert warm.finished(again, timeout=300).returncode == 0
    digests = {
        json.loads((out / "summary.json").read_text())["state_digest"]
        for out in (tmp_path / "run", killed)
    }
    assert len(digests) == 1


def test_the_example_with_pictures(tmp_path: Path) -> None:
    """BatchNorm, random flips, a metric, and epochs; the closing table names the page."""
    told = ("epochs=1.5", "batch.global_size=32", "eval.every=0", "track.report_minutes=0",
            "track._target_=tests.tracking.Recorder", f"track.path={tmp_path}/told")  # fmt: skip
    command = [sys.executable, str(EXAMPLES / "vision.py"), f"out={tmp_path}/run", *told]
    done = warm.finished(command, timeout=300)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    [(samples, steps)] = re.findall(r"epochs=1\.5 of (\d+) training .*: steps=(\d+)", text)
    assert 580 < int(samples) < 600, "the held-out ones are left out"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert int(steps) == len(lines) == -(-int(samples) * 3 // 64)
    assert lines[-1]["accuracy"] > 0.9
    assert "report.html" in text
    assert "samples/s" in text and "tok/s" not in text and "nats" not in text
    assert "samples from " in text, "no tokens are spoken of"
    run = RunReader(tmp_path / "run")
    run.update()
    assert dict(RunStatus(run).numbers())["samples/s"]
    assert "holdfast_samples_per_second{" in metrics_text({"a": samples_of(run)})
    tracked = (tmp_path / "told").read_text()
    assert "train/samples_per_second" in tracked and "tokens" not in tracked
    body = page([run])
    assert "Samples per second" in body and "Tokens per second" not in body
